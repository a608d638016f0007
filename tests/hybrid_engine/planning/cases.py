"""Random pairs of layouts for the planner, and an oracle that handles single elements only.

Each tensor is sharded differently on each side: cut along dims into uneven parts over some ranks
(tensor and pipeline parallel), in several copies on other ranks (data parallel), in overlapping
windows (replicated KV heads), with a rank's part cut again and stored in another order among parts
of other tensors (fused and interleaved projections), transposed, or with gaps (padding). Each side
has one dtype, or a mix of two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hybrid_engine.planning import planner
from hybrid_engine.planning.plan import Link, ReshardPlan, Transfer
from hybrid_engine.planning.summary import summarize
from hybrid_engine.records.holdings import Holdings, holdings_of
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides
from hybrid_engine.records.sides import Side

Index = tuple[int, ...]
NOT_WRITTEN = -1
DTYPES = (("bfloat16",), ("float32",), ("bfloat16", "float32"))
"""Choices of dtypes for the tensors of a side; the last is mixed."""

# The check of a strategy at its first draw costs more than the draw, so each is built once.
integers = functools.cache(st.integers)
one_of = functools.cache(st.sampled_from)
SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@functools.cache
def some_ranks(num_ranks: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=2)


@dataclass(frozen=True)
class Case:
    """Two layouts of the same tensors.

    Attributes:
        hosts: by rank.
        relaying: hosts with ranks that read each other's memory, and so relay.
        devices: by rank; empty if no ranks share a device.
    """

    source: Layout
    destination: Layout
    hosts: tuple[str, ...]
    bucket_nbytes: int
    relaying: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def share_a_device(self, rank: int, other: int) -> bool:
        places = [*zip(self.hosts, self.devices or map(str, range(len(self.hosts))), strict=True)]
        return places[rank] == places[other]


def whole(
    tensor: str,
    shape: tuple[int, ...],
    rank: int,
    name: str,
    group: str = "",
    dtype: str = "bfloat16",
) -> Layout:
    """Return the layout of a rank that holds one tensor, whole, in buffer `name`."""
    buffer_id = BufferId(rank, name)
    shard = Shard(
        Region(tensor, (0,) * len(shape), shape), Place(buffer_id, 0, contiguous_strides(shape))
    )
    return Layout({tensor: shape}, {buffer_id: Buffer(math.prod(shape), dtype, group)}, (shard,))


def canonical_values(tensors: Mapping[str, Index]) -> dict[str, np.ndarray]:
    """Assign a unique number to every element of every tensor."""
    numbers = itertools.count()
    return {
        name: np.array([next(numbers) for _ in range(math.prod(shape))]).reshape(shape)
        for name, shape in tensors.items()
    }


def elements_of(shard: Shard) -> Iterator[tuple[Index, int]]:
    """Yield (canonical index, position in the buffer) of every element of a record."""
    for index in itertools.product(*map(range, shard.region.lengths)):
        position = shard.place.offset + sum(
            i * s for i, s in zip(index, shard.place.strides, strict=True)
        )
        yield tuple(o + i for o, i in zip(shard.region.offsets, index, strict=True)), position


def filled_buffers(layout: Layout) -> dict[BufferId, np.ndarray]:
    """Return the contents of the buffers by the layout; NOT_WRITTEN where it has no record."""
    values = canonical_values(layout.tensors)
    buffers = {
        buffer_id: np.full(buffer.numel, NOT_WRITTEN)
        for buffer_id, buffer in layout.buffers.items()
    }
    for shard in layout.shards:
        for index, position in elements_of(shard):
            buffers[shard.place.buffer][position] = values[shard.region.tensor][index]
    return buffers


def run_plan(
    plan: ReshardPlan, case: Case
) -> tuple[dict[BufferId, np.ndarray], dict[BufferId, np.ndarray]]:
    """Run all transfers of a plan.

    Returns the destination buffers, and how often each of their elements was written. Relay buffers
    are empty before a bucket, are written once in it, and are read only where written.
    """
    sources = filled_buffers(case.source)
    contents = {
        buffer_id: np.full(buffer.numel, NOT_WRITTEN)
        for buffer_id, buffer in case.destination.buffers.items()
    }
    counts = {
        buffer_id: np.zeros(buffer.numel, int)
        for buffer_id, buffer in case.destination.buffers.items()
    }
    for bucket in plan.buckets:
        relays = {
            buffer_id: np.full(buffer.numel, NOT_WRITTEN)
            for buffer_id, buffer in plan.relays.items()
        }
        for transfer in bucket.transfers:
            values = sources[transfer.src.buffer][positions_of(transfer, transfer.src)]
            at = positions_of(transfer, transfer.dst)
            if transfer.dst.buffer in relays:
                assert (relays[transfer.dst.buffer][at] == NOT_WRITTEN).all()
                relays[transfer.dst.buffer][at] = values
            else:
                contents[transfer.dst.buffer][at] = values
                counts[transfer.dst.buffer][at] += 1
        for transfer in bucket.fan_out:
            values = relays[transfer.src.buffer][positions_of(transfer, transfer.src)]
            assert (values != NOT_WRITTEN).all()
            at = positions_of(transfer, transfer.dst)
            contents[transfer.dst.buffer][at] = values
            counts[transfer.dst.buffer][at] += 1
    return contents, counts


def itemsizes(layout: Layout) -> dict[str, int]:
    """Return the bytes per element of each tensor on a side."""
    return {
        shard.region.tensor: layout.buffers[shard.place.buffer].itemsize for shard in layout.shards
    }


def wire_itemsizes(case: Case) -> dict[str, int]:
    """Return the bytes per element of each tensor that cross a link: the narrower side's."""
    source = itemsizes(case.source)
    return {name: min(source[name], nbytes) for name, nbytes in itemsizes(case.destination).items()}


