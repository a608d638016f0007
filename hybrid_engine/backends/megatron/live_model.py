"""A live Megatron model as the switch sees it (port `Trainer`), whoever built it, and what it says of itself.

What of it and its optimizer is on the device, and what becomes of it when they are offloaded:

    what                                        kind        action
    DDP's parameter buffers, dense and expert   param       copy
    frozen and other parameters outside them    param       copy
    module buffers that are resharded           param       copy
    sums of weights and LoRA                    param       drop: computed at every switch
    megatron-core's caches, and what layers     param       rebuild: forgotten, made anew by the next forward pass
    with experts keep of a forward pass
    DDP's gradient buffers, and gradients that  grad        drop
    it accumulates in float32 beside them
    gradients converted for main params         grad        drop
    main params and moments                     optimizer   copy, one flat tensor per optimizer and dtype
    other module buffers, rotary frequencies,   -           stay: small
    loss scale, step counters

Attention masks are made anew in every forward pass, and trackers of auxiliary losses are a number per layer. The
workspaces of Transformer Engine belong to its library and are not seen. Tests walk through model and optimizer
(tests/harness/reachable.py): nothing else stays.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron import forward_probe
from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.internals import cached_embeddings, holders_of_routing, memory_buffer
from hybrid_engine.backends.megatron.live_attention import live_attention
from hybrid_engine.backends.megatron.model_tensors import (
    ModelTensors,
    keep_expert_bias_in_float32,
    move_loose_parameters,
    move_published_buffers,
)
from hybrid_engine.backends.training_side import GuardedState, dtype_name, is_frozen
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.parallelism import TrainParallelism, sizes_of
from hybrid_engine.memory.elastic import reserve_elastic, restore_elastic
from hybrid_engine.memory.offload_items import KINDS, OffloadItem
from hybrid_engine.models.table import ModelTable
from hybrid_engine.probes import Attention, ProbeAnswer, ProbeLimits
from megatron_patches.buffers import iter_buffers
from megatron_patches.errors import UnsupportedOptimizerError
from megatron_patches.optimizers import gather_state, optimizer_members, set_weight_version, weight_version
from megatron_patches.patch import require_supported_version
from megatron_patches.review import live_refusals


class LiveModel(GuardedState):
    """One rank's share of a model: its weights, and what of it can leave the device. Leaves the model as it is.

    Args:
        chunks: model chunks in virtual-pipeline order, wrapped in DDP if they are trained.
        optimizer: None for a model that is only read.
        table: the model's name table.
        noop_layers: positions of layers that pass their input on.
        separate_lora: reshard LoRA beside the weights instead of added to them.

    Attributes:
        weights: what is resharded.

    Raises:
        ConfigError: for every field of Megatron's configuration that does not go with a switch.
        UnsupportedVersionError: for a megatron-core that was not tested.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        table: ModelTable,
        noop_layers: Sequence[int] = (),
        separate_lora: bool = False,
    ) -> None:
        require_supported_version()
        found = live_refusals(chunks, optimizer)
        if found:
            raise ConfigError([Violation(f"{one.section}.{one.field}", one.problem, one.remedy) for one in found])
        super().__init__()
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.weights = MegatronAdaptor(
            ModelTensors(self.chunks, table, noop_layers), "separate" if separate_lora else "merged"
        )
        modules = [pair for chunk in self.chunks for pair in chunk.named_modules()]
        self._moe_layers = [(name, module) for name, module in modules if isinstance(module, MoELayer)]
        members = [] if optimizer is None else optimizer_members(optimizer)
        self.watch(self.chunks, [member.optimizer for _, member in members])

    @property
    def unserved(self) -> list[str]:
        table = self.weights.model.table
        return [name for name in table.shapes if not table.is_served(name)]

    @property
    def version(self) -> int:
        return 0 if self.optimizer is None else weight_version(self.optimizer)

    @property
    def frozen(self) -> list[str]:
        """Canonical tensors of this rank that are made of parameters which require no gradient now."""
        return [name for name, origins in self.weights.origins().items() if all(map(is_frozen, origins))]

    def offload_items(self) -> list[OffloadItem]:
        """See the port. Gathers optimizer state into elastic buffers once there is any."""
        items = [*self._parameters(), *_shared_caches(), *_left_by_forward(self._moe_layers)]
        if self.optimizer is not None:
            items += [*_gradients(self.chunks), *_optimizer_state(self.optimizer)]
        return items

    def _parameters(self) -> Iterator[OffloadItem]:
        scratch = self.weights.scratch
        for name, tensor in self.weights.buffers().items():
            yield OffloadItem(name, "param", tensor, "drop" if name in scratch else "copy")

    cannot_compute = ""
    """Why the model is not asked to compute; empty where it is."""

    def probe_limits(self) -> ProbeLimits:
        if self.cannot_compute:
            return ProbeLimits(self.cannot_compute)
        return forward_probe.probe_limits(self.chunks, self.weights.model.table)

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """See `probes.Probed`; pending gathers finish first, and the model is in evaluation mode."""
        self.guard(["param"])
        self.weights.base.prepare()
        return forward_probe.probe(self.chunks, self.weights.model.table.dims.vocab_size, tokens)

    def attention(self) -> Mapping[int, Attention]:
        return self.weights.model.attention()

    def computed_settings(self) -> Mapping[str, Any]:
        return forward_probe.own_settings(unwrap_model(self.chunks[0]).config, self.weights.model.table)

    def reload_main_params(self) -> None:
        """Copy the model's parameters into the optimizer's main parameters, after the model's were written."""
        self.guard(KINDS)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()


