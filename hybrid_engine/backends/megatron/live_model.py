"""Live Megatron model as the switch uses it (port `Trainer`), and its description.

State of the model and its optimizer on the device, and its treatment when it is offloaded:

    state                                       kind        action
    DDP's parameter buffers, dense and expert   param       copy
    frozen and other parameters outside them    param       copy
    module buffers that are resharded           param       copy
    sums of weights and LoRA, dequantised       param       drop: recomputed at every switch
    weights of 8-bit parameters
    transposes of 8-bit parameters              param       rebuild
    elements of MXFP8 for the backward pass     param       copy
    megatron-core's caches, and tensors that    param       rebuild: forgotten, and recreated by the
    layers with experts keep of a forward pass              next forward pass
    DDP's gradient buffers, and the gradients   grad        drop
    that it accumulates in float32 besides
    gradients converted for main params         grad        drop
    main params and moments                     optimizer   copy, one flat tensor per optimizer
                                                            and dtype
    other module buffers, rotary frequencies,   -           stay: small
    loss scale, step counters, scales of 8-bit
    parameters

Attention masks are recreated in every forward pass, and trackers of auxiliary losses are one number
per layer. The workspaces of Transformer Engine belong to its library and are not visible here.
Tests walk through model and optimizer (tests/harness/reachable.py): no other state exists.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.computed_sources import ModelTrainer
from hybrid_engine.backends.megatron import adapted_weights, forward_probe, internals
from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.internals import holders_of_routing, shared_caches
from hybrid_engine.backends.megatron.live_attention import live_attention
from hybrid_engine.backends.megatron.model_tensors import (
    ModelTensors,
    keep_router_buffers_in_float32,
    move_loose_parameters,
    move_published_buffers,
)
from hybrid_engine.backends.megatron.quantised_parameters import (
    backward_items,
    unreadable_parameters,
)
from hybrid_engine.backends.training_side import Modules, dtype_name
from hybrid_engine.compute_check.attention import POSITIONS, Attentions
from hybrid_engine.compute_check.probes import ProbeAnswer, ProbeLimits
from hybrid_engine.errors import Violation, Violations, require_none
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.layouts.parallelism import TrainParallelism, sizes_of
from hybrid_engine.memory.elastic import reserve_elastic, restore_elastic
from hybrid_engine.memory.offload_items import KINDS, OffloadItem
from hybrid_engine.models.table import ModelTable
from megatron_patches.buffers import iter_buffers
from megatron_patches.errors import UnsupportedOptimizerError
from megatron_patches.optimizers import (
    gather_state,
    optimizer_members,
    set_weight_version,
    weight_version,
)
from megatron_patches.patch import require_supported_version
from megatron_patches.refused_fields import live_refusals

_GROUP_SIZES = {
    "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size,
    "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size,
    "context_parallel_size": parallel_state.get_context_parallel_world_size,
    "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size,
    "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size,
}
"""Key of `actor_config` -> size of a process group, which is its value."""

_DDP_FIELDS = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Keys of `actor_config` that are fields of DDP's configuration."""

_DISPATCHER_CONSTANTS = frozenset(
    {"sort_input_by_local_experts", "restore_output_by_local_experts"}
)
"""Tensors of a token dispatcher that do not come from a forward pass."""


