"""Computed sources: tensors that a switch reads and that are not stored in a training buffer.

Examples are sums of weights and LoRA, and quantised weights. They get scratch memory: flat elastic
buffers, which the layout shows like any other, so that they are planned, sent, verified and
released as stored weights are. The stored weights are never written.

    set-up    ComputedSources(...)           + scratch memory, in one buffer per dtype
    layout    before the first: `late_sources`, with scratch memory
    switch    `prepare` calls `fill`         all values are computed again
    off       `scratch` names the buffers    their memory is dropped without a copy

An adaptor is an `AdaptorWithSources`: its computed sources are filled in the order in which it
makes them, so that one may be computed from another. A `View` shows sources that are made of the
adaptor's own records in place of these (quantised_sources.py).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch

from hybrid_engine.backends.training_side import (
    GuardedState,
    NamedTensor,
    Origins,
    dtype_name,
    elastic_parts,
    flat_storage_of,
    is_frozen,
    read_parts,
    require_usable_values,
)
from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.models.block_quantization import BlockQuantization
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.torch_internals import TensorDict, torch_defaults
from hybrid_engine.records.layout import Extent, Layout
from hybrid_engine.records.regions import Region
from hybrid_engine.transports.copies import FlatBuffers

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
        self.buffers: TensorDict = {}
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


@dataclass(frozen=True, eq=False)
class StoredScales:
    """Scales of a part of a weight that the trainer keeps in the elements of a format.

    Attributes:
        region: the part of the weight.
        parameter: the tensor that holds it.
        rows, columns: the row and the column of the stored block, for each row and each column of
            the region.
        read: returns the scales of the parameter's stored blocks as they are now.
    """

    region: Region
    parameter: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    read: Callable[[], torch.Tensor]


class View(Protocol):
    """Sources that are computed from tensors of a layout, and shown in place of them."""

    sources: ComputedSources[Any]

    def layout(self, layout: Layout, buffers: FlatBuffers, rank: int) -> Layout:
        """Return a rank's `layout` with the computed tensors, in `buffers`."""

    def origins(self, origins: Origins) -> Origins:
        """Return the model's tensors behind each canonical tensor, given those of the layout."""


class AdaptorWithSources(TrainingWeights, ABC):
    """The part of a training adaptor that serves its computed sources; the same for all trainers.

    Attributes:
        rank: rank of this process in the job.
        table: the model's name table.
        computed: the adaptor's own computed sources, in the order in which `prepare` fills them.
        sent_as_stored: quantised weights that `own_layout` shows in the elements in which the
            trainer keeps them. It is set once, before the first layout.
        view: shown in place of some of the adaptor's tensors; None: all are shown. It is set once,
            before a switch is planned.
    """

    rank: int
    table: ModelTable

    def __init__(self) -> None:
        self.computed: list[ComputedSources[Any]] = []
        self.sent_as_stored: frozenset[str] = frozenset()
        self._is_complete = False
        self.view: View | None = None

    @abstractmethod
    def own_layout(self) -> Layout:
        """Return the location of every canonical tensor on this rank, without the view.

        Raises:
            ParameterMismatchError: listing every tensor that does not fit the name table.
        """

    @abstractmethod
    def own_origins(self) -> Origins:
        """Return canonical tensor -> this rank's tensors of the model that it is computed from."""

    @abstractmethod
    def stored_buffers(self) -> FlatBuffers:
        """Return the flat buffers of the model's own tensors, by name."""

    @abstractmethod
    def described_tensors(self) -> Iterator[NamedTensor]:
        """Yield (name in messages, elements on this rank) of every tensor whose values count."""

    def stored_scales(
        self,
        quantization: BlockQuantization,
    ) -> Mapping[str, Sequence[StoredScales]]:
        """Return the weights that the trainer keeps in this format on this rank; default: none.

        Raises ConfigError for weights that it keeps in another.
        """
        return {}

    def late_sources(self) -> list[ComputedSources[Any]]:
        """Return further computed sources, which are filled first.

        Called once, before the first layout, when `sent_as_stored` is known.
        """
        return []

    def complete(self) -> None:
        """Make the sources of `late_sources`; idempotent."""
        if not self._is_complete:
            self.computed[:0] = self.late_sources()
            self._is_complete = True

    def without_view(self) -> Self:
        """Return this adaptor without its view, with the same computed sources."""
        if self.view is None:
            return self
        twin = copy.copy(self)
        twin.view = None
        return twin

    def layout(self) -> Layout:
        """Return the location of every canonical tensor that a switch reads on this rank.

        Raises:
            ParameterMismatchError: listing every tensor that does not fit the name table.
        """
        self.complete()
        layout = self.own_layout()
        if self.view is None:
            return layout
        return self.view.layout(layout, self.buffers(), self.rank)

    def origins(self) -> Origins:
        """Return canonical tensor -> this rank's tensors of the model that it is computed from."""
        origins = self.own_origins()
        return origins if self.view is None else self.view.origins(origins)

    def buffers(self) -> FlatBuffers:
        """Return the flat buffers by name: the model's, and those of computed sources."""
        self.complete()
        return self.allocated()

    def allocated(self) -> FlatBuffers:
        """Return `buffers` without those of late sources that are not made yet."""
        buffers = dict(self.stored_buffers())
        for sources in self._all_computed():
            buffers |= sources.buffers
        return buffers

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers that `prepare` fills, so that their contents need not be kept."""
        return frozenset(name for sources in self._all_computed() for name in sources.buffers)

    def offload_items(self) -> Iterator[OffloadItem]:
        """Yield an item for each buffer that has memory; those of `scratch` need no copy."""
        scratch = self.scratch
        for name, flat in self.allocated().items():
            yield OffloadItem(name, "param", flat, "drop" if name in scratch else "copy")

    def _all_computed(self) -> list[ComputedSources[Any]]:
        return self.computed if self.view is None else [*self.computed, self.view.sources]

    def prepare(self) -> None:
        """Finish pending work on the weights, and compute the sources that are not stored.

        Collective if `finish_pending` or a computation is.

        Raises:
            ReshardError: weights are no longer where the layout has them.
        """
        self.finish_pending()
        self.complete()
        for sources in self._all_computed():
            sources.fill()

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """Raise WeightError if a weight has a NaN or an infinite value.

        `unread`: intervals by buffer, in elements, that need no check because no peer reads them.
        """
        # Tensors of a view are finite if those that they are computed from are.
        shown = {} if self.view is None else self.view.sources.buffers
        buffers = {name: flat for name, flat in self.buffers().items() if name not in shown}
        parts = read_parts(buffers, unread or {})
        require_usable_values(parts, self.described_tensors)


class ModelTrainer(GuardedState):
    """Base class of trainers of a whole model, whose tensors are in a name table."""

    weights: AdaptorWithSources

    @property
    def unserved(self) -> list[str]:
        table = self.weights.table
        return [name for name in table.shapes if not table.is_served(name)]

    @property
    def frozen(self) -> list[str]:
        """Canonical tensors of this rank, all of whose parameters require no gradient now."""
        origins = self.weights.origins()
        return [name for name, tensors in origins.items() if all(map(is_frozen, tensors))]
