"""A LoRA as one more group of inference weights: it arrives with the switch and goes to vLLM as one of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from hybrid_engine.backends.vllm.lora.delivered_loras import DeliveredLoras
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.models.lora_tensors import ActorLora
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides

GROUP = "lora"
"""The commit group of all its tensors."""


class WeightsWithLora:
    """vLLM's weights and, beside them, the actor's LoRA (port `InferenceWeights`).

    Args:
        weights: the engine's.
        loras: of the same engine.
        lora: what is trained; every rank takes all of its tensors, vLLM cuts them itself.
        dtype: of the LoRA, e.g. "bfloat16".

    Memory: the whole LoRA on every rank while it arrives, and vLLM's copy of it on the host.
    """

    def __init__(
        self,
        weights: VllmAdaptor,
        loras: DeliveredLoras,
        lora: ActorLora,
        dtype: str,
    ) -> None:
        self._weights, self._loras = weights, loras
        self._lora, self._dtype = lora, dtype
        self._arriving: dict[str, torch.Tensor] = {}
        self._is_delivered = False

    def layout(self) -> Layout:
        """The weights' records and one for each tensor of the LoRA."""
        rank, shapes = self._weights.rank, self._lora.shapes
        buffers = {BufferId(rank, name): Buffer(math.prod(shape), self._dtype, GROUP) for name, shape in shapes.items()}
        shards = tuple(
            Shard(Region(name, (0,) * len(shape), shape), Place(BufferId(rank, name), 0, contiguous_strides(shape)))
            for name, shape in shapes.items()
        )
        return Layout.merge([self._weights.layout(), Layout(shapes, buffers, shards)])

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """As the port says; the LoRA's tensors are new."""
        buffers = dict(self._weights.allocate([group for group in groups if group != GROUP]))
        if GROUP in groups:
            self._arriving = {
                name: torch.empty(math.prod(shape), dtype=getattr(torch, self._dtype), device=self._weights.device)
                for name, shape in self._lora.shapes.items()
            }
            buffers |= self._arriving
        return buffers

    def commit(self, groups: Sequence[str]) -> None:
        """As the port says; the LoRA takes the place of the version before."""
        self._weights.commit([group for group in groups if group != GROUP])
        if GROUP in groups:
            self._is_delivered = False
            tensors = {name: flat.view(self._lora.shapes[name]) for name, flat in self._arriving.items()}
            self._loras.deliver(self._lora.name, self._lora.settings, tensors)
            self._is_delivered = True
            self._arriving = {}

    def finish_fill(self) -> None:
        """As the port says."""
        self._weights.finish_fill()

    def abandon(self) -> None:
        """As the port says."""
        self._weights.abandon()

    def release(self, keep: Collection[str] = ()) -> None:
        """As the port says; vLLM keeps its copy of the LoRA on the host."""
        self._arriving = {}
        self._is_delivered = self._is_delivered and GROUP in keep
        self._loras.drop_from_device()
        self._weights.release([group for group in keep if group != GROUP])

    def committed(self) -> Collection[str]:
        """As the port says; the LoRA's next request brings it from the host."""
        return [*self._weights.committed(), *([GROUP] if self._is_delivered else ())]

    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> AbstractContextManager[None]:
        """As the port says, of the weights; what vLLM makes of a LoRA is not looked at."""
        return self._weights.proving(tensors, unproven)

    def resident_nbytes(self) -> int:
        """As the port says; vLLM's copy of the LoRA on the host is not counted."""
        return self._weights.resident_nbytes() + sum(flat.nbytes for flat in self._arriving.values())
