"""A LoRA as one more group of inference weights: it arrives with the switch and goes to vLLM as one of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.backends.vllm.engine_settings import LoraSettings
from hybrid_engine.backends.vllm.lora.delivered_loras import DeliveredLoras
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides

ACTOR_LORA = "actor"
"""Name of the LoRA, to generate with."""

GROUP = "lora"
"""The commit group of all its tensors."""


class WeightsWithLora:
    """vLLM's weights and, beside them, the actor's LoRA (port `InferenceWeights`).

    Args:
        weights: the engine's.
        loras: of the same engine.
        shapes: the LoRA's tensors by PEFT's names; every rank takes all of them, vLLM cuts them itself.
        settings: rank, alpha and modules.
        dtype: of the LoRA, e.g. torch.bfloat16.

    Memory: the whole LoRA on every rank while it arrives, and vLLM's copy of it on the host.
    """

    def __init__(
        self,
        weights: VllmAdaptor,
        loras: DeliveredLoras,
        shapes: Mapping[str, tuple[int, ...]],
        settings: LoraSettings,
        dtype: torch.dtype,
    ) -> None:
        self._weights, self._loras = weights, loras
        self._shapes, self._settings, self._dtype = dict(shapes), settings, dtype
        self._arriving: dict[str, torch.Tensor] = {}

    def layout(self) -> Layout:
        """The weights' records and one for each tensor of the LoRA."""
        rank, dtype = self._weights.rank, str(self._dtype).removeprefix("torch.")
        buffers = {BufferId(rank, name): Buffer(math.prod(shape), dtype, GROUP) for name, shape in self._shapes.items()}
        shards = tuple(
            Shard(Region(name, (0,) * len(shape), shape), Place(BufferId(rank, name), 0, contiguous_strides(shape)))
            for name, shape in self._shapes.items()
        )
        return Layout.merge([self._weights.layout(), Layout(self._shapes, buffers, shards)])

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """As the port says; the LoRA's tensors are new."""
        buffers = dict(self._weights.allocate([group for group in groups if group != GROUP]))
        if GROUP in groups:
            self._arriving = {
                name: torch.empty(math.prod(shape), dtype=self._dtype, device=self._weights.device)
                for name, shape in self._shapes.items()
            }
            buffers |= self._arriving
        return buffers

    def commit(self, groups: Sequence[str]) -> None:
        """As the port says; the LoRA becomes vLLM's `ACTOR_LORA`, in place of the version before."""
        self._weights.commit([group for group in groups if group != GROUP])
        if GROUP in groups:
            tensors = {name: flat.view(self._shapes[name]) for name, flat in self._arriving.items()}
            self._loras.deliver(ACTOR_LORA, self._settings, tensors)
            self._arriving = {}

    def finish_fill(self) -> None:
        """As the port says."""
        self._weights.finish_fill()

    def release(self) -> None:
        """As the port says; vLLM keeps its copy of the LoRA on the host."""
        self._arriving = {}
        self._loras.drop_from_device()
        self._weights.release()

    def resident_nbytes(self) -> int:
        """As the port says; vLLM's copy of the LoRA on the host is not counted."""
        return self._weights.resident_nbytes() + sum(flat.nbytes for flat in self._arriving.values())
