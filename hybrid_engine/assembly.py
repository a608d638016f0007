"""Construction of the inference side of a job for a live training model.

`ActorHybridWorker` builds the training model, `HybridEngine(model=...)` shards the caller's, and
`attach` and `megatron_script` use a running one. All of them build the rest here: an
`InferenceSide`, which is vLLM in these ranks or in servers, and the switch between both sides.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hybrid_engine.compute_check.logprob_check import ConfigModel
from hybrid_engine.compute_check.probes import Probed
from hybrid_engine.config import ActorConfig, HybridConfig, load_config
from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.config.rules import given, without_peft_form
from hybrid_engine.errors import (
    ConfigError,
    ParameterMismatchError,
    Violation,
    require_none,
)
from hybrid_engine.files.hub import HubSnapshot
from hybrid_engine.files.model_files import CODE, TOKENIZER, files_like
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.messages import decode, encode
from hybrid_engine.models.block_quantization import BlockQuantization, require_matrices
from hybrid_engine.models.lora_tensors import (
    VLLM_LORA_RANKS,
    ActorLora,
    LoraSettings,
    adapted_modules,
    adapter_shapes,
)
from hybrid_engine.models.quantization_configs import block_config, calibrated_in, format_in
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.ports import InferenceWeights, Trainer, TrainingWeights
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout, differences
from hybrid_engine.records.sides import Side, layout_messages, refined_alike
from hybrid_engine.switch.setup import gather_side
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.switch.states import Switch
from hybrid_engine.tracing import check_path, path_of_rank

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings
    from hybrid_engine.backends.vllm.server.inference import ServedInference


logger = logging.getLogger("hybrid_engine")

_QUANTIZATION = "generate_config.quantization"

Value = TypeVar("Value")


@dataclass(frozen=True)
class InferenceSide:
    """Place where completions are generated. Every rank calls, in this order:

        side = inference_side(config)
        side.require_packages()                       # before a process group exists
        side.check(job)                               # before anything is built
        inference, switch = side.build(train, ...)    # offloads training state if vLLM needs memory
        side.check_sampling(inference, sampling)      # optional, before training starts

    This class publishes to running servers, over the network; `LocalVllm` builds vLLM in the ranks
    that train. The checks accept everything here, because servers need no package in these ranks,
    and check their own settings when they are invited, and the sampling of each request.
    """

    config: HybridConfig

    def require_packages(self, *, allow_version: bool = False) -> None:
        """Raise DependencyError if this side needs a package that is missing or not tested."""

    def check(self, job: Job) -> None:
        """Raise ConfigError with every reason why this side cannot be built for `job`."""

    def build(
        self,
        train: Trainer,
        offloader: Offloader,
        table: ModelTable,
        job: Job,
        owner: ExitStack,
        *,
        lora: ActorLora | None,
        tokenizer_dir: str | None,
    ) -> tuple[InferenceEngine | ServedInference, Switch]:
        """Connect to the servers, and build the switch. Collective.

        Training state stays on the device; `owner` ends what is built in these ranks.
        """
        from hybrid_engine.backends.vllm.server.inference import ServedInference

        inference = ServedInference(self.config, job, tokenizer_dir)
        switch = inference.switch(train, offloader, _reference_of(train, self.config, job))
        return inference, switch


def inference_side(config: HybridConfig) -> InferenceSide:
    """Return the inference side that `generate_config` asks for."""
    return InferenceSide(config) if config.generate_config.servers else LocalVllm(config)


class LocalVllm(InferenceSide):
    """vLLM in the ranks that train."""

    def require_packages(self, *, allow_version: bool = False) -> None:
        """Raise DependencyError if vLLM is missing or of a version that was not tested."""
        from hybrid_engine.backends.vllm import require_vllm

        require_vllm(allow_version=allow_version or self.config.generate_config.allow_version)

    def check(self, job: Job) -> None:
        """Raise ConfigError for settings that vLLM refuses on the devices of this job."""
        from hybrid_engine.backends.vllm import check_before_building

        self.require_packages()
        check_before_building(inference_settings(self.config, job.world_size), job)

    def build(
        self,
        train: Trainer,
        offloader: Offloader,
        table: ModelTable,
        job: Job,
        owner: ExitStack,
        *,
        lora: ActorLora | None,
        tokenizer_dir: str | None,
    ) -> tuple[InferenceEngine | ServedInference, Switch]:
        """Build vLLM in every rank, and the switch between it and `train`. Collective."""
        # Before state leaves the device, because quantised weights are a part of it.
        table = quantised_table(self.config, train.weights, table, job)
        with job.agreement.phase("taking training state off the device", SHORT_PATIENCE):
            # vLLM measures the free memory while it starts.
            offloader.offload()
        training_side = gather_side(job, train.weights)
        inference = build_inference_engine(
            self.config, table, training_side, job, lora, tokenizer_dir
        )
        owner.callback(inference.shutdown)
        with job.agreement.phase("delivering adapters"):
            weights: InferenceWeights = inference.adaptor
            if lora is not None:
                from hybrid_engine.backends.vllm.lora import WeightsWithLora

                inference.trained_lora = lora.name
                weights = WeightsWithLora(
                    inference.adaptor, inference.loras, lora, self.config.served_dtype
                )
        switch = ShardingManager(
            trainer=train,
            inference=weights,
            caches=inference,
            offloader=offloader,
            config=self.config.generate_config,
            job=job,
            training_side=training_side,
            reference=_reference_of(train, self.config, job),
        )
        return inference, switch


def _reference_of(train: Trainer, config: HybridConfig, job: Job) -> ConfigModel | None:
    """Return transformers' class of the model, for a trainer that computes with another one."""
    if config.actor_config.fsdp is not None:
        return None
    table = config.table()

    def build() -> Probed:
        from hybrid_engine.backends.fsdp.reference import TransformersReference

        return TransformersReference(
            config.model, train.weights.merged, table, job, config.actor_config.params_dtype
        )

    return ConfigModel(build, is_needed=table.is_derived)


