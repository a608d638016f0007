"""Random pairs of layouts for the planner, and an oracle that knows single elements only.

Each tensor is sharded on each side in a way of its own: cut along dims into uneven parts over some of the ranks
(tensor and pipeline parallel), several such copies on other ranks (data parallel), overlapping windows (replicated KV
heads), the rank's part cut again and stored in another order among other tensors' parts (fused and interleaved
projections), transposed, with gaps (padding). Each side has one dtype, or two that tensors choose from.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hybrid_engine.planning import planner
from hybrid_engine.planning.plan import ReshardPlan, Transfer
from hybrid_engine.planning.summary import summarize
from hybrid_engine.records.holdings import placed_holdings
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides
from hybrid_engine.records.sides import Side

Index = tuple[int, ...]
NOT_WRITTEN = -1
DTYPES = (("bfloat16",), ("float32",), ("bfloat16", "float32"))

# A strategy is checked when it is first drawn from, which takes longer than to draw: each is made once.
integers, one_of = functools.cache(st.integers), functools.cache(st.sampled_from)
SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@functools.cache
def some_ranks(num_ranks: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=2)


"""Of a side's tensors: fp32 to bf16 and the other way, bf16 to bf16, or mixed."""


@dataclass(frozen=True)
class Case:
    """Two layouts over the same tensors; `hosts` and, where ranks share some, `devices` by rank, `relaying` those hosts
    whose ranks read each other's memory."""

    source: Layout
    destination: Layout
    hosts: tuple[str, ...]
    bucket_nbytes: int
    relaying: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def share_a_device(self, one: int, other: int) -> bool:
        places = [*zip(self.hosts, self.devices or map(str, range(len(self.hosts))), strict=True)]
        return places[one] == places[other]


def whole(tensor: str, shape: tuple[int, ...], rank: int, name: str, group: str = "") -> Layout:
    buffer_id = BufferId(rank, name)
    shard = Shard(Region(tensor, (0,) * len(shape), shape), Place(buffer_id, 0, contiguous_strides(shape)))
    return Layout({tensor: shape}, {buffer_id: Buffer(math.prod(shape), "bfloat16", group)}, (shard,))


def canonical_values(tensors: Mapping[str, Index]) -> dict[str, np.ndarray]:
    """Every element of every tensor has a number of its own."""
    numbers = itertools.count()
    return {
        name: np.array([next(numbers) for _ in range(math.prod(shape))]).reshape(shape)
        for name, shape in tensors.items()
    }


def elements_of(shard: Shard) -> Iterator[tuple[Index, int]]:
    """(canonical index, position in the buffer) of every element of a record, one by one."""
    for index in itertools.product(*map(range, shard.region.lengths)):
        position = shard.place.offset + sum(i * s for i, s in zip(index, shard.place.strides, strict=True))
        yield tuple(o + i for o, i in zip(shard.region.offsets, index, strict=True)), position


def filled_buffers(layout: Layout) -> dict[BufferId, np.ndarray]:
    """What the layout says each buffer holds; NOT_WRITTEN where it says nothing."""
    values = canonical_values(layout.tensors)
    buffers = {buffer_id: np.full(buffer.numel, NOT_WRITTEN) for buffer_id, buffer in layout.buffers.items()}
    for shard in layout.shards:
        for index, position in elements_of(shard):
            buffers[shard.place.buffer][position] = values[shard.region.tensor][index]
    return buffers


def carry_out(plan: ReshardPlan, case: Case) -> tuple[dict[BufferId, np.ndarray], dict[BufferId, np.ndarray]]:
    """Destination buffers after all transfers, and how often each of their elements was written.

    Relay buffers hold nothing before a bucket, are written once in it, and are read only where they were written.
    """
    sources = filled_buffers(case.source)
    found = {buffer_id: np.full(buffer.numel, NOT_WRITTEN) for buffer_id, buffer in case.destination.buffers.items()}
    counts = {buffer_id: np.zeros(buffer.numel, int) for buffer_id, buffer in case.destination.buffers.items()}
    for bucket in plan.buckets:
        relays = {buffer_id: np.full(buffer.numel, NOT_WRITTEN) for buffer_id, buffer in plan.relays.items()}
        for transfer in bucket.transfers:
            values = sources[transfer.src.buffer][positions_of(transfer, transfer.src)]
            at = positions_of(transfer, transfer.dst)
            if transfer.dst.buffer in relays:
                assert (relays[transfer.dst.buffer][at] == NOT_WRITTEN).all()
                relays[transfer.dst.buffer][at] = values
            else:
                found[transfer.dst.buffer][at] = values
                counts[transfer.dst.buffer][at] += 1
        for transfer in bucket.fan_out:
            values = relays[transfer.src.buffer][positions_of(transfer, transfer.src)]
            assert (values != NOT_WRITTEN).all()
            at = positions_of(transfer, transfer.dst)
            found[transfer.dst.buffer][at] = values
            counts[transfer.dst.buffer][at] += 1
    return found, counts


