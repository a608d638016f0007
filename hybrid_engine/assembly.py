"""Puts an inference engine beside a live training model.

Shared by those who bring the training model: `ActorHybridWorker` builds one, `HybridEngine(model=...)` shards one, and
`attach` and `megatron_script` find one running.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from hybrid_engine.config import FsdpConfig, GenerateConfig, HybridConfig, load_config
from hybrid_engine.config.loading import generate_values, read_train_config
from hybrid_engine.errors import ConfigError, ParameterMismatchError, Violation
from hybrid_engine.files.hub import Snapshot
from hybrid_engine.files.model_files import TOKENIZER, files_like
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models import table_for
from hybrid_engine.models.lora_tensors import VLLM_LORA_RANKS, ActorLora, LoraSettings, adapted_modules, adapter_shapes
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.ports import InferenceWeights, Trainer
from hybrid_engine.probes import WithAttention
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import torch_defaults
from hybrid_engine.records.layout import Layout, differences
from hybrid_engine.records.sides import Side, layout_messages
from hybrid_engine.switch.rendezvous import gather_side
from hybrid_engine.tracing import check_path

if TYPE_CHECKING:
    from hybrid_engine.backends.fsdp import ShardedModel
    from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings
    from hybrid_engine.backends.vllm.server.inference import ServedInference


TrainerT = TypeVar("TrainerT", bound=Trainer)


@dataclass(frozen=True)
class EngineParts(Generic[TrainerT]):
    """What a `HybridEngine` is made of; see there.

    Attributes:
        training_side: what all ranks hold for training; None where that is not known.
        adapter: what completions are drawn with, where LoRA is delivered by itself.
    """

    train: TrainerT
    inference: InferenceEngine | ServedInference
    config: HybridConfig
    offloader: Offloader
    training_side: Side | None
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
    """Build vLLM for this trainer, whose state leaves the device, or find the servers.

    Collective, within `job.agreement.building()`.

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
        offloader = Offloader(train)
        if gives_back:
            owner.callback(offloader.onload)
        trainer: object = train
        if isinstance(trainer, WithAttention) and config.generate_config.check_compute != "off":
            trainer.attention()  # transformers' is read while its classes are as the trainer knows them
        if not config.generate_config.servers:
            offloader.offload()  # vLLM looks at the memory that is free while it starts
    if config.generate_config.servers:
        from hybrid_engine.backends.vllm.server.inference import ServedInference

        served = ServedInference(config, job, tokenizer_dir)
        return EngineParts(train, served, config, offloader, None, served.adaptor)
    side = gather_side(job, train.weights)
    inference = build_inference_engine(config, table, side, job, lora, tokenizer_dir)
    owner.callback(inference.shutdown)
    with job.agreement.phase("delivering adapters"):
        weights = served_weights(inference, config, lora)
    adapter = None if lora is None else lora.name
    return EngineParts(train, inference, config, offloader, side, weights, adapter)


def build_inference_engine(
    config: HybridConfig,
    table: ModelTable,
    training_side: Side,
    job: Job,
    lora: ActorLora | None = None,
    tokenizer_dir: str | None = None,
) -> InferenceEngine:
    """vLLM in the ranks that train, each with the shard that suits what it holds for training. Collective.

    vLLM looks at the memory that is free while it starts: training state is best off the device meanwhile.
    `training_side`: of all ranks (`rendezvous.gather_side`). Which rank takes which shard follows from them and
    from what vLLM's loader writes at each position, traced first. `lora`: what is delivered by itself.
    `tokenizer_dir`: where it is not the model's. A failure on any rank is raised on all, and leaves no engine.
    """
    generate, positions = config.generate_config, None
    with job.agreement.phase("checking the inference settings"):
        if generate.trace is not None and job.rank == 0:
            check_path(generate.trace)
        settings = inference_settings(config, job.world_size, lora, tokenizer_dir)
    # Where each position has the whole model, no order is better than another.
    if generate.infer_rank_order != "sequential" and settings.sizes.ranks_per_instance > 1:
        positions = gather_positions(settings, table, job)
        with job.agreement.phase("choosing the order of ranks"):
            held, needed = training_side.placed.holdings, positions.placed.holdings
            order = rank_order(generate.infer_rank_order, held, needed, job.hosts, settings.sizes.tensor)
            settings = replace(settings, sizes=replace(settings.sizes, rank_order=order))
    with ExitStack() as undo:
        with job.agreement.phase("building the inference engine", SHORT_PATIENCE):
            from hybrid_engine.backends.vllm import InferenceEngine

            engine = InferenceEngine(settings, table.shapes, job, dtypes=table.dtypes)
            undo.callback(engine.shutdown)  # where another rank fails, too
            if positions is not None:
                position = settings.sizes.place_of(job.rank).position
                require_traced_before(positions.kind(position), engine.adaptor.layout(), job.rank, position)
        undo.pop_all()
    return engine