def holdings_by_rank(layout: Layout, num_ranks: int) -> Holdings:
    """Return the compact records of a layout that has those of every rank."""
    return holdings_of(layout, num_ranks, {rank: np.array([rank]) for rank in range(num_ranks)})


def network_lower_bound(
    source: Layout, destination: Layout, hosts: Sequence[str]
) -> dict[str, int]:
    """Return the bytes that the ranks of each host must receive from other hosts in any plan."""
    sides = (holdings_by_rank(layout, len(hosts)) for layout in (source, destination))
    return dict(
        zip(
            dict.fromkeys(hosts), summarize(*sides, hosts).network_lower_bound.tolist(), strict=True
        )
    )


def positions_of(transfer: Transfer, place: Place) -> np.ndarray:
    """Return the position of each element of a transfer's box at one end."""
    region = Region(transfer.tensor, (0,) * len(transfer.lengths), transfer.lengths)
    return np.array([position for _, position in elements_of(Shard(region, place))])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(integers(1, 6))
    tensors = {f"t{number}": draw(SHAPES) for number in range(draw(integers(1, 4)))}
    return Case(
        source=draw(layouts(tensors, num_ranks, draw(one_of(DTYPES)))),
        destination=draw(layouts(tensors, num_ranks, draw(one_of(DTYPES)))),
        hosts=tuple(draw(st.lists(one_of("ab"), min_size=num_ranks, max_size=num_ranks))),
        bucket_nbytes=draw(one_of((1, 40, 10**9))),
        relaying=tuple(draw(one_of(((), "a", "ab")))),
        devices=tuple(
            draw(st.one_of(st.just(""), st.text("xyz", min_size=num_ranks, max_size=num_ranks)))
        ),
    )


@st.composite
def layouts(
    draw: st.DrawFn, tensors: Mapping[str, Index], num_ranks: int, dtypes: Sequence[str]
) -> Layout:
    """Draw a layout that holds all elements of every tensor, without overlap in a buffer."""
    parts: dict[tuple[BufferId, str], list[Region]] = {}
    for name, shape in tensors.items():
        dtype = draw(one_of(dtypes))
        for region, rank in draw(holders(name, shape, num_ranks)):
            buffer_id = BufferId(rank, f"{draw(one_of(('one', 'two')))} {dtype}")
            parts.setdefault((buffer_id, dtype), []).extend(draw(cuts(region)))
    buffers: dict[BufferId, Buffer] = {}
    shards: list[Shard] = []
    for (buffer_id, dtype), regions in parts.items():
        buffers[buffer_id], placed = draw(
            placements(buffer_id, draw(st.permutations(regions)), dtype)
        )
        shards += placed
    return Layout(dict(tensors), buffers, tuple(draw(st.permutations(shards))))


