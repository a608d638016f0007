"""What all ranks of one side hold, said once for ranks that hold the same.

Data parallel replicas have equal layouts but for their ranks, and thousands of ranks differ in a few dozen. So a rank's
layout is told as two messages without a rank, each of which many ranks share:

    names      tensors and their shapes
    records    buffers, and which box of which tensor lies where in them

    Side.from_messages(...)             of what ranks told each other (`Agreement.share`)
    Side.of(layouts), split(layout)     of explicit records
      .layout                           the records of the first rank of every kind
      .placed                           who holds what, of all ranks: what plans are made of
      .of_rank(rank), .buffers[id]      of any rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np

from hybrid_engine.errors import MessageError, PlanError
from hybrid_engine.messages import Record, decode, encode
from hybrid_engine.records.holdings import PlacedHoldings, placed_holdings
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.validation import undeclared_faults

_Index = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
"""Whether it can be is for `validation` to say, which names the tensor."""


class _Names(Record, frozen=True):
    names: list[str]
    shapes: list[tuple[_Number, ...]]


class _Buffer(Record, frozen=True):
    name: str
    numel: _Number
    dtype: str
    group: str
    padding: list[tuple[_Number, _Number]]
    exported: bool


class _Shard(Record, frozen=True):
    tensor: _Index  # index of the tensor
    buffer: _Index  # index of the buffer
    offset: _Number
    strides: tuple[_Number, ...]
    starts: tuple[_Number, ...]
    lengths: tuple[_Number, ...]


class _Records(Record, frozen=True):
    buffers: list[_Buffer]
    shards: list[_Shard]


def layout_messages(layout: Layout) -> tuple[bytes, bytes]:
    """A rank's layout as names and records, without its rank: equal for ranks that hold the same in the same places.

    Raises PlanError naming every record of a tensor or buffer that the layout does not declare.
    """
    return _names_message(layout.tensors), _records_message(layout, _numbers_of(layout.tensors))


def _names_message(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    return encode(_Names(list(tensors), list(tensors.values())))


def _numbers_of(tensors: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(tensors)}


def _records_message(layout: Layout, number_of: Mapping[str, int]) -> bytes:
    """`number_of`: the layout's tensors."""
    if faults := undeclared_faults(layout):
        raise PlanError(faults)
    ids = sorted(layout.buffers, key=lambda buffer_id: buffer_id.name)
    buffer_of = {buffer_id: number for number, buffer_id in enumerate(ids)}
    buffers = [
        _Buffer(
            each.name,
            found.numel,
            found.dtype,
            found.group,
            [(extent.start, extent.stop) for extent in found.padding],
            found.exported,
        )
        for each in ids
        for found in (layout.buffers[each],)
    ]
    shards = [
        _Shard(
            number_of[shard.region.tensor],
            buffer_of[shard.place.buffer],
            shard.place.offset,
            shard.place.strides,
            shard.region.offsets,
            shard.region.lengths,
        )
        for shard in layout.shards
    ]
    shards.sort(key=lambda row: (row.buffer, row.offset, row.tensor, row.starts, row.lengths, row.strides))
    return encode(_Records(buffers, shards))


def _tensors_from(names: bytes) -> dict[str, tuple[int, ...]]:
    named: _Names = decode(names, _Names)
    if len(named.names) != len(named.shapes):
        raise MessageError(f"not a layout: {len(named.names)} names and {len(named.shapes)} shapes")
    return dict(zip(named.names, named.shapes, strict=True))


def _layout_from(tensors: dict[str, tuple[int, ...]], names: Sequence[str], records: bytes, rank: int) -> Layout:
    found: _Records = decode(records, _Records)
    try:
        ids = [BufferId(rank, each.name) for each in found.buffers]
        buffers = {
            buffer_id: Buffer(
                each.numel, each.dtype, each.group, tuple(Extent(*extent) for extent in each.padding), each.exported
            )
            for buffer_id, each in zip(ids, found.buffers, strict=True)
        }
        shards = tuple(
            Shard(
                Region(names[each.tensor], each.starts, each.lengths),
                Place(ids[each.buffer], each.offset, each.strides),
            )
            for each in found.shards
        )
        return Layout(tensors, buffers, shards)
    except (ValueError, IndexError) as error:
        raise MessageError(f"not a layout: {error}") from None


