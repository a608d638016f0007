"""A Megatron model as the side that is written: port `InferenceWeights` over the adaptor's records.

destination = MegatronDestination(MegatronAdaptor(ModelTensors(chunks, table)))     # in that model's own groups
plan(training.layout(), destination.layout(), ...)                                  # as with any inference engine
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from hybrid_engine.backends.megatron.adaptor import SUMS, MegatronAdaptor
from hybrid_engine.errors import StateError
from hybrid_engine.records.layout import BufferId, Layout


class MegatronDestination:
    """One rank's share of a Megatron model that is filled from another one.

    Args:
        adaptor: of the model that is filled; made while that model's parallel state is Megatron's present one.

    Every flat buffer is a group of its own. Weights are written in place: nothing is allocated, committed or freed, so
    `release` keeps memory and contents. Padding is zeroed here, once.

    Raises StateError for a model with LoRA, whose weights do not lie where its sums would be written.
    """

    def __init__(self, adaptor: MegatronAdaptor) -> None:
        if SUMS in adaptor.buffers():
            raise StateError("cannot write a model with LoRA: build it without lora")
        self._adaptor = adaptor
        self._buffers = adaptor.buffers()
        adaptor.zero_padding()
        layout = adaptor.layout()
        grouped = {buffer_id: replace(buffer, group=buffer_id.name) for buffer_id, buffer in layout.buffers.items()}
        self._layout = Layout(layout.tensors, grouped, layout.shards)

    def layout(self) -> Layout:
        """The records of this rank."""
        return self._layout

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The live flat buffers of these groups. Raises StateError for one that this rank does not have."""
        self._check_known(groups)
        return {name: self._buffers[name] for name in groups}

    def commit(self, groups: Sequence[str]) -> None:
        """Nothing to do: what was written is live. Raises StateError for an unknown group."""
        self._check_known(groups)

    def finish_fill(self) -> None:
        """Nothing: there is no other memory."""

    def abandon(self) -> None:
        """Nothing: no rank waits for another in `commit`."""

    def release(self, keep: Collection[str] = ()) -> None:
        """Nothing: the model keeps its memory."""

    def committed(self) -> Collection[str]:
        """All: the model always holds what was written last."""
        return list(self._buffers)

    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> AbstractContextManager[None]:
        """As the port says: Megatron computes with the buffers themselves."""
        return nullcontext()

    def resident_nbytes(self) -> int:
        """Bytes of the model's parameters."""
        return sum(flat.nbytes for flat in self._buffers.values())

    def _check_known(self, groups: Sequence[str]) -> None:
        if unknown := [name for name in groups if BufferId(self._adaptor.rank, name) not in self._layout.buffers]:
            raise StateError(f"unknown buffers on rank {self._adaptor.rank}: {', '.join(unknown)}")
