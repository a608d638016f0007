"""What is compared when a switch is verified: regions that a box of training and a box of inference have in common.

    training     | rank 0              | rank 1              |
    inference    | ranks 0, 1    | ranks 2, 3                |
    regions      | 0             | 1   | 2                   |      numbered alike on all ranks, over all tensors

Each rank has every region of its own boxes whole, so either side can digest it where it lies. Neither the plan nor a
transport is asked, so both are checked, relays and copies within a rank too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybrid_engine.records.holdings import Box, TensorOwners, holdings_of
from hybrid_engine.records.layout import Layout, Place, Shard
from hybrid_engine.records.owners import touching
from hybrid_engine.records.regions import Region


@dataclass(frozen=True, slots=True)
class PlacedRegion:
    """A region that this rank has: its number, and where it lies."""

    number: int
    lengths: tuple[int, ...]
    place: Place

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)


OwnRegions = Mapping[str, Sequence[PlacedRegion]]
"""Canonical tensor -> this rank's regions of it, each once for every place."""


@dataclass(frozen=True, slots=True)
class _Overlap:
    """What two boxes of a tensor have in common; regions have no name, as tensors with the same owners share them."""

    region: Region
    source: Box
    destination: Box


class CommonRegions:
    """The regions of a job, and where this rank has them. The same numbers on all ranks, without a collective.

    Args:
        sources, destinations: layouts of all ranks, by rank; sound, since a plan was made of them.
        rank: this one.

    Attributes:
        dtypes: tensor -> its dtype in inference, in the plan's order.
        source, destination: what this rank has.
    """

    def __init__(self, sources: Sequence[Layout], destinations: Sequence[Layout], rank: int) -> None:
        training, inference = (holdings_of(Layout.merge(side), len(side)) for side in (sources, destinations))
        known: dict[tuple[int, int], tuple[_Overlap, ...]] = {}  # by identity of the owners
        self._overlaps: dict[str, tuple[_Overlap, ...]] = {}
        for name, owners in inference.owners.items():
            key = id(training.owners[name]), id(owners)
            if key not in known:
                known[key] = tuple(_overlaps(training.owners[name], owners))
            self._overlaps[name] = known[key]
        self._names = tuple(self._overlaps)
        self._starts = tuple(accumulate(map(len, self._overlaps.values()), initial=0))
        self._first = dict(zip(self._names, self._starts, strict=False))
        self.dtypes: Mapping[str, str] = {name: inference.dtypes[name] for name in self._names}
        self.source = self._own(sources[rank], is_source=True)
        self.destination = self._own(destinations[rank], is_source=False)

    def region(self, number: int) -> Region:
        """The region of a number."""
        name = self._names[bisect_right(self._starts, number) - 1]
        region = self._overlaps[name][number - self._first[name]].region
        return Region(name, region.offsets, region.lengths)

    def _own(self, layout: Layout, *, is_source: bool) -> OwnRegions:
        shards = layout.shards_by_tensor()
        return {
            name: [part for shard in shards.get(name, ()) for part in self._parts(shard, is_source=is_source)]
            for name in self._names
        }

    def _parts(self, shard: Shard, *, is_source: bool) -> Iterator[PlacedRegion]:
        """The regions that a shard is made of."""
        whole = shard.region
        box = whole.offsets, whole.lengths
        for number, overlap in enumerate(self._overlaps[whole.tensor], self._first[whole.tensor]):
            if box == (overlap.source if is_source else overlap.destination):
                region = overlap.region
                start = (low - base for low, base in zip(region.offsets, whole.offsets, strict=True))
                yield PlacedRegion(number, region.lengths, shard.place.at(start))


def _overlaps(sources: TensorOwners, destinations: TensorOwners) -> Iterator[_Overlap]:
    for destination, near in zip(destinations, touching(sources, destinations), strict=True):
        for source in (sources[index] for index in near):
            region = source.region.intersect(destination.region)
            assert region is not None, "they touch"
            pair = (source.offsets, source.lengths), (destination.offsets, destination.lengths)
            yield _Overlap(region, *pair)
