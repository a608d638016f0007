"""Records of all ranks of one side, stored once for ranks that hold the same.

Data parallel replicas have equal layouts except for their ranks, and thousands of ranks have a few
dozen different ones. The layout of a rank is therefore sent as two messages that do not contain
the rank, and that many ranks have in common:

    names      tensors and their shapes
    records    buffers, and which box of which tensor lies where in them

    Side.from_messages(...)             from the messages of all ranks (`Agreement.share`)
    Side.of(layouts), split(layout)     from explicit records
      .layout                           the records of the first rank of every kind
      .holdings                         the compact records of all ranks, from which plans are made
      .of_rank(rank), .buffers[id]      the records of any rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np

from hybrid_engine.errors import MessageError, PlanError
from hybrid_engine.messages import Record, decode, encode
from hybrid_engine.records.holdings import Holdings, holdings_of
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Number, Place, Shard
from hybrid_engine.records.regions import Region, Shape, Shapes, splits_of
from hybrid_engine.records.validation import undeclared_faults

_Index = Annotated[int, msgspec.Meta(ge=0)]
_Names = dict[str, tuple[Number, ...]]
"""Tensors and their shapes, in the model's order."""


class _ShardRecord(Record, frozen=True, order=True):
    """Message form of `Shard`, with its tensor and its buffer as indices."""

    buffer: _Index
    offset: Number
    tensor: _Index
    starts: tuple[Number, ...]
    lengths: tuple[Number, ...]
    strides: tuple[Number, ...]


class _RecordsMessage(Record, frozen=True):
    buffers: dict[str, Buffer]
    shards: list[_ShardRecord]


def layout_messages(layout: Layout) -> tuple[bytes, bytes]:
    """Return the names and the records of a rank's layout, encoded without the rank.

    Ranks that hold the same in the same places have equal messages.

    Raises:
        PlanError: lists every record of a tensor or buffer that the layout does not declare.
    """
    return _names_message(layout.tensors), _records_message(layout, _numbered(layout.tensors))


def _names_message(tensors: Shapes) -> bytes:
    return encode(dict(tensors))


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _records_message(layout: Layout, tensor_numbers: Mapping[str, int]) -> bytes:
    """Encode a rank's buffers and shards, sorted so that their order does not matter.

    Args:
        layout: of one rank.
        tensor_numbers: ordinal of each tensor of the layout.
    """
    faults = undeclared_faults(layout)
    if faults:
        raise PlanError(faults)
    # By name only: the rank is not part of the message.
    ids = sorted(layout.buffers, key=lambda buffer_id: buffer_id.name)
    buffers = {buffer_id.name: layout.buffers[buffer_id] for buffer_id in ids}
    buffer_numbers = _numbered(buffers)
    shards = [
        _ShardRecord(
            buffer_numbers[shard.place.buffer.name],
            shard.place.offset,
            tensor_numbers[shard.region.tensor],
            shard.region.offsets,
            shard.region.lengths,
            shard.place.strides,
        )
        for shard in layout.shards
    ]
    return encode(_RecordsMessage(buffers, sorted(shards)))


def _decoded_layout(
    tensors: dict[str, Shape],
    message: bytes,
    rank: int,
) -> Layout:
    """Decode the records of one rank.

    Args:
        tensors: decoded names message. All layouts with this message share the object.
        message: the records.
        rank: the rank that holds them.
    """
    records: _RecordsMessage = decode(message, _RecordsMessage)
    names = list(tensors)
    ids = [BufferId(rank, name) for name in records.buffers]
    buffers = dict(zip(ids, records.buffers.values(), strict=True))
    try:
        shards = []
        for shard in records.shards:
            region = Region(names[shard.tensor], shard.starts, shard.lengths)
            place = Place(ids[shard.buffer], shard.offset, shard.strides)
            shards.append(Shard(region, place))
        return Layout(tensors, buffers, tuple(shards))
    except (ValueError, IndexError) as error:
        raise MessageError(f"not a layout: {error}", code="not-a-layout") from None