def gather_positions(settings: InferenceSettings, table: ModelTable, job: Job) -> Side:
    """What vLLM holds at every position, by position in place of rank; each rank traces one. Collective."""
    with job.agreement.phase("tracing vLLM's model without memory"):
        from hybrid_engine.backends.vllm import layout_of_position

        own = layout_messages(layout_of_position(settings, job, table.shapes, dtypes=table.dtypes))
    told, messages = job.agreement.share(own, "exchange of inference positions")
    with job.agreement.phase("choosing the order of ranks"):
        return Side.from_messages(told, messages)


def require_traced_before(expected: Layout, found: Layout, rank: int, position: int) -> None:
    """Raise ParameterMismatchError naming each tensor of which an engine holds other parts than its model did without
    memory: the order of ranks was chosen by that."""
    if wrong := differences(expected, found):
        where = f"on rank {rank} vLLM holds other parts of it than were traced for position {position} without memory"
        remedy = "Set generate_config.infer_rank_order to sequential"
        raise ParameterMismatchError([f"{name}: {where}. {remedy}" for name in wrong])


def check_inference(config: HybridConfig, job: Job) -> None:
    """Raise what keeps vLLM from being built, while nothing is built yet; servers say what they cannot do."""
    if config.generate_config.servers:
        return
    from hybrid_engine.backends.vllm import check_before_building, require_vllm

    require_vllm(allow_version=config.generate_config.allow_version)
    check_before_building(inference_settings(config, job.world_size), job)