def build_inference_engine(
    config: HybridConfig,
    table: ModelTable,
    training_side: Side,
    job: Job,
    lora: ActorLora | None = None,
    tokenizer_dir: str | None = None,
) -> InferenceEngine:
    """Build vLLM in the ranks that train. Collective.

    Each rank takes the shard that needs the least data from other ranks. The assignment follows
    from the training layouts and from those of every vLLM position, which are traced first. vLLM
    measures the free memory while it starts, so training state should be off the device.

    Args:
        config: configuration of both sides.
        table: name table of the model.
        training_side: layouts of all ranks for training (`setup.gather_side`).
        job: all ranks.
        lora: adapters that are delivered separately.
        tokenizer_dir: directory of the tokenizer, if it is not the model's.

    A failure on any rank is raised on all, and leaves no engine.
    """
    generate = config.generate_config
    positions = None
    with job.agreement.phase("checking the inference settings"):
        if generate.trace is not None:
            check_path(path_of_rank(generate.trace, job.rank))
        settings = inference_settings(config, job.world_size, lora, tokenizer_dir)
    # If each position has the whole model, all orders are equally good.
    if generate.infer_rank_order != "sequential" and settings.sizes.ranks_per_instance > 1:
        positions = gather_positions(settings, table, job)
        with job.agreement.phase("choosing the order of ranks"):
            held, needed = (side.holdings for side in refined_alike(training_side, positions))
            order = rank_order(
                generate.infer_rank_order, held, needed, job.hosts, settings.sizes.tensor
            )
            settings = replace(settings, sizes=replace(settings.sizes, rank_order=order))
    with ExitStack() as undo:
        with job.agreement.phase("building the inference engine", SHORT_PATIENCE):
            from hybrid_engine.backends.vllm import InferenceEngine
            from hybrid_engine.backends.vllm.weights.drafter import without_drafter

            engine = InferenceEngine(settings, table.shapes, job, dtypes=table.dtypes)
            undo.callback(engine.shutdown)  # also if only another rank fails
            if positions is not None:
                position = settings.sizes.place_of(job.rank).position
                # The order was chosen without a drafter, a few hundredths of the bytes.
                loaded = without_drafter(engine.adaptor.layout())
                require_traced_before(positions.kind(position), loaded, job.rank, position)
        undo.pop_all()
    return engine


def quantised_table(
    config: HybridConfig,
    weights: TrainingWeights,
    table: ModelTable,
    job: Job,
) -> ModelTable:
    """Have `weights` quantised before they are sent, if the configuration asks for it. Collective.

    vLLM's model decides which tensors it quantises, traced without memory at every position.

    Returns:
        The table with the dtypes of quantised weights and with their scales; `table` itself if
        weights are sent unquantised.
    """
    from hybrid_engine.backends.computed_sources import AdaptorWithSources
    from hybrid_engine.backends.quantised_sources import quantise

    with job.agreement.phase("checking the inference settings"):
        settings = inference_settings(config, job.world_size)
        if settings.quantization_config is None:
            return table
        form = format_in(settings.quantization_config)
        if not isinstance(weights, AdaptorWithSources):
            raise ConfigError.of(
                _QUANTIZATION,
                f"{form.method}, but a {type(weights).__name__} cannot quantise weights",
                f"Set it to {UNQUANTISED}",
                code="cannot-quantise",
            )
    with job.agreement.phase("tracing which layers vLLM quantises"):
        from hybrid_engine.backends.vllm import quantised_at_position

        fused = quantised_at_position(settings, job, table.shapes, table.dtypes)
        pairs = [(name, names[0]) for names in fused for name in names]
        left_out = calibrated_in(config.hf_config())
        if left_out and job.rank == 0:
            logger.warning(
                "%s: without the %s, which are calibrated on data",
                config.model,
                " and the ".join(left_out),
            )
    groups = dict(sorted(_union(job, pairs, tuple[str, str], "exchange of quantised tensors")))
    with job.agreement.phase("quantising weights"):
        require_matrices(groups, table.shapes, form)
        quantization = BlockQuantization(groups, form)
        view = quantise(weights, quantization)
        cut = sorted(view.cut)
    all_cut = _union(job, cut, str, "exchange of cut blocks")
    if all_cut:
        view.share(all_cut, table.shapes, job.agreement)
    return quantization.served(table)


