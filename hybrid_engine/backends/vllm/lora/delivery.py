"""Adapters as one more group of inference weights: they arrive with the switch and go to vLLM as a LoRA adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.backends.vllm.engine_settings import AdapterConfig
from hybrid_engine.backends.vllm.lora.from_memory import Adapters
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides

ACTOR_ADAPTER = "actor"
"""Name of the adapter, to generate with."""

GROUP = "lora adapter"
"""The commit group of all its tensors."""


class WeightsWithAdapter:
    """vLLM's weights and, beside them, the actor's adapter (port `InferenceWeights`).

    Args:
        weights: the engine's.
        adapters: of the same engine, built with LoRA.
        shapes: the adapter's tensors by PEFT's names; every rank takes all of them, vLLM cuts them itself.
        config: rank, alpha and modules.
        dtype: of the adapter, e.g. torch.bfloat16.

    Memory: the whole adapter on every rank while it arrives, and vLLM's copy of it on the host.
    """

    def __init__(
        self,
        weights: VllmAdaptor,
        adapters: Adapters,
        shapes: Mapping[str, tuple[int, ...]],
        config: AdapterConfig,
        dtype: torch.dtype,
    ) -> None:
        self._weights, self._adapters = weights, adapters
        self._shapes, self._config, self._dtype = dict(shapes), config, dtype
        self._arriving: dict[str, torch.Tensor] = {}

    def layout(self) -> Layout:
        """The weights' records and one for each tensor of the adapter."""
        rank, dtype = self._weights.rank, str(self._dtype).removeprefix("torch.")
        buffers = {BufferId(rank, name): Buffer(math.prod(shape), dtype, GROUP) for name, shape in self._shapes.items()}
        shards = tuple(
            Shard(Region(name, (0,) * len(shape), shape), Place(BufferId(rank, name), 0, contiguous_strides(shape)))
            for name, shape in self._shapes.items()
        )
        return Layout.merge([self._weights.layout(), Layout(self._shapes, buffers, shards)])

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """As the port says; the adapter's tensors are new."""
        buffers = dict(self._weights.allocate([group for group in groups if group != GROUP]))
        if GROUP in groups:
            device = next(self._weights.model.parameters()).device
            self._arriving = {
                name: torch.empty(math.prod(shape), dtype=self._dtype, device=device)
                for name, shape in self._shapes.items()
            }
            buffers |= self._arriving
        return buffers

    def commit(self, groups: Sequence[str]) -> None:
        """As the port says; the adapter becomes vLLM's adapter `ACTOR_ADAPTER`, in place of the version before."""
        self._weights.commit([group for group in groups if group != GROUP])
        if GROUP in groups:
            tensors = {name: flat.view(self._shapes[name]) for name, flat in self._arriving.items()}
            self._adapters.set(ACTOR_ADAPTER, self._config, tensors)
            self._arriving = {}

    def finish_fill(self) -> None:
        """As the port says."""
        self._weights.finish_fill()

    def release(self) -> None:
        """As the port says; vLLM keeps its copy of the adapter on the host."""
        self._arriving = {}
        self._adapters.drop_from_device()
        self._weights.release()

    def resident_nbytes(self) -> int:
        """As the port says; vLLM's copy of the adapter on the host is not counted."""
        return self._weights.resident_nbytes() + sum(flat.nbytes for flat in self._arriving.values())