@st.composite
def holders(draw: st.DrawFn, name: str, shape: Index, num_ranks: int) -> list[tuple[Region, int]]:
    """Draw the holders of a tensor's regions: one or more copies, each cut over ranks."""
    holdings: dict[tuple[int, Region], None] = {}
    for _ in range(draw(integers(1, 2))):
        for region in draw(cuts(Region(name, (0,) * len(shape), shape))):
            for rank in draw(some_ranks(num_ranks)):
                holdings[(rank, region)] = None
    return [(region, rank) for rank, region in holdings]


@st.composite
def cuts(draw: st.DrawFn, region: Region) -> list[Region]:
    """Cut a region into uneven parts along up to two dims."""
    parts = [region]
    for _ in range(draw(integers(0, 2)) if region.lengths else 0):
        dim = draw(integers(0, len(region.lengths) - 1))
        parts = [piece for part in parts for piece in _cut(part, dim, draw(integers(1, 5)))]
    return parts


def _cut(region: Region, dim: int, at: int) -> list[Region]:
    if at >= region.lengths[dim]:
        return [region]
    first = list(region.lengths)
    rest = list(region.lengths)
    offsets = list(region.offsets)
    first[dim] = at
    rest[dim] -= at
    offsets[dim] += at
    return [
        Region(region.tensor, region.offsets, tuple(first)),
        Region(region.tensor, tuple(offsets), tuple(rest)),
    ]


@st.composite
def placements(
    draw: st.DrawFn, buffer_id: BufferId, regions: list[Region], dtype: str
) -> tuple[Buffer, list[Shard]]:
    """Draw a buffer that holds the regions one after another, in any dim order.

    Gaps between them are declared as padding.
    """
    shards = []
    end = 0
    used: set[int] = set()
    for region in regions:
        end += draw(one_of((0, 0, 2)))
        strides = [0] * len(region.lengths)
        step = 1
        for dim in draw(st.permutations(range(len(region.lengths)))):
            strides[dim] = step
            step = step * region.lengths[dim] + draw(one_of((0, 0, 0, 1)))
        shard = Shard(region, Place(buffer_id, end, tuple(strides)))
        shards.append(shard)
        positions = [position for _, position in elements_of(shard)]
        used.update(positions)
        end = max(positions) + 1
    numel = end + draw(integers(0, 2))
    padding = tuple(
        Extent(position, position + 1) for position in range(numel) if position not in used
    )
    return Buffer(numel, dtype, group=draw(one_of("xyz")), padding=padding), shards


def plan(
    source: Layout, destination: Layout, hosts: Sequence[str], *settings: Any, **named: Any
) -> ReshardPlan:
    sides = (Side.split(layout, len(hosts)) for layout in (source, destination))
    return planner.plan(*sides, hosts, *settings, **named)


def box_transfers(
    source: Layout, destination: Layout, hosts: Sequence[str], *settings: Any
) -> list[Transfer]:
    sides = (Side.split(layout, len(hosts)) for layout in (source, destination))
    return planner.box_transfers(*sides, hosts, *settings)


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Bytes that one rank reads in a reshard, by link, with a lower bound.

    Bytes that arrive at a host in a relay buffer count as network on the rank that holds the
    buffer and as host on the other ranks that read it.

    Attributes:
        device: bytes from its device's memory, its own or another rank's.
        host: bytes from other devices of its host.
        network: bytes from other hosts.
        lower_bound: bytes that it needs and that its device does not hold.
    """

    device: int
    host: int
    network: int
    lower_bound: int

    @property
    def received(self) -> int:
        """Bytes from other devices."""
        return self.host + self.network


def bytes_read(plan: ReshardPlan) -> dict[int, ByteCount]:
    """Count the bytes that each destination rank reads; in a plan of one rank, its own."""
    lower_bound: Counter[int] = Counter()
    moved: Counter[tuple[int, Link]] = Counter()
    for bucket in plan.buckets:
        # `Counter.update` adds.
        lower_bound.update(bucket.least)
        for transfer in bucket.counted():
            moved[transfer.dst_rank, transfer.link] += transfer.nbytes
    return {
        rank: ByteCount(
            device=moved[rank, Link.SELF] + moved[rank, Link.DEVICE],
            host=moved[rank, Link.HOST],
            network=moved[rank, Link.NETWORK],
            lower_bound=least,
        )
        for rank, least in sorted(lower_bound.items())
    }