def _union(job: Job, values: Sequence[Value], kind: type[Value], phase: str) -> set[Value]:
    """Return the values of a kind that any rank passes. Collective."""
    _, messages = job.agreement.share([encode(list(values))], phase)
    kinds: Any = list[kind]  # type: ignore[valid-type]
    return {value for message in messages for value in decode(message, kinds)}


def gather_positions(settings: InferenceSettings, table: ModelTable, job: Job) -> Side:
    """Return vLLM's layouts as a `Side`, by position instead of rank. Collective.

    Each rank traces the layout of one position, without memory for weights.
    """
    with job.agreement.phase("tracing vLLM's model without memory"):
        from hybrid_engine.backends.vllm import layout_of_position

        layout = layout_of_position(settings, job, table.shapes, dtypes=table.dtypes)
        own_messages = layout_messages(layout)
    numbers, messages = job.agreement.share(own_messages, "exchange of inference positions")
    with job.agreement.phase("choosing the order of ranks"):
        return Side.from_messages(numbers, messages)


def require_traced_before(traced: Layout, loaded: Layout, rank: int, position: int) -> None:
    """Raise ParameterMismatchError naming each tensor that differs between two layouts.

    These are the layout of an engine and the layout traced before without memory, by which the
    order of ranks was chosen.
    """
    if names := differences(traced, loaded):
        problem = (
            f"on rank {rank} vLLM holds other parts of it than were traced for position {position} "
            "without memory"
        )
        remedy = "Set generate_config.infer_rank_order to sequential"
        raise ParameterMismatchError([f"{name}: {problem}. {remedy}" for name in names])


def inference_settings(
    config: HybridConfig,
    world_size: int,
    lora: ActorLora | None = None,
    tokenizer_dir: str | None = None,
) -> InferenceSettings:
    """Return vLLM's settings from a checked configuration, with ranks in sequential order.

    Args:
        config: configuration of both sides.
        world_size: number of ranks.
        lora: adapters that are delivered separately.
        tokenizer_dir: directory of the tokenizer, if it is not the model's.
    """
    from hybrid_engine.backends.vllm import InferenceSettings

    lora_settings: dict[str, Any] = {}
    if lora is not None:
        # vLLM accepts only these maxima; the rank of an adapter may be smaller.
        sufficient = (rank for rank in VLLM_LORA_RANKS if rank >= lora.settings.largest_rank)
        lora_settings = {
            "max_loras": 1,
            "max_lora_rank": next(sufficient),
            "lora_target_modules": lora.settings.target_modules,
        }
    return InferenceSettings(
        str(config.model),
        config.generate_config.sizes(world_size),
        config.generate_config,
        config.served_dtype,
        tokenizer_dir=tokenizer_dir,
        quantization_config=block_config(config.hf_config(), config.generate_config.quantization),
        **lora_settings,
    )


def megatron_lora(config: ActorConfig, table: ModelTable) -> ActorLora | None:
    """Return the adapters that Megatron trains, if there are any and all have PEFT's form."""
    lora = config.lora
    if lora is None or config.fsdp or without_peft_form(table, lora):
        return None
    shapes = adapter_shapes(table, lora.target_modules, lora.rank)
    return ActorLora(LoraSettings(lora.rank, lora.alpha, adapted_modules(shapes)), shapes)