@dataclass(frozen=True, eq=False)
class Side:
    """Records of all ranks of one side, training or inference.

    Ranks are of one kind if they hold the same regions in the same places.

    Attributes:
        kinds: layout of the first rank of each kind, in order of these ranks.
        kind_of: number of the kind of every rank, int array.
        fingerprint: digest of everything that a plan depends on, equal on every rank and in every
            run. It covers the order of tensors, which is the order of the plan, but not the order
            of buffers and shards.
    """

    kinds: tuple[Layout, ...]
    kind_of: np.ndarray
    fingerprint: str

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Side:
        """Create a side from the layouts of all ranks, by rank.

        Raises:
            PlanError: as `layout_messages`.
        """
        return cls._from_pairs(map(layout_messages, layouts))

    @classmethod
    def split(cls, layout: Layout, num_ranks: int) -> Side:
        """Create a side from one layout with the records of all ranks.

        Each rank then declares all tensors of the layout.

        Raises:
            PlanError: as `layout_messages`.
        """
        buffers: list[dict[BufferId, Buffer]] = [{} for _ in range(num_ranks)]
        shards: list[list[Shard]] = [[] for _ in range(num_ranks)]
        for buffer_id, buffer in layout.buffers.items():
            buffers[buffer_id.rank][buffer_id] = buffer
        for shard in layout.shards:
            shards[shard.place.buffer.rank].append(shard)
        names = _names_message(layout.tensors)
        numbers = _numbered(layout.tensors)
        pairs = []
        for rank in range(num_ranks):
            part = Layout(layout.tensors, buffers[rank], tuple(shards[rank]))
            pairs.append((names, _records_message(part, numbers)))
        return cls._from_pairs(pairs)

    @classmethod
    def _from_pairs(cls, pairs: Iterable[tuple[bytes, bytes]]) -> Side:
        """Create a side from the names and the records of every rank."""
        messages: dict[bytes, int] = {}
        by_rank = [
            [messages.setdefault(message, len(messages)) for message in pair] for pair in pairs
        ]
        return cls.from_messages(by_rank, list(messages))

    @classmethod
    def from_messages(cls, by_rank: Sequence[Sequence[int]], messages: Sequence[bytes]) -> Side:
        """Create a side from the messages that ranks exchanged.

        Args:
            by_rank: for every rank, the indices of its names and its records in `messages`.
            messages: the distinct messages of all ranks.

        Raises:
            MessageError: a message is not a layout.
        """
        kind_numbers: dict[tuple[int, ...], int] = {}
        firsts: list[int] = []  # first rank of each kind
        kind_of = np.empty(len(by_rank), dtype=np.int64)
        for rank, indices in enumerate(by_rank):
            number = kind_numbers.setdefault(tuple(indices), len(kind_numbers))
            kind_of[rank] = number
            # A number that was just given out: the first rank of a new kind.
            if number == len(firsts):
                firsts.append(rank)
        # Each names message is decoded once: layouts share its tensors, and `Layout.merge` relies
        # on that identity.
        tensors: dict[int, dict[str, Shape]] = {}
        kinds = []
        # Little-endian, so that hosts of both byte orders agree.
        digest = hashlib.sha256(kind_of.astype("<i8").tobytes())
        for rank in firsts:
            names_index, records_index = by_rank[rank]
            if names_index not in tensors:
                tensors[names_index] = decode(messages[names_index], _Names)
            kinds.append(
                _decoded_layout(tensors[names_index], messages[records_index], rank),
            )
            for index in (names_index, records_index):
                digest.update(hashlib.sha256(messages[index]).digest())
        return cls(tuple(kinds), kind_of, digest.hexdigest())

    def refined(self, shapes: Shapes) -> Side:
        """Return the side with tensors in finer shapes; see `Layout.refined`."""
        # The other side determines the shapes, so the fingerprint of both together stays unique.
        # Layouts that share their tensors share the refined ones.
        tensors: dict[int, dict[str, Shape]] = {}
        kinds = []
        for kind in self.kinds:
            names = tensors.setdefault(
                id(kind.tensors),
                {name: shapes.get(name, shape) for name, shape in kind.tensors.items()},
            )
            kinds.append(replace(kind.refined(shapes), tensors=names))
        return replace(self, kinds=tuple(kinds))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        return len(self.kind_of)

    def kind(self, rank: int) -> Layout:
        """Return the records of a rank as the layout of the first rank of its kind."""
        return self.kinds[self.kind_of[rank]]

    def of_rank(self, rank: int) -> Layout:
        """Return the records of a rank."""
        return self.kind(rank).on(rank)

    @cached_property
    def layout(self) -> Layout:
        """Records of the first rank of every kind.

        Raises:
            PlanError: lists every tensor that two kinds describe differently.
        """
        return Layout.merge(self.kinds)

    @cached_property
    def holdings(self) -> Holdings:
        """Compact records of all ranks.

        Raises:
            PlanError: lists every tensor that ranks hold in several dtypes.
        """
        return self.holdings_of(self.layout)

    def holdings_of(self, layout: Layout) -> Holdings:
        """Return the compact records of a part of `self.layout`; errors as `holdings`."""
        # Kinds are numbered in order of their first ranks, so index i is the first rank of kind i,
        # the one that has the records in `layout`.
        _, firsts = np.unique(self.kind_of, return_index=True)
        alike = {
            int(rank): np.flatnonzero(self.kind_of == kind) for kind, rank in enumerate(firsts)
        }
        return holdings_of(layout, self.num_ranks, alike)

    def holds_any(self) -> np.ndarray:
        """Return whether each rank holds any buffer, bool array by rank."""
        has_buffers = np.array([bool(kind.buffers) for kind in self.kinds])
        return has_buffers[self.kind_of]

    @cached_property
    def buffers(self) -> Mapping[BufferId, Buffer]:
        """Buffers of all ranks."""
        return _BuffersOfSide(self)


