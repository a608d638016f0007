"""Layouts: which region of which canonical tensor lies where.

One kind of record, `Shard`, covers tensor, pipeline, expert and data parallelism, fused and
interleaved projections, replicated heads, vocabulary padding and transposition:

    this region of canonical tensor T lives at this strided place of buffer B on rank R

A `Layout` is a list of these records with the sizes of their tensors and buffers. Adaptors emit
one for their rank; `Layout.merge` joins the layouts of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from hybrid_engine.errors import PlanError
from hybrid_engine.messages import Record
from hybrid_engine.records.regions import (
    LocalBox,
    Region,
    Shape,
    Shapes,
    Strides,
    refined_boxes,
    splits_of,
    subtract_all,
)

DTYPE_NBYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True, order=True)
class BufferId:
    """Identity of a flat buffer.

    `name` is unique on `rank` (global rank) within one side, training or inference.
    """

    rank: int
    name: str


Number = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
"""Any number that int64 arithmetic can handle. `validation` checks its meaning and names the
tensor."""


class Extent(Record, frozen=True, order=True):
    """The flat interval [start, stop) of a buffer, in elements."""

    start: Number
    stop: Number

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"invalid interval [{self.start}, {self.stop})")


class Buffer(Record, frozen=True):
    """Properties of a flat buffer.

    Attributes:
        numel: elements.
        dtype: torch's name without the prefix, e.g. "bfloat16".
        group: buffers of one group are filled and committed together (vLLM: the module's name).
        padding: intervals that belong to no canonical tensor, for vocabulary or bucket padding.
        exported: peers on the same host can map the buffer's memory and read it directly.
    """

    numel: Number
    dtype: str
    group: str = ""
    padding: tuple[Extent, ...] = ()
    exported: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPE_NBYTES)}")
        empty = [extent for extent in self.padding if extent.start == extent.stop]
        if empty:
            raise ValueError(f"padding must not be empty, got {empty}; leave it out")

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_NBYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """A strided place in a buffer, in elements.

    Index i of a box lies at `offset + sum(i_d * strides[d])`.
    """

    buffer: BufferId
    offset: int
    strides: Strides

    def at(self, index: Iterable[int]) -> Place:
        """Return the place of the sub-box that starts at `index`, relative to this place."""
        shift = sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        return Place(self.buffer, self.offset + shift, self.strides)

    def extent(self, lengths: Iterable[int]) -> Extent:
        """Return the interval from the first to the last element of a box at this place.

        Args:
            lengths: elements of the box per dim, all at least 1.
        """
        # The last index of a dim is length - 1: two rows of 3 in a buffer of rows of 10 span 13
        # elements, [10 + 2 + 1], gaps included.
        steps = zip(lengths, self.strides, strict=True)
        reach = sum((length - 1) * stride for length, stride in steps)
        return Extent(self.offset, self.offset + reach + 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """The record: `region` lives at `place`. Strides have one entry per canonical dim."""

    region: Region
    place: Place

    @classmethod
    def of(cls, tensor: str, box: LocalBox, buffer: BufferId, start: int = 0) -> Shard:
        """Return the record of a box of `tensor`, in memory that is `buffer` from `start` on."""
        region = Region(tensor, box.offsets, box.lengths)
        return cls(region, Place(buffer, start + box.start, box.strides))

    def __post_init__(self) -> None:
        num_strides = len(self.place.strides)
        num_dims = len(self.region.lengths)
        if num_strides != num_dims:
            raise ValueError(f"{self.region.tensor}: {num_strides} strides for {num_dims} dims")


@dataclass(frozen=True)
class Layout:
    """Places of all regions of one side (training or inference), on one rank or on all.

    Attributes:
        tensors: canonical name -> shape. On the source side the tensors that the ranks hold; on
            the destination side the tensors that the inference engine was offered, including
            those it reads nothing from.
        buffers: all buffers that the shards use.
        shards: the records.
    """

    tensors: Shapes
    buffers: Mapping[BufferId, Buffer]
    shards: tuple[Shard, ...] = field(default=())

    @staticmethod
    def merge(layouts: Iterable[Layout]) -> Layout:
        """Join the layouts of several ranks.

        Raises:
            PlanError: lists every tensor and buffer that two layouts describe differently.
        """
        tensors: dict[str, Shape] = {}
        buffers: dict[BufferId, Buffer] = {}
        shards: list[Shard] = []
        faults: list[str] = []
        # Many ranks share one mapping of tensors; merge each once. Keeping the mappings alive keeps
        # their ids unique.
        merged: dict[int, Shapes] = {}
        for layout in layouts:
            if id(layout.tensors) not in merged:
                merged[id(layout.tensors)] = layout.tensors
                for name, shape in layout.tensors.items():
                    if tensors.setdefault(name, shape) != shape:
                        faults.append(
                            f"{name}: shape {tensors[name]} on one rank, {shape} on another"
                        )
            for buffer_id, buffer in layout.buffers.items():
                if buffers.setdefault(buffer_id, buffer) != buffer:
                    faults.append(
                        f"{buffer_id}: described twice, as {buffers[buffer_id]} and as {buffer}"
                    )
            shards.extend(layout.shards)
        if faults:
            raise PlanError(faults)
        return Layout(tensors, buffers, tuple(shards))

    def on(self, rank: int) -> Layout:
        """Return this layout of one rank as the layout of another."""
        # One id object per buffer, shared by all its shards.
        ids = {buffer_id: BufferId(rank, buffer_id.name) for buffer_id in self.buffers}
        buffers = {ids[buffer_id]: buffer for buffer_id, buffer in self.buffers.items()}
        shards = []
        for shard in self.shards:
            place = replace(shard.place, buffer=ids[shard.place.buffer])
            shards.append(replace(shard, place=place))
        return Layout(self.tensors, buffers, tuple(shards))

    def refined(self, shapes: Shapes) -> Layout:
        """Return the layout with tensors in finer shapes: [E, 2 I] as [E, I, 2].

        Args:
            shapes: canonical name -> finer shape. Other tensors stay.

        Raises:
            PlanError: lists every shape that does not refine the tensor's.
        """
        tensors = {name: shapes.get(name, shape) for name, shape in self.tensors.items()}
        splits = {}
        faults = []
        for name, shape in tensors.items():
            whole = self.tensors[name]
            if shape == whole:
                continue
            split = splits_of(whole, shape)
            if split is None:
                faults.append(f"{name}: shape {whole} on one side, {shape} on the other")
            else:
                splits[name] = split
        if faults:
            raise PlanError(faults)
        shards: list[Shard] = []
        for shard in self.shards:
            name = shard.region.tensor
            if name not in splits:
                shards.append(shard)
                continue
            # A shard that starts or ends within a refined row becomes several boxes.
            for box in refined_boxes(shard.region, shard.place.strides, splits[name]):
                shards.append(Shard.of(name, box, shard.place.buffer, shard.place.offset))
        return Layout(tensors, self.buffers, tuple(shards))

    def without(self, tensors: Collection[str]) -> Layout:
        """Return the layout without the shards of some tensors."""
        kept = tuple(shard for shard in self.shards if shard.region.tensor not in tensors)
        return replace(self, shards=kept)

    def shards_by_tensor(self) -> dict[str, list[Shard]]:
        """Return the shards by canonical name, sorted by rank and place.

        The result does not depend on the order in which the shards were emitted.
        """
        ordered = sorted(
            self.shards,
            key=lambda shard: (shard.place.buffer, shard.place.offset, shard.region),
        )
        grouped: dict[str, list[Shard]] = {}
        for shard in ordered:
            grouped.setdefault(shard.region.tensor, []).append(shard)
        return grouped


def differences(layout: Layout, other: Layout) -> list[str]:
    """Return the sorted names of tensors of which two layouts hold different elements.

    Pieces, places and buffers may differ.
    """
    regions = _regions(layout)
    other_regions = _regions(other)
    names = regions.keys() | other_regions.keys()
    return sorted(
        name
        for name in names
        if not _cover_the_same(regions.get(name, []), other_regions.get(name, []))
    )


def _regions(layout: Layout) -> dict[str, list[Region]]:
    regions: dict[str, list[Region]] = {}
    for shard in layout.shards:
        regions.setdefault(shard.region.tensor, []).append(shard.region)
    return regions


def _cover_the_same(regions: list[Region], others: list[Region]) -> bool:
    # Comparing sets is cheap and settles the usual case.
    if set(regions) == set(others):
        return True
    return not subtract_all(regions, others) and not subtract_all(others, regions)