class LiveModel(ModelTrainer):
    """Share of a model on this rank: its weights, and the state that can leave the device.

    Constructing it does not change the model.

    Args:
        chunks: model chunks in virtual-pipeline order, wrapped in DDP if they are trained.
        optimizer: None for a model that is only read.
        table: the model's name table.
        noop_layers: positions of layers that pass their input on unchanged.
        separate_lora: reshard LoRA separately instead of merged into the weights.

    Attributes:
        weights: the resharded weights.

    Raises:
        ConfigError: listing every field of Megatron's configuration that prevents a switch.
        UnsupportedVersionError: this megatron-core was not tested.
    """

    weights: MegatronAdaptor
    cannot_compute = ""
    """Reason why the model must not run a forward pass; empty if it may."""

    def __init__(
        self,
        chunks: Modules,
        optimizer: MegatronOptimizer | None,
        table: ModelTable,
        noop_layers: Sequence[int] = (),
        separate_lora: bool = False,
    ) -> None:
        require_supported_version()
        require_none(refused_state(chunks, optimizer))
        super().__init__()
        self.chunks = list(chunks)
        self.optimizer = optimizer
        tensors = ModelTensors(self.chunks, table, noop_layers)
        self.weights = MegatronAdaptor(tensors, "separate" if separate_lora else "merged")
        modules = [pair for chunk in self.chunks for pair in chunk.named_modules()]
        self._moe_layers = [
            (name, module) for name, module in modules if isinstance(module, MoELayer)
        ]
        # Found once: DDP keeps its buffers, and every survey would walk over the whole model.
        self._gradients = [] if optimizer is None else list(_gradients(self.chunks))
        members = [] if optimizer is None else optimizer_members(optimizer)
        # Megatron's optimizers take no hooks, but the torch optimizers that they call do.
        self.watch(
            self.chunks,
            [member.optimizer for _, member in members],
            [
                (member, name)
                for _, member in members
                for name in internals.METHODS_WITH_STATE
                if hasattr(member, name)
            ],
        )

    @property
    def version(self) -> int:
        return 0 if self.optimizer is None else weight_version(self.optimizer)

    @property
    def process_groups(self) -> list[torch.distributed.ProcessGroup]:
        """Process groups that Megatron has created."""
        return internals.process_groups()

    def offload_items(self) -> list[OffloadItem]:
        """See the port. Moves optimizer state into elastic buffers, once it exists."""
        items = [
            *self.weights.offload_items(),
            *backward_items(self.weights.model.quantised_weights),
            *(
                OffloadItem(owner, "param", tensor, "rebuild", forget)
                for owner, tensor, forget in shared_caches()
            ),
            *_left_by_forward(self._moe_layers),
            *self._gradients,
        ]
        if self.optimizer is not None:
            items += _optimizer_state(self.optimizer)
        return items

    def probe_limits(self) -> ProbeLimits:
        if self.cannot_compute:
            return ProbeLimits(self.cannot_compute)
        return forward_probe.probe_limits(self.chunks, self.weights.table)

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """See `probes.Probed`. Finishes pending gathers first; the model is in evaluation mode."""
        self.guard(["param"])
        self.weights.finish_pending()
        dims = self.weights.table.dims
        return forward_probe.probe(self.chunks, dims.vocab_size, tokens, dims.num_experts)

    def attention(self, positions: Sequence[int] = POSITIONS) -> Attentions:
        return self.weights.model.attention(positions)

    def computed_settings(self) -> HfConfig:
        config = config_of(self.chunks[0])
        return forward_probe.own_settings(config, self.weights.table)

    def reload_main_params(self) -> None:
        """Copy the model's parameters, after a write, into the optimizer's main parameters."""
        self.guard(KINDS)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()


def live_model(
    chunks: Modules,
    optimizer: MegatronOptimizer | None,
    table: ModelTable,
    *,
    num_steps: int = 0,
    noop_layers: Sequence[int] = (),
) -> LiveModel:
    """Return a `LiveModel` of a model that other code has built.

    Moves its weights outside DDP's buffers, with their values, into shared memory.

    Args:
        chunks, optimizer, table, noop_layers: see `LiveModel`, also for errors.
        num_steps: optimizer steps that the weights have taken.

    Raises:
        ModelError: parameters cannot be moved; see `move_loose_parameters`.
    """
    move_loose_parameters([chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)])
    keep_router_buffers_in_float32(chunks)
    # After the biases have their final dtype, for which they get new storage.
    move_published_buffers(chunks, table)
    if optimizer is not None:
        set_weight_version(optimizer, num_steps)
    return LiveModel(chunks, optimizer, table, noop_layers)


# -- state that can leave the device ---------------------------------------------------------------


def _left_by_forward(layers: Sequence[tuple[str, MoELayer]]) -> Iterator[OffloadItem]:
    """Yield the tensors that layers with experts keep of their last forward pass.

    They are routing maps, probabilities and permutations.
    """
    for index, (name, layer) in enumerate(layers):
        for holder in holders_of_routing(layer):
            for key, value in vars(holder).items():
                if isinstance(value, torch.Tensor) and key not in _DISPATCHER_CONSTANTS:
                    owner = f"layer {index} with experts, {name}: {type(holder).__name__}.{key}"
                    forget = partial(setattr, holder, key, None)
                    yield OffloadItem(owner, "param", value, "rebuild", forget)


def _gradients(chunks: Modules) -> Iterator[OffloadItem]:
    for record in iter_buffers(chunks):
        buffer = f"chunk{record.chunk_index}.{record.kind}{record.index}"
        yield OffloadItem(f"{buffer}.grad_data", "grad", record.grad_data, "drop")
        for number, extra in enumerate(record.extra_grads):
            yield OffloadItem(f"{buffer}.extra_main_grads[{number}]", "grad", extra, "drop")


def _optimizer_state(optimizer: MegatronOptimizer) -> Iterator[OffloadItem]:
    gathered = gather_state(optimizer, reserve_elastic, restore_elastic)
    for number, buffer in enumerate(gathered.buffers):
        owner = f"{buffer.path}main params and moments, {dtype_name(buffer.tensor)}, {number}"
        yield OffloadItem(owner, "optimizer", buffer.tensor)
    for outside in gathered.outside:
        owner = f"{outside.path}.{outside.key}"
        if outside.kind == "main_grad":
            yield OffloadItem(owner, "grad", outside.tensor, "drop")
        else:
            yield OffloadItem(owner, "optimizer", outside.tensor)