def refined_alike(source: Side, destination: Side) -> tuple[Side, Side]:
    """Return both sides with every tensor in the finer shape of the two.

    A side refines a tensor, [E, 2 I] as [E, I, 2], if it holds every second element of a dim: these
    are a box only then. Tensors whose shapes do not refine each other stay, and make no plan.
    """
    # Ranks that describe a tensor differently are reported when a plan merges their layouts.
    shapes = [
        {name: shape for kind in side.kinds for name, shape in kind.tensors.items()}
        for side in (source, destination)
    ]
    finer: dict[str, Shape] = {}
    for name in shapes[0].keys() & shapes[1].keys():
        pair = {of_side[name] for of_side in shapes}
        # Of two different shapes at most one refines the other, so the order in the set does not
        # matter.
        for shape in pair:
            if all(splits_of(other, shape) is not None for other in pair) and len(pair) > 1:
                finer[name] = shape
    if not finer:
        return source, destination
    return source.refined(finer), destination.refined(finer)


class _BuffersOfSide(Mapping[BufferId, Buffer]):
    """Mapping of the buffers of all ranks, without an entry per rank: lookups go by kind."""

    def __init__(self, side: Side) -> None:
        self._kind_of = side.kind_of
        self._by_name = [
            {buffer_id.name: buffer for buffer_id, buffer in kind.buffers.items()}
            for kind in side.kinds
        ]

    def __getitem__(self, buffer_id: BufferId) -> Buffer:
        if not 0 <= buffer_id.rank < len(self._kind_of):
            raise KeyError(buffer_id)
        return self._by_name[self._kind_of[buffer_id.rank]][buffer_id.name]

    def __iter__(self) -> Iterator[BufferId]:
        for rank, kind in enumerate(self._kind_of):
            for name in self._by_name[kind]:
                yield BufferId(rank, name)

    def __len__(self) -> int:
        return sum(len(self._by_name[kind]) for kind in self._kind_of)
