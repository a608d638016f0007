"""Computed sources: tensors that a switch reads and that are not stored in a training buffer.

Examples are sums of weights and LoRA, and quantised weights. They get scratch memory: flat elastic
buffers, which the layout shows like any other, so that they are planned, sent, verified and
released as stored weights are. The stored weights are never written.

    set-up    ComputedSources(...)           + scratch memory, in one buffer per dtype
    switch    `prepare` calls `fill`         all values are computed again
    off       `scratch` names the buffers    their memory is dropped without a copy

An adaptor is an `AdaptorWithSources`: its computed sources are filled in the order in which it
makes them, so that one may be computed from another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from hybrid_engine.backends.training_side import (
    dtype_name,
    elastic_parts,
    flat_storage_of,
    read_parts,
    require_usable_values,
)
from hybrid_engine.ranks.torch_internals import torch_defaults
from hybrid_engine.records.layout import Extent

Key = TypeVar("Key", bound=Hashable)


class Home(NamedTuple):
    """Start of a tensor in a flat buffer, in elements."""

    buffer: str
    offset: int


class ComputedSources(Generic[Key]):
    """Scratch memory of computed tensors on this rank, and the function that computes them.

    Args:
        label: what the buffers hold; a part of their names.
        shapes: key of each tensor -> a tensor of its shape and dtype on this rank, which may be on
            the meta device.
        device: device of the memory.
        compute: writes all of `tensors`, which it gets as its argument. It is called on all ranks,
            also if a rank has no element of them, and may be collective.

    Attributes:
        tensors: key -> contiguous tensor in a buffer, of the values of the last `fill`.
        homes: key -> its place; tensors without elements have none.
        buffers: flat buffers by name; peers on the host can map them.
    """

    def __init__(
        self,
        label: str,
        shapes: Mapping[Key, torch.Tensor],
        device: torch.device,
        compute: Callable[[Mapping[Key, torch.Tensor]], None],
    ) -> None:
        self._compute = compute
        parts = elastic_parts(list(shapes.values()), device)
        self.tensors: Mapping[Key, torch.Tensor] = dict(zip(shapes, parts, strict=True))
        self.homes: dict[Key, Home] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for key, part in self.tensors.items():
            if part.numel():
                name = f"{label} in {dtype_name(part)}"
                self.homes[key] = Home(name, int(part.storage_offset()))
                self.buffers.setdefault(name, flat_storage_of(part))

    @torch_defaults()  # autocast would multiply in bfloat16
    @torch.no_grad()
    def fill(self) -> None:
        """Compute all values. Collective if the computation is."""
        self._compute(self.tensors)


class AdaptorWithSources(ABC):
    """The part of a training adaptor that serves its computed sources; the same for all trainers.

    Attributes:
        computed: computed sources, in the order in which `prepare` fills them.
    """

    def __init__(self) -> None:
        self.computed: list[ComputedSources[Any]] = []

    @abstractmethod
    def stored_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the flat buffers of the model's own tensors, by name."""

    @abstractmethod
    def finish_pending(self) -> None:
        """Make the stored weights final. Raises ReshardError if they are not where they were."""

    @abstractmethod
    def described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in messages, elements on this rank) of every tensor whose values count."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the flat buffers by name: the model's, and those of computed sources."""
        buffers = dict(self.stored_buffers())
        for sources in self.computed:
            buffers |= sources.buffers
        return buffers

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers that `prepare` fills, so that their contents need not be kept."""
        return frozenset(name for sources in self.computed for name in sources.buffers)

    def prepare(self) -> None:
        """Finish pending work on the weights, and compute the sources that are not stored.

        Collective if `finish_pending` or a computation is.

        Raises:
            ReshardError: weights are no longer where the layout has them.
        """
        self.finish_pending()
        for sources in self.computed:
            sources.fill()

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """Raise WeightError if a weight has a NaN or an infinite value.

        `unread`: intervals by buffer, in elements, that need no check because no peer reads them.
        """
        parts = read_parts(self.buffers(), unread or {})
        require_usable_values(parts, self.described_tensors)