def live_model(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    table: ModelTable,
    *,
    num_steps: int = 0,
    noop_layers: Sequence[int] = (),
) -> LiveModel:
    """A `LiveModel` of what somebody else has built. Its weights outside of DDP's buffers move, with their values.

    `num_steps`: optimizer steps that the weights have taken. Other arguments and errors as of `LiveModel`.
    """
    move_loose_parameters([chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)])
    keep_expert_bias_in_float32(chunks)
    move_published_buffers(chunks, table)
    if optimizer is not None:
        set_weight_version(optimizer, num_steps)
    return LiveModel(chunks, optimizer, table, noop_layers)


# -- what can leave the device -----------------------------------------------------------------------------------------


_CONSTANTS = {"sort_input_by_local_experts", "restore_output_by_local_experts"}  # of a token dispatcher


def _left_by_forward(layers: Sequence[tuple[str, MoELayer]]) -> Iterator[OffloadItem]:
    """What layers with experts keep of their last forward pass (routing maps, probabilities, permutations)."""
    for index, (name, layer) in enumerate(layers):
        for holder in holders_of_routing(layer):
            for key, value in vars(holder).items():
                if isinstance(value, torch.Tensor) and key not in _CONSTANTS:
                    owner = f"layer {index} with experts, {name}: {type(holder).__name__}.{key}"
                    yield OffloadItem(owner, "param", value, "rebuild", partial(setattr, holder, key, None))


def _gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[OffloadItem]:
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
    for found in gathered.outside:
        owner = f"{found.path}.{found.key}"
        if found.kind == "main_grad":
            yield OffloadItem(owner, "grad", found.tensor, "drop")
        else:
            yield OffloadItem(owner, "optimizer", found.tensor)


def _shared_caches() -> Iterator[OffloadItem]:
    """What megatron-core keeps between steps to save time, for all models of the process: scratch memory for gathered
    activations and scores, and rotary embeddings by sequence length."""
    scratch = memory_buffer()
    for (name, _), tensor in scratch.items():
        owner = f"megatron-core's memory buffer {name}, {dtype_name(tensor)}"
        yield OffloadItem(owner, "param", tensor, "rebuild", forget=scratch.clear)
    for owner, tensor, forget in cached_embeddings():
        yield OffloadItem(owner, "param", tensor, "rebuild", forget)


