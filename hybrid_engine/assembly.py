"""Puts an inference engine beside a live training model.

Shared by those who bring the training model: `ActorHybridWorker` builds one, `HybridEngine(model=...)` shards one, and
`attach` and `megatron_script` find one running.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hybrid_engine.config import HybridConfig
from hybrid_engine.layouts.differences import differences
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models.lora_tensors import VLLM_LORA_RANKS, ActorLora, LoraSettings, adapted_modules, adapter_shapes
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.ports import InferenceWeights, Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.holdings import holdings_of
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch.rendezvous import gather_layouts
from hybrid_engine.tracing.timeline import check_path

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings

logger = logging.getLogger("hybrid_engine")

TrainerT = TypeVar("TrainerT", bound=Trainer)


@dataclass(frozen=True)
class EngineParts(Generic[TrainerT]):
    """What a `HybridEngine` is made of; see there.

    Attributes:
        training_layouts: of all ranks; None where they are not known.
        adapter: what completions are drawn with, where LoRA is delivered by itself.
    """

    train: TrainerT
    inference: InferenceEngine
    config: HybridConfig
    offloader: Offloader
    training_layouts: Sequence[Layout] | None
    weights: InferenceWeights
    adapter: str | None = None


def put_beside(
    train: TrainerT,
    config: HybridConfig,
    table: ModelTable,
    job: Job,
    owner: ExitStack,
    *,
    lora: ActorLora | None = None,
    tokenizer_dir: str | None = None,
    gives_back: bool = True,
) -> EngineParts[TrainerT]:
    """Build vLLM for this trainer, whose state leaves the device. Collective, within `job.agreement.building()`.

    Args:
        train: whose weights vLLM will have.
        config: both sides.
        table: the model's name table.
        job: of all ranks.
        owner: ends what is built here.
        lora: what is delivered by itself.
        tokenizer_dir: where it is not the model's.
        gives_back: at the end, and if anything fails on any rank, training state is back on the device.
    """
    with job.agreement.phase("taking training state off the device", SHORT_PATIENCE):
        offloader = Offloader(train.offload_items, reachable=train.reachable_tensors)
        if gives_back:
            owner.callback(offloader.onload)
        offloader.offload()  # vLLM looks at the memory that is free while it starts
    layouts = gather_layouts(job, train.weights)
    inference = build_inference_engine(config, table, layouts, job, lora, tokenizer_dir)
    owner.callback(inference.shutdown)
    with job.agreement.phase("delivering adapters"):
        weights = served_weights(inference, config, lora)
    adapter = None if lora is None else lora.name
    return EngineParts(train, inference, config, offloader, layouts, weights, adapter)


def build_inference_engine(
    config: HybridConfig,
    table: ModelTable,
    training_layouts: Sequence[Layout],
    job: Job,
    lora: ActorLora | None = None,
    tokenizer_dir: str | None = None,
) -> InferenceEngine:
    """vLLM in the ranks that train, each with the shard that suits what it holds for training. Collective.

    vLLM looks at the memory that is free while it starts: training state is best off the device meanwhile.
    `training_layouts`: of all ranks (`rendezvous.gather_layouts`). Which rank takes which shard follows from them and
    from what vLLM is computed to hold; with the engine there, that is compared with the truth. `lora`: what is
    delivered by itself. `tokenizer_dir`: where it is not the model's. A failure on any rank is raised on all, and
    leaves no engine.
    """
    generate, sizes = config.generate_config, config.generate_config.sizes(job.world_size)
    with job.agreement.phase("choosing the order of ranks"):
        if generate.trace is not None and job.rank == 0:
            check_path(generate.trace)
        positions, order = None, tuple(range(job.world_size))
        if generate.infer_rank_order != "sequential":
            positions = inference_side(table, sizes, config.actor_config.params_dtype)
            held = holdings_of(Layout.merge(training_layouts), job.world_size)
            order = rank_order(generate.infer_rank_order, held, positions.holdings, job.hosts, sizes.tensor)
    with ExitStack() as undo:
        with job.agreement.phase("building the inference engine", SHORT_PATIENCE):
            from hybrid_engine.backends.vllm import InferenceEngine

            settings = inference_settings(config, job.world_size, order, lora, tokenizer_dir)
            engine = InferenceEngine(settings, table.shapes, job, dtypes=table.dtypes)
            undo.callback(engine.shutdown)  # where another rank fails, too
            if positions is not None:
                position = settings.sizes.place_of(job.rank).position
                warn_of_differences(positions.layout_of(position), engine.adaptor.layout(), job.rank)
        undo.pop_all()
    return engine


def warn_of_differences(computed: Layout, traced: Layout, rank: int) -> None:
    """Log what `rank` holds otherwise than the layout says that the order of ranks was chosen by.

    What is moved follows the traced layout, so the weights are right all the same.
    """
    if wrong := differences(computed, traced):
        logger.warning(
            "rank %d: vLLM holds other parts of %d tensors than layouts/inference.py computes, e.g. %s: the order of "
            "ranks may move more bytes than it must",
            *(rank, len(wrong), wrong[0]),
        )


def inference_settings(
    config: HybridConfig,
    world_size: int,
    rank_order: tuple[int, ...] | None = None,
    lora: ActorLora | None = None,
    tokenizer_dir: str | None = None,
) -> InferenceSettings:
    """vLLM's settings from a checked configuration.

    `rank_order`: global rank at each inference position; None counts them in order. `lora`: what is delivered by
    itself. `tokenizer_dir`: where it is not the model's.
    """
    from hybrid_engine.backends.vllm import InferenceSettings

    return InferenceSettings(
        str(config.model),
        config.generate_config.sizes(world_size, rank_order),
        config.generate_config,
        config.wire_dtype,
        tokenizer_dir=tokenizer_dir,
        **({} if lora is None else _lora_settings(lora)),
    )


def _lora_settings(lora: ActorLora) -> dict[str, Any]:
    """vLLM's settings for a LoRA that is delivered by itself."""
    return {
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= lora.settings.largest_rank),
        "lora_target_modules": lora.settings.target_modules,
    }


def megatron_lora(config: HybridConfig, table: ModelTable) -> ActorLora | None:
    """What is delivered by itself of the adapters that `actor_config.lora` describes; None where they are merged."""
    lora = config.actor_config.lora
    if config.generate_config.lora_delivery != "adapter" or lora is None:
        return None
    shapes = adapter_shapes(table, lora.target_modules, lora.rank)
    return ActorLora(LoraSettings(lora.rank, lora.alpha, adapted_modules(shapes)), shapes)


def served_weights(engine: InferenceEngine, config: HybridConfig, lora: ActorLora | None) -> InferenceWeights:
    """What a switch writes: the weights of an engine that was built with this `lora`, and that beside them."""
    if lora is None:
        return engine.adaptor
    from hybrid_engine.backends.vllm.lora.weights_with_lora import WeightsWithLora

    engine.trained_lora = lora.name
    return WeightsWithLora(engine.adaptor, engine.loras, lora, config.wire_dtype)
