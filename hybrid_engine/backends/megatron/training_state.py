"""What of a Megatron model and its optimizer is on the device, and what becomes of it when they are offloaded.

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

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.moe.moe_layer import MoELayer

from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.internals import cached_embeddings, holders_of_routing, memory_buffer
from hybrid_engine.memory.elastic import reserve_elastic, restore_elastic
from hybrid_engine.memory.offload_items import OffloadItem
from megatron_patches.buffers import iter_buffers
from megatron_patches.optimizers import gather_state

SMALL = 1024**2
"""Bytes up to which a tensor that no item lists, but whose purpose is known, is left on the device."""

_CONSTANTS = {"sort_input_by_local_experts", "restore_output_by_local_experts"}  # of a token dispatcher


class TrainingState:
    """Of one model and its optimizer, if it has one."""

    def __init__(self, weights: MegatronAdaptor, optimizer: MegatronOptimizer | None) -> None:
        self._weights = weights
        self._chunks = weights.model.chunks
        self._optimizer = optimizer
        modules = [module for chunk in self._chunks for module in chunk.named_modules()]
        self._moe_layers = [(name, module) for name, module in modules if isinstance(module, MoELayer)]

    def items(self) -> list[OffloadItem]:
        """Everything that can leave the device. Gathers optimizer state into elastic buffers once there is any."""
        items = [*self._parameters(), *_shared_caches(), *self._left_by_forward()]
        if self._optimizer is not None:
            items += [*_gradients(self._chunks), *_optimizer_state(self._optimizer)]
        return items

    def _parameters(self) -> Iterator[OffloadItem]:
        scratch = self._weights.scratch
        for name, tensor in self._weights.buffers().items():
            yield OffloadItem(owner=name, kind="param", tensor=tensor, action="drop" if name in scratch else "copy")

    def _left_by_forward(self) -> Iterator[OffloadItem]:
        """What layers with experts keep of their last forward pass (routing maps, probabilities, permutations)."""
        for index, (name, layer) in enumerate(self._moe_layers):
            for holder in holders_of_routing(layer):
                for key, value in vars(holder).items():
                    if isinstance(value, torch.Tensor) and key not in _CONSTANTS:
                        owner = f"layer {index} with experts, {name}: {type(holder).__name__}.{key}"
                        yield OffloadItem(owner, "param", value, "rebuild", partial(setattr, holder, key, None))


def _gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[OffloadItem]:
    for record in iter_buffers(chunks):
        buffer = f"chunk{record.chunk_index}.{record.kind}{record.index}"
        yield OffloadItem(owner=f"{buffer}.grad_data", kind="grad", tensor=record.grad_data, action="drop")
        for number, extra in enumerate(record.extra_grads):
            yield OffloadItem(owner=f"{buffer}.extra_main_grads[{number}]", kind="grad", tensor=extra, action="drop")


def _optimizer_state(optimizer: MegatronOptimizer) -> Iterator[OffloadItem]:
    gathered = gather_state(optimizer, reserve_elastic, restore_elastic)
    for number, buffer in enumerate(gathered.buffers):
        dtype = str(buffer.tensor.dtype).removeprefix("torch.")
        owner = f"{buffer.path}main params and moments, {dtype}, {number}"
        yield OffloadItem(owner=owner, kind="optimizer", tensor=buffer.tensor)
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
    for (name, dtype), tensor in scratch.items():
        owner = f"megatron-core's memory buffer {name}, {str(dtype).removeprefix('torch.')}"
        yield OffloadItem(owner, "param", tensor, "rebuild", forget=scratch.clear)
    for owner, tensor, forget in cached_embeddings():
        yield OffloadItem(owner, "param", tensor, "rebuild", forget)
