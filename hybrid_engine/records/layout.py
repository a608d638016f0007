"""Layouts: which region of which canonical tensor lies where.

One record, `Shard`, says everything about tensor, pipeline, expert and data parallelism, fused and interleaved
projections, replicated heads, vocabulary padding and transposition:

    this region of canonical tensor T lives at this strided place of buffer B on rank R

A `Layout` is a list of such records with the sizes of the tensors and buffers they speak of. Adaptors emit one for
their own rank; `Layout.merge` joins those of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hybrid_engine.errors import PlanError
from hybrid_engine.records.regions import Region, subtract_all

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
    """A flat buffer: `name` is unique on `rank` (global rank) and within one side, training or inference."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """The flat interval [start, stop) of a buffer, in elements."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"invalid interval [{self.start}, {self.stop})")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Properties of a flat buffer.

    Attributes:
        numel: elements.
        dtype: torch's name without the prefix, e.g. "bfloat16".
        group: buffers of one group are filled and committed together (vLLM: the module's name).
        padding: intervals that belong to no canonical tensor on purpose (vocabulary and bucket padding).
        exported: peers on the same host can map the buffer's memory and read it directly.
    """

    numel: int
    dtype: str
    group: str = ""
    padding: tuple[Extent, ...] = ()
    exported: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPE_NBYTES)}")
        if empty := [extent for extent in self.padding if extent.start == extent.stop]:
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
    """A strided place in a buffer, in elements: index i of a box lies at `offset + sum(i_d * strides[d])`."""

    buffer: BufferId
    offset: int
    strides: tuple[int, ...]

    def at(self, index: Iterable[int]) -> Place:
        """The place of the sub-box that starts at `index`, relative to this place's own start."""
        shift = sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        return Place(self.buffer, self.offset + shift, self.strides)

    def extent(self, lengths: Iterable[int]) -> Extent:
        """From the first to the last element of a box of these lengths, none of them 0, that lies here."""
        reach = sum((length - 1) * stride for length, stride in zip(lengths, self.strides, strict=True))
        return Extent(self.offset, self.offset + reach + 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """The record: `region` lives at `place`. Strides have one entry per dim of the canonical tensor."""

    region: Region
    place: Place

    def __post_init__(self) -> None:
        if len(self.place.strides) != len(self.region.lengths):
            raise ValueError(
                f"{self.region.tensor}: {len(self.place.strides)} strides for {len(self.region.lengths)} dims"
            )


@dataclass(frozen=True)
class Layout:
    """Where every region of one side (training or inference) lives, on one rank or on all.

    Attributes:
        tensors: canonical name -> shape. On the source side the tensors the ranks hold; on the destination side those
            the inference engine was offered, including ones it read nothing from.
        buffers: every buffer that shards speak of.
        shards: the records.
    """

    tensors: Mapping[str, tuple[int, ...]]
    buffers: Mapping[BufferId, Buffer]
    shards: tuple[Shard, ...] = field(default=())

    @staticmethod
    def merge(layouts: Iterable[Layout]) -> Layout:
        """Join the layouts of several ranks. Raises PlanError with every tensor and buffer on which two disagree."""
        tensors: dict[str, tuple[int, ...]] = {}
        buffers: dict[BufferId, Buffer] = {}
        shards: list[Shard] = []
        faults: list[str] = []
        merged: dict[int, Mapping[str, tuple[int, ...]]] = {}  # by identity: many ranks name the same tensors
        for layout in layouts:
            named = {} if id(layout.tensors) in merged else layout.tensors
            merged[id(layout.tensors)] = layout.tensors
            for name, shape in named.items():
                if tensors.setdefault(name, shape) != shape:
                    faults.append(f"{name}: shape {tensors[name]} on one rank, {shape} on another")
            for buffer_id, buffer in layout.buffers.items():
                if buffers.setdefault(buffer_id, buffer) != buffer:
                    faults.append(f"{buffer_id}: described twice, as {buffers[buffer_id]} and as {buffer}")
            shards.extend(layout.shards)
        if faults:
            raise PlanError(faults)
        return Layout(tensors, buffers, tuple(shards))

    def on(self, rank: int) -> Layout:
        """The same layout, of one rank, as that of another."""
        ids = {buffer_id: BufferId(rank, buffer_id.name) for buffer_id in self.buffers}
        shards = (replace(each, place=replace(each.place, buffer=ids[each.place.buffer])) for each in self.shards)
        return Layout(self.tensors, {ids[buffer_id]: one for buffer_id, one in self.buffers.items()}, tuple(shards))

    def without(self, tensors: Collection[str]) -> Layout:
        """The layout without the shards of some tensors."""
        return replace(self, shards=tuple(shard for shard in self.shards if shard.region.tensor not in tensors))

    def shards_by_tensor(self) -> dict[str, list[Shard]]:
        """Canonical name -> its shards, in order of rank and of place; the order in which they were emitted is lost."""
        grouped: dict[str, list[Shard]] = {}
        for shard in self._sorted_shards():
            grouped.setdefault(shard.region.tensor, []).append(shard)
        return grouped

    def _sorted_shards(self) -> list[Shard]:
        return sorted(self.shards, key=lambda shard: (shard.place.buffer, shard.place.offset, shard.region))


def differences(one: Layout, other: Layout) -> list[str]:
    """Tensors of which two layouts hold different elements, in whatever pieces, places and buffers; sorted."""
    ours, theirs = _regions(one), _regions(other)
    return sorted(name for name in ours.keys() | theirs.keys() if not _same(ours.get(name, []), theirs.get(name, [])))


def _regions(layout: Layout) -> dict[str, list[Region]]:
    regions: dict[str, list[Region]] = {}
    for shard in layout.shards:
        regions.setdefault(shard.region.tensor, []).append(shard.region)
    return regions


def _same(one: list[Region], other: list[Region]) -> bool:
    return set(one) == set(other) or not (subtract_all(one, other) or subtract_all(other, one))