# -- what it says of itself --------------------------------------------------------------------------------------------


_GROUPS = {
    "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size,
    "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size,
    "context_parallel_size": parallel_state.get_context_parallel_world_size,
    "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size,
    "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size,
}
"""Keys of `actor_config` whose value is the size of a group."""

_OF_DDP = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def unusable_chunks(chunks: Sequence[Any], optimizer: Any) -> Iterator[Violation]:
    """Arguments that are not a Megatron model in DDP, and optimizers that cannot be driven."""
    if not chunks:
        yield Violation("model_chunks", "is empty", "Pass the model chunks of this rank")
    for index, chunk in enumerate(chunks):
        key, kind = f"model_chunks[{index}]", type(chunk).__name__
        inside = unwrap_model(chunk) if isinstance(chunk, torch.nn.Module) else chunk
        if not isinstance(inside, LanguageModule):
            remedy = "Pass a GPTModel or HybridModel of megatron-core, wrapped in its DistributedDataParallel"
            yield Violation(key, f"is a {kind} around a {type(inside).__name__}", remedy)
        elif optimizer is not None and not isinstance(chunk, DistributedDataParallel):
            remedy = "Wrap it in megatron.core.distributed.DistributedDataParallel, or pass optimizer=None to read only"
            yield Violation(key, f"is a {kind} without DDP, and there is an optimizer", remedy)
    if not parallel_state.model_parallel_is_initialized():
        remedy = "Call megatron.core.parallel_state.initialize_model_parallel() first"
        yield Violation("model_chunks", "Megatron has no process groups", remedy)
    if optimizer is not None:
        try:
            optimizer_members(optimizer)
        except UnsupportedOptimizerError as error:
            yield Violation("optimizer", str(error), "Make it with megatron.core.optimizer.get_megatron_optimizer()")


def in_ddp(chunks: Sequence[torch.nn.Module]) -> bool:
    return all(isinstance(chunk, DistributedDataParallel) for chunk in chunks)


def world_size() -> int:
    return torch.distributed.get_world_size()


def config_of(chunk: torch.nn.Module) -> TransformerConfig:
    config: TransformerConfig = unwrap_model(chunk).config
    return config


def own_class(chunk: torch.nn.Module) -> str | None:
    """The class of the model where it is none of megatron-core's."""
    kind = type(unwrap_model(chunk))
    return None if kind.__module__.startswith("megatron.core.") else f"{kind.__module__}.{kind.__qualname__}"


def actor_values(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """`actor_config` as these chunks and Megatron's process groups have it."""
    model, config = unwrap_model(chunks[0]), config_of(chunks[0])
    values = {size.key: getattr(config, size.model, size.default) for size in sizes_of(TrainParallelism) if size.model}
    values |= {key: size_of_group() for key, size_of_group in _GROUPS.items()}
    if config.num_moe_experts is None:
        values["expert_tensor_parallel_size"] = None
    layout = values["pipeline_model_parallel_layout"]
    values["pipeline_model_parallel_layout"] = None if layout is None else str(layout)
    has_own_count = layout is None and len(chunks) > 1
    values["virtual_pipeline_model_parallel_size"] = len(chunks) if has_own_count else None
    values["hybrid_layer_pattern"] = getattr(model, "hybrid_layer_pattern", None)
    values["sequence_parallel"] = config.sequence_parallel
    values["params_dtype"] = dtype_name(next(model.parameters()))
    ddp = getattr(chunks[0], "ddp_config", None)
    return values | {name: getattr(ddp, name) for name in _OF_DDP if ddp is not None}


def model_arguments(chunk: torch.nn.Module) -> Namespace:
    """What the model was built with beside its configuration, by the names of Megatron's arguments."""
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