# -- description of the model ----------------------------------------------------------------------


def unusable_chunks(chunks: Sequence[Any], optimizer: Any) -> Violations:
    """Yield a violation for each argument that is not a Megatron model or a supported optimizer."""
    if not chunks:
        yield Violation(
            "model_chunks", "is empty", "Pass the model chunks of this rank", code="no-chunks"
        )
    for index, chunk in enumerate(chunks):
        key = f"model_chunks[{index}]"
        kind = type(chunk).__name__
        model = unwrap_model(chunk) if isinstance(chunk, torch.nn.Module) else chunk
        if not isinstance(model, LanguageModule):
            yield Violation(
                key,
                f"is a {kind} around a {type(model).__name__}",
                "Pass a GPTModel or HybridModel of megatron-core, wrapped in its "
                "DistributedDataParallel",
                code="not-a-megatron-model",
            )
        elif optimizer is not None and not isinstance(chunk, DistributedDataParallel):
            yield Violation(
                key,
                f"is a {kind} without DDP, but `optimizer` is given",
                "Wrap it in megatron.core.distributed.DistributedDataParallel, or pass "
                "optimizer=None to read only",
                code="not-in-ddp",
            )
    if not parallel_state.model_parallel_is_initialized():
        yield Violation(
            "model_chunks",
            "Megatron's process groups do not exist",
            "Call megatron.core.parallel_state.initialize_model_parallel() first",
            code="no-process-groups",
        )
    if optimizer is not None:
        try:
            optimizer_members(optimizer)
        except UnsupportedOptimizerError as error:
            yield Violation(
                "optimizer",
                str(error),
                "Create it with megatron.core.optimizer.get_megatron_optimizer()",
                code="unsupported-optimizer",
            )


def unsupported_adapters(chunks: Modules) -> Violations:
    """Return a violation for every adapter of a model that a switch cannot merge."""
    return adapted_weights.unsupported_adapters(list(map(unwrap_model, chunks)))


def refused_state(chunks: Modules, optimizer: Any) -> list[Violation]:
    """Return a violation for each setting and each kind of parameter that prevents a switch."""
    violations = [
        Violation(
            *(f"{refusal.section}.{refusal.field}", refusal.problem, refusal.remedy),
            code="refused-megatron-setting",
        )
        for refusal in live_refusals(chunks, optimizer)
    ]
    named = chain.from_iterable(chunk.named_parameters() for chunk in chunks)
    return [*violations, *unsupported_adapters(chunks), *unreadable_parameters(named)]


def in_ddp(chunks: Modules) -> bool:
    return all(isinstance(chunk, DistributedDataParallel) for chunk in chunks)


def world_size() -> int:
    return torch.distributed.get_world_size()


def config_of(chunk: torch.nn.Module) -> TransformerConfig:
    config: TransformerConfig = unwrap_model(chunk).config
    return config


def own_class(chunk: torch.nn.Module) -> str | None:
    """Return the qualified class name of a model; None for a class of megatron-core."""
    kind = type(unwrap_model(chunk))
    if kind.__module__.startswith("megatron.core."):
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


def actor_values(chunks: Modules) -> dict[str, Any]:
    """Return the values of `actor_config` that these chunks and Megatron's process groups have."""
    model = unwrap_model(chunks[0])
    config = config_of(chunks[0])
    values = {
        size.key: getattr(config, size.model, size.default)
        for size in sizes_of(TrainParallelism)
        if size.model
    }
    values |= {key: group_size() for key, group_size in _GROUP_SIZES.items()}
    # Megatron creates this group for dense models also.
    if config.num_moe_experts is None:
        values["expert_tensor_parallel_size"] = None
    layout = values["pipeline_model_parallel_layout"]
    values["pipeline_model_parallel_layout"] = None if layout is None else str(layout)
    # A layout already determines the number of virtual stages.
    has_virtual_stages = layout is None and len(chunks) > 1
    values["virtual_pipeline_model_parallel_size"] = len(chunks) if has_virtual_stages else None
    values["hybrid_layer_pattern"] = getattr(model, "hybrid_layer_pattern", None)
    values["sequence_parallel"] = config.sequence_parallel
    values["params_dtype"] = dtype_name(next(model.parameters()))
    ddp = getattr(chunks[0], "ddp_config", None)
    return values | {name: getattr(ddp, name) for name in _DDP_FIELDS if ddp is not None}


def model_arguments(chunk: torch.nn.Module) -> Namespace:
    """Return the arguments of a model besides its configuration, by names of Megatron's options."""
    model = unwrap_model(chunk)
    return Namespace(
        position_embedding_type=model.position_embedding_type,
        max_position_embeddings=model.max_sequence_length,
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
        mtp_num_layers=model.config.mtp_num_layers,
        attention=live_attention(model),
        hybrid_layer_pattern=getattr(model, "hybrid_layer_pattern", None),
        padded_vocab_size=model.vocab_size,
    )