@dataclass(frozen=True, eq=False)
class Side:
    """What all ranks of one side, training or inference, hold.

    Attributes:
        kinds: ranks that hold the same in the same places, as the layout of the first of them; in order of those.
        kind_of: number of the kind of every rank, int array.
        fingerprint: a digest of everything a plan depends on; the same on every rank and in every run. The order of
            tensors is in it (it is the order of the plan), those of buffers and shards are not.
    """

    kinds: tuple[Layout, ...]
    kind_of: np.ndarray
    fingerprint: str

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Side:
        """Of the layouts of all ranks, by rank. Raises PlanError."""
        return cls._numbered(map(layout_messages, layouts))

    @classmethod
    def split(cls, layout: Layout, num_ranks: int) -> Side:
        """Of explicit records of all ranks, each of which then declares all of the tensors. Raises PlanError."""
        buffers: list[dict[BufferId, Buffer]] = [{} for _ in range(num_ranks)]
        shards: list[list[Shard]] = [[] for _ in range(num_ranks)]
        for buffer_id, buffer in layout.buffers.items():
            buffers[buffer_id.rank][buffer_id] = buffer
        for shard in layout.shards:
            shards[shard.place.buffer.rank].append(shard)
        names, number_of = _names_message(layout.tensors), _numbers_of(layout.tensors)
        of_ranks = (Layout(layout.tensors, *own) for own in zip(buffers, map(tuple, shards), strict=True))
        return cls._numbered((names, _records_message(each, number_of)) for each in of_ranks)

    @classmethod
    def _numbered(cls, of_ranks: Iterable[tuple[bytes, bytes]]) -> Side:
        messages: dict[bytes, int] = {}
        told = [[messages.setdefault(message, len(messages)) for message in own] for own in of_ranks]
        return cls.from_messages(told, list(messages))

    @classmethod
    def from_messages(cls, told: Sequence[Sequence[int]], messages: Sequence[bytes]) -> Side:
        """Of what ranks told each other: for every rank the numbers of its names and records among the `messages`.

        Raises MessageError.
        """
        numbers: dict[tuple[int, ...], int] = {}
        firsts: list[int] = []
        kind_of = np.empty(len(told), dtype=np.int64)
        for rank, parts in enumerate(told):
            kind_of[rank] = number = numbers.setdefault(tuple(parts), len(numbers))
            if number == len(firsts):
                firsts.append(rank)
        tensors = {number: _tensors_from(messages[number]) for number in {told[rank][0] for rank in firsts}}
        names = {number: list(each) for number, each in tensors.items()}
        kinds = [
            _layout_from(tensors[told[rank][0]], names[told[rank][0]], messages[told[rank][1]], rank) for rank in firsts
        ]
        digest = hashlib.sha256(kind_of.astype("<i8").tobytes())
        for rank in firsts:
            for part in told[rank]:
                digest.update(hashlib.sha256(messages[part]).digest())
        return cls(tuple(kinds), kind_of, digest.hexdigest())

    @property
    def num_ranks(self) -> int:
        """Of the job."""
        return len(self.kind_of)

    def kind(self, rank: int) -> Layout:
        """What a rank holds, as the layout of the first rank that holds the same."""
        return self.kinds[self.kind_of[rank]]

    def of_rank(self, rank: int) -> Layout:
        """What a rank holds."""
        return self.kind(rank).on(rank)

    @cached_property
    def layout(self) -> Layout:
        """The records of the first rank of every kind. Raises PlanError with every tensor on which two disagree."""
        return Layout.merge(self.kinds)

    @cached_property
    def placed(self) -> PlacedHoldings:
        """Who holds what, and where. Raises PlanError naming every tensor that is held in several dtypes."""
        return self.placed_of(self.layout)

    def placed_of(self, layout: Layout) -> PlacedHoldings:
        """As `placed`, of a part of `layout`."""
        _, firsts = np.unique(self.kind_of, return_index=True)
        alike = {int(rank): np.flatnonzero(self.kind_of == kind) for kind, rank in enumerate(firsts)}
        return placed_holdings(layout, self.num_ranks, alike)

    def holds_any(self) -> np.ndarray:
        """By rank, whether it holds anything."""
        return np.array([bool(kind.buffers) for kind in self.kinds])[self.kind_of]

    @cached_property
    def buffers(self) -> Mapping[BufferId, Buffer]:
        """The buffers of all ranks."""
        return _Buffers(self)


class _Buffers(Mapping[BufferId, Buffer]):
    """Looks up the kind of the buffer's rank: there is no entry per rank."""

    def __init__(self, side: Side) -> None:
        self._kind_of = side.kind_of
        self._by_name = [{buffer_id.name: one for buffer_id, one in kind.buffers.items()} for kind in side.kinds]

    def __getitem__(self, buffer_id: BufferId) -> Buffer:
        if not 0 <= buffer_id.rank < len(self._kind_of):
            raise KeyError(buffer_id)
        return self._by_name[self._kind_of[buffer_id.rank]][buffer_id.name]

    def __iter__(self) -> Iterator[BufferId]:
        for rank, kind in enumerate(self._kind_of):
            yield from (BufferId(rank, name) for name in self._by_name[kind])

    def __len__(self) -> int:
        return sum(len(self._by_name[kind]) for kind in self._kind_of)