def itemsizes(layout: Layout) -> dict[str, int]:
    """Tensor -> bytes per element where it is held."""
    return {shard.region.tensor: layout.buffers[shard.place.buffer].itemsize for shard in layout.shards}


def wire_itemsizes(case: Case) -> dict[str, int]:
    """Tensor -> bytes per element that cross a link: those of the narrower side."""
    source, destination = itemsizes(case.source), itemsizes(case.destination)
    return {name: min(source[name], nbytes) for name, nbytes in destination.items()}


def network_lower_bound(source: Layout, destination: Layout, hosts: Sequence[str]) -> dict[str, int]:
    """Host -> bytes that its ranks together must receive from other hosts, whatever the plan."""
    sides = (placed_holdings(layout, len(hosts)).holdings for layout in (source, destination))
    return dict(zip(dict.fromkeys(hosts), summarize(*sides, hosts).network_lower_bound.tolist(), strict=True))


def positions_of(transfer: Transfer, place: Place) -> np.ndarray:
    """Where each element of a transfer's box lies at one end of it."""
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
        devices=tuple(draw(st.one_of(st.just(""), st.text("xyz", min_size=num_ranks, max_size=num_ranks)))),
    )


@st.composite
def layouts(draw: st.DrawFn, tensors: Mapping[str, Index], num_ranks: int, dtypes: Sequence[str]) -> Layout:
    """A layout in which the ranks together hold all of every tensor, each buffer without overlap."""
    parts: dict[tuple[BufferId, str], list[Region]] = {}
    for name, shape in tensors.items():
        dtype = draw(one_of(dtypes))
        for region, rank in draw(holders(name, shape, num_ranks)):
            buffer_id = BufferId(rank, f"{draw(one_of(('one', 'two')))} {dtype}")
            parts.setdefault((buffer_id, dtype), []).extend(draw(cuts(region)))
    buffers, shards = {}, []
    for (buffer_id, dtype), regions in parts.items():
        buffers[buffer_id], placed = draw(placements(buffer_id, draw(st.permutations(regions)), dtype))
        shards += placed
    return Layout(dict(tensors), buffers, tuple(draw(st.permutations(shards))))


@st.composite
def holders(draw: st.DrawFn, name: str, shape: Index, num_ranks: int) -> list[tuple[Region, int]]:
    """Who holds which region: one or more whole copies, each cut over ranks of its own choice."""
    found: dict[tuple[int, Region], None] = {}
    for _ in range(draw(integers(1, 2))):
        for region in draw(cuts(Region(name, (0,) * len(shape), shape))):
            for rank in draw(some_ranks(num_ranks)):
                found[(rank, region)] = None
    return [(region, rank) for rank, region in found]


@st.composite
def cuts(draw: st.DrawFn, region: Region) -> list[Region]:
    """The region in uneven parts along one dim, or along two, or whole."""
    parts = [region]
    for _ in range(draw(integers(0, 2)) if region.lengths else 0):
        dim = draw(integers(0, len(region.lengths) - 1))
        parts = [piece for part in parts for piece in _cut(part, dim, draw(integers(1, 5)))]
    return parts


def _cut(region: Region, dim: int, at: int) -> list[Region]:
    if at >= region.lengths[dim]:
        return [region]
    first, rest, moved = list(region.lengths), list(region.lengths), list(region.offsets)
    first[dim] = at
    rest[dim] -= at
    moved[dim] += at
    return [Region(region.tensor, region.offsets, tuple(first)), Region(region.tensor, tuple(moved), tuple(rest))]


@st.composite
def placements(draw: st.DrawFn, buffer_id: BufferId, regions: list[Region], dtype: str) -> tuple[Buffer, list[Shard]]:
    """A buffer that holds the regions one after another, in any dim order; what lies between is declared padding."""
    shards, end = [], 0
    used: set[int] = set()
    for region in regions:
        end += draw(one_of((0, 0, 2)))
        strides, step = [0] * len(region.lengths), 1
        for dim in draw(st.permutations(range(len(region.lengths)))):
            strides[dim] = step
            step = step * region.lengths[dim] + draw(one_of((0, 0, 0, 1)))
        shard = Shard(region, Place(buffer_id, end, tuple(strides)))
        shards.append(shard)
        positions = [position for _, position in elements_of(shard)]
        used.update(positions)
        end = max(positions) + 1
    numel = end + draw(integers(0, 2))
    padding = tuple(Extent(position, position + 1) for position in range(numel) if position not in used)
    return Buffer(numel, dtype, group=draw(one_of("xyz")), padding=padding), shards


def plan(source: Layout, destination: Layout, hosts: Sequence[str], *settings: Any, **named: Any) -> ReshardPlan:
    sides = (Side.split(layout, len(hosts)) for layout in (source, destination))
    return planner.plan(*sides, hosts, *settings, **named)


def box_transfers(source: Layout, destination: Layout, hosts: Sequence[str], *settings: Any) -> list[Transfer]:
    sides = (Side.split(layout, len(hosts)) for layout in (source, destination))
    return planner.box_transfers(*sides, hosts, *settings)