def inference_settings(
    config: HybridConfig,
    world_size: int,
    lora: ActorLora | None = None,
    tokenizer_dir: str | None = None,
) -> InferenceSettings:
    """vLLM's settings from a checked configuration, in sequential order.

    `lora`: what is delivered by itself. `tokenizer_dir`: where it is not the model's.
    """
    from hybrid_engine.backends.vllm import InferenceSettings

    return InferenceSettings(
        str(config.model),
        config.generate_config.sizes(world_size),
        config.generate_config,
        config.served_dtype,
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
    from hybrid_engine.backends.vllm.lora import WeightsWithLora

    engine.trained_lora = lora.name
    return WeightsWithLora(engine.adaptor, engine.loras, lora, config.served_dtype)


@torch_defaults()  # what is made here is trained and filled in other modes of torch
def build_parts(
    model: torch.nn.Module,
    owner: ExitStack,
    *,
    rollout_config: Mapping[str, Any] | None = None,
    train_config: Mapping[str, Any] | None = None,
    shard: bool = True,
    enable_reshard: bool = True,
    compress_reshard: bool = False,
    compression_dtype: torch.dtype | str = torch.bfloat16,
) -> EngineParts[ShardedModel]:
    """Shard the model, unless it is or stays whole, and build vLLM for it. Collective.

    `owner` ends what is made here; the other arguments are `HybridEngine`'s. Raises, on all ranks: ConfigError,
    UnknownModelError, ModelError, each with everything that is wrong.
    """
    from hybrid_engine.backends.fsdp import ShardedModel
    from hybrid_engine.backends.fsdp.sharded_tensors import is_sharded, mesh_of, shard_model

    if not enable_reshard:
        remedy = "Leave it out: vLLM's weights come by resharding alone"
        raise ConfigError([Violation("enable_reshard", "False", remedy)])
    values = generate_values(rollout_config or {})
    if compress_reshard:
        values |= {"compress_reshard": True, "compression_dtype": str(compression_dtype).removeprefix("torch.")}
    job = owner.enter_context(closing(Job.join(values.get("timeout_seconds", GenerateConfig().timeout_seconds))))
    with job.agreement.building():
        with job.agreement.phase("checking the configuration"):
            if not shard and train_config is not None:
                raise ConfigError([Violation("train_config", "says how to shard, and shard is False", "Leave one out")])
            is_whole = not (shard or is_sharded(model))
            fsdp = _copies(job.world_size) if is_whole else read_train_config(train_config or {}, job.world_size)
            config, tokenizer_dir = _checked_config(model, fsdp, values, job, owner)
            table = table_for(config.hf_config())
            check_inference(config, job)
        with job.agreement.phase("sharding the model", SHORT_PATIENCE):
            if shard and (train_config is not None or not is_sharded(model)):
                shard_model(model, fsdp, mesh_of(fsdp, job.device, job.world_size))
            delivery = config.generate_config.lora_delivery
            train = ShardedModel(model, table, job.rank, lora_delivery=delivery, is_whole=is_whole)
            owner.callback(train.close)  # once all of it is back on the device
        lora = train.weights.lora
        return put_beside(train, config, table, job, owner, lora=lora, tokenizer_dir=tokenizer_dir)


def _copies(num_ranks: int) -> FsdpConfig:
    """What a model is that every rank has whole."""
    return FsdpConfig(sharding_strategy="HYBRID_SHARD", replicas=num_ranks) if num_ranks > 1 else FsdpConfig()


def _checked_config(
    model: torch.nn.Module, fsdp: FsdpConfig, values: dict[str, Any], job: Job, owner: ExitStack
) -> tuple[HybridConfig, str | None]:
    """The configuration for this model, and its tokenizer's directory. Raises before the model is changed."""
    from hybrid_engine.backends.fsdp.adaptor import read_model_weights
    from hybrid_engine.backends.fsdp.model_checks import require_configured, require_drivable, weights_dtype
    from hybrid_engine.backends.fsdp.names import wrapped_names

    require_drivable(model, job.world_size)
    tensors = model.state_dict(keep_vars=True)
    names = wrapped_names(model, tensors)
    tokenizer_dir = _tokenizer_directory(names.model, values.pop("model", None))
    directory = _model_directory(names.model, owner)
    if tokenizer_dir is not None:  # what is saved has it, too; it is read where it was, also once the engine has ended
        for path in files_like(Path(tokenizer_dir), TOKENIZER):
            (directory / path.name).symlink_to(path.resolve())
    wire_dtype = values.get("compression_dtype", "bfloat16") if values.get("compress_reshard") else None
    dtype = weights_dtype({own: tensors[own] for own in names.weights.values()}, wire_dtype)
    actor = {"params_dtype": dtype, "seq_length": 1, "fsdp": fsdp}
    settings = {"model": str(directory), "actor_config": actor, "generate_config": values}
    config = load_config(settings, job.world_size, own_loop=True, own_weights=True)  # the loop is the caller's
    read_model_weights(model, tensors, table_for(config.hf_config()), config.generate_config.lora_delivery)
    require_configured(names.model)
    return config, tokenizer_dir


def _model_directory(model: Any, owner: ExitStack) -> Path:
    """A directory with the config and the generation config of a transformers model, for vLLM; `owner` removes it.

    No file is read: what the model was told when it was loaded, and since, is in the object alone.
    """
    from hybrid_engine.backends.fsdp.model_checks import config_of

    made = Path(owner.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-engine-")))
    config_of(model).save_pretrained(made)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.to_json_file(made / "generation_config.json")  # save_pretrained refuses what vLLM does not read
    return made


def _tokenizer_directory(model: Any, given: str | None) -> str | None:
    """Directory that is given, else where a transformers model was loaded from, on disk or in the Hub's cache.

    Raises ConfigError for a directory that is given and not there.
    """
    if given is not None and not os.path.isdir(given):
        problem = f"{given} is not a directory"
        raise ConfigError([Violation("rollout_config.model", problem, "Name that of the tokenizer, or leave it out")])
    name = given or model.config.name_or_path
    if name and os.path.isdir(name):
        return str(name)
    # the commit that transformers has loaded; None: the main branch
    snapshot = Snapshot.in_cache(name, getattr(model.config, "_commit_hash", None))
    return None if snapshot is None else str(snapshot.directory)