def settings_of(source: Any, owner: ExitStack) -> tuple[HybridConfig, torch.nn.Module | None]:
    """Return the configuration of a worker, and the caller's model that it is to train, if any.

    Args:
        source: as of `load_config`, or its result; or a causal LM of transformers, perhaps wrapped
            by PEFT, which FSDP2 trains; or a mapping with such a model in place of a directory.
        owner: removes the directory with the model's config.

    Raises ConfigError or ModelError, without a collective, before the model is changed.
    """
    if isinstance(source, HybridConfig):
        return source, None
    settings = source if isinstance(source, Mapping) else {"model": source}
    model = settings.get("model")
    if not isinstance(model, torch.nn.Module):
        return load_config(source), None
    from hybrid_engine.backends.fsdp.model_checks import untrainable

    require_none(untrainable(model))
    config, _ = checked_config(model, settings, None, owner)
    return config, model


def checked_config(
    model: torch.nn.Module,
    settings: Mapping[str, Any],
    world_size: int | None,
    owner: ExitStack,
    tokenizer: str | None = None,
    *,
    own_loop: bool = False,
) -> tuple[HybridConfig, str | None]:
    """Return the configuration for this model, and the directory of its tokenizer.

    Args:
        model: the caller's.
        settings: sections of the configuration.
        world_size: number of ranks; None: see `load_config`.
        owner: removes the directory with the model's config.
        tokenizer: directory of the tokenizer; None: that of the model.
        own_loop: see `load_config`.

    Raises before the model is changed.
    """
    from hybrid_engine.backends.fsdp.adaptor import read_model_weights
    from hybrid_engine.backends.fsdp.model_checks import (
        require_configured,
        require_drivable,
        weights_dtype,
    )
    from hybrid_engine.backends.fsdp.names import wrapped_names

    require_drivable(model, world_size or 1)
    tensors = model.state_dict(keep_vars=True)
    names = wrapped_names(model, tensors)
    tokenizer_dir = _tokenizer_directory(names.model, tokenizer)
    directory = _model_directory(names.model, owner)
    if tokenizer_dir is not None:
        # Linked so that saved checkpoints include the tokenizer. The tokenizer itself is read from
        # its own directory, even after the engine has ended.
        for path in files_like(Path(tokenizer_dir), (*TOKENIZER, CODE)):
            (directory / path.name).symlink_to(path.resolve())
    generate = settings.get("generate_config")
    wire_dtype = None
    if isinstance(generate, Mapping) and generate.get("compress_reshard"):
        wire_dtype = generate.get("compression_dtype", "bfloat16")
    weights = {name: tensors[name] for name in names.weights.values()}
    dtype = weights_dtype(weights, wire_dtype)
    actor = settings.get("actor_config", {})
    if isinstance(actor, Mapping):
        actor = {"fsdp": {}, "params_dtype": dtype, **actor}
    settings = {**settings, "model": str(directory), "actor_config": actor}
    config = load_config(settings, world_size, own_loop=own_loop, own_weights=True)
    of_model = {
        "random_weights": config.random_weights,
        "actor_config.fsdp": config.actor_config.fsdp is None,
        "actor_config.params_dtype": config.actor_config.params_dtype != dtype,
        "actor_config.frozen_parameters": config.actor_config.frozen_parameters,
        "actor_config.lora": config.actor_config.lora,
    }
    require_none(
        Violation(key, "contradicts `model`, an object", "Leave it out", code="conflicting-keys")
        for key in given(of_model)
    )
    table = config.table()
    # Its result is not needed here: it raises ModelError for weights that cannot be mapped.
    read_model_weights(model, tensors, table, config.generate_config.lora_delivery)
    require_configured(names.model)
    return config, tokenizer_dir


def _model_directory(model: Any, owner: ExitStack) -> Path:
    """Return a directory with the config and generation config of a transformers model, for vLLM.

    Both are written from the object, because its settings may have changed while or after it was
    loaded from files. `owner` removes the directory.
    """
    from hybrid_engine.models.derived import config_of

    temporary = tempfile.TemporaryDirectory(prefix="hybrid-engine-")
    directory = Path(owner.enter_context(temporary))
    config_of(model).save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        # Not by save_pretrained, which refuses values that vLLM does not even read.
        generation.to_json_file(directory / "generation_config.json")
    return directory


def _tokenizer_directory(model: Any, configured: str | None) -> str | None:
    """Return the configured directory, else the one from which a transformers model was loaded.

    That is a directory on disk or in the Hub's cache; None if there is neither. Raises ConfigError
    if the configured directory does not exist.
    """
    if configured is not None and not os.path.isdir(configured):
        raise ConfigError.of(
            "rollout_config.model",
            f"{configured} is not a directory",
            "Name the directory of the tokenizer, or leave it out",
            code="not-a-directory",
        )
    name = configured or model.config.name_or_path
    if name and os.path.isdir(name):
        return str(name)
    # The commit that transformers has loaded; None means the main branch.
    snapshot = HubSnapshot.in_cache(name, getattr(model.config, "_commit_hash", None))
    return None if snapshot is None else str(snapshot.directory)
