"""The plan of one rank at any scale: every transfer it takes part in, from the compact layouts of all ranks.

The same transfers, buckets and bytes as `planning.planner.plan` gives with `rank`, but nothing is made for ranks and
tensors that this rank has nothing to do with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.layouts.holdings import Holdings, SideLayout, Spreads
from hybrid_engine.layouts.summary import Alike, alike
from hybrid_engine.planning.buckets import BytesByRank, Need, outline_buckets
from hybrid_engine.planning.layout import DTYPE_NBYTES, Shard
from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.planning.planner import DEFAULT_BUCKET_NBYTES, transfer_order
from hybrid_engine.planning.regions import Region
from hybrid_engine.planning.routes import Askers, Hosts, Lap, Piece, Routes, Spread


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a reshard.

    Attributes:
        rank: global rank.
        buckets: all buckets of the reshard, with this rank's transfers.
    """

    rank: int
    buckets: tuple[Bucket, ...]

    def transfers(self) -> Iterator[Transfer]:
        """All of them, in bucket order."""
        return (transfer for bucket in self.buckets for transfer in bucket.transfers)

    def received(self, link: Link) -> int:
        """Bytes that come over a link."""
        return sum(each.nbytes for each in self.transfers() if each.dst_rank == self.rank and each.link is link)

    def sent(self, link: Link) -> int:
        """Bytes that go over a link to other ranks."""
        return sum(each.nbytes for each in self.transfers() if each.dst_rank != self.rank and each.link is link)


def plan_of_rank(
    source: SideLayout,
    destination: SideLayout,
    hosts: Sequence[object],
    rank: int,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    may_stay_unread: Iterable[str] = (),
) -> RankPlan:
    """Plan one rank's part; arguments and errors as of `planning.planner.plan`.

    Memory: the two layouts and this rank's transfers.
    """
    planner = _RankPlanner(source, destination, Hosts(hosts), rank)
    unread = source.holdings.spreads.keys() - destination.holdings.spreads.keys() - set(may_stay_unread)
    faults = [f"{name}: a training parameter that no inference rank reads" for name in sorted(unread)]
    for tensors in alike(source.holdings, destination.holdings):
        faults += planner.add(tensors)
    if faults:
        raise PlanError(faults)
    outlines = outline_buckets(_needs(source, destination), len(hosts), bucket_nbytes)
    return RankPlan(
        rank,
        tuple(
            Bucket(
                index,
                outline.tensors,
                tuple(each for tensor in outline.tensors for each in planner.transfers.get(tensor, ())),
                outline.groups,
                outline.nbytes,
            )
            for index, outline in enumerate(outlines)
        ),
    )


class _RankPlanner:
    def __init__(self, source: SideLayout, destination: SideLayout, hosts: Hosts, rank: int) -> None:
        self.transfers: dict[str, list[Transfer]] = {}
        self._source, self._destination = source, destination
        self._hosts = hosts
        self._rank = rank

    def add(self, tensors: Alike) -> list[str]:
        """Plan a set of tensors, if the rank has to do with them; returns faults."""
        if not any(_has(spread, self._rank) for spread in (*tensors.sources, *tensors.wants)):
            return []
        routes = Routes(tensors.sources, tensors.wants, self._hosts)
        faults = [
            f"{tensors.tensors[0]}: elements [{box.offsets}, {box.ends}) are wanted by rank {askers.ranks[0]}, but no "
            "training rank holds them"
            for askers in routes.askers
            for box in askers.missing
        ]
        for index, tensor in enumerate(tensors.tensors):
            found: list[Transfer] = []
            for askers in routes.askers:
                for piece in askers.pieces:
                    pairs = self._pairs(routes, askers, piece, tensors, Lap(tensors.start, index))
                    for dst_rank, src_rank in pairs:
                        want, held = tensors.wants[askers.want], tensors.sources[piece.source]
                        found += self._transfers(tensor, piece, (held, src_rank), (want, dst_rank))
            self.transfers[tensor] = sorted(found, key=transfer_order)
        return faults

    def _pairs(
        self, routes: Routes, askers: Askers, piece: Piece, tensors: Alike, lap: Lap
    ) -> Iterator[tuple[int, int]]:
        """(destination, source) of the transfers of a piece that this rank is part of."""
        if not _has(tensors.sources[piece.source], self._rank) and not _contains(askers.ranks, self._rank):
            return iter(())
        senders = routes.senders(askers, piece, lap)
        own = (askers.ranks == self._rank) | (senders == self._rank)
        return zip(askers.ranks[own].tolist(), senders[own].tolist(), strict=True)

    def _transfers(
        self, tensor: str, piece: Piece, source: tuple[Spread, int], destination: tuple[Spread, int]
    ) -> Iterator[Transfer]:
        region = Region(tensor, piece.region.offsets, piece.region.lengths)
        nbytes = region.numel * DTYPE_NBYTES[self._source.dtypes[tensor]]
        src = _shards(self._source, tensor, *source)[0]
        for dst in _shards(self._destination, tensor, *destination):
            yield Transfer(tensor, region.lengths, src.place_of(region), dst.place_of(region), nbytes, piece.link)


def _shards(side: SideLayout, tensor: str, spread: Spread, rank: int) -> list[Shard]:
    """A rank's records of exactly this box, in order of place."""
    box = spread.offsets, spread.lengths
    shards = [shard for shard, _ in side.shards_of(rank, tensor)]
    same = [shard for shard in shards if (shard.region.offsets, shard.region.lengths) == box]
    return sorted(same, key=lambda shard: (shard.place.buffer, shard.place.offset))


def _needs(source: SideLayout, destination: SideLayout) -> dict[str, Need]:
    """Bytes of every tensor on both sides, in the plan's order."""
    elements: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def bytes_of(holdings: Holdings, tensor: str) -> BytesByRank:
        spreads = holdings.spreads.get(tensor, ())
        if id(spreads) not in elements:
            elements[id(spreads)] = _elements(spreads)
        ranks, numel = elements[id(spreads)]
        return BytesByRank(ranks, numel * holdings.itemsizes.get(tensor, 0))

    return {
        tensor: Need(
            tuple(dict.fromkeys(placed.group for placed in destination.placed[tensor])),
            bytes_of(destination.holdings, tensor),
            bytes_of(source.holdings, tensor),
        )
        for tensor in destination.holdings.spreads
    }


def _elements(spreads: Spreads) -> tuple[np.ndarray, np.ndarray]:
    """(ranks, how many elements each has)."""
    if not spreads:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ranks = np.concatenate([spread.ranks for spread in spreads])
    return ranks, np.concatenate([np.full(len(spread.ranks), spread.region.numel) for spread in spreads])


def _has(spread: Spread, rank: int) -> bool:
    return _contains(spread.ranks, rank)


def _contains(ranks: np.ndarray, rank: int) -> bool:
    position = np.searchsorted(ranks, rank)
    return bool(position < len(ranks) and ranks[position] == rank)
