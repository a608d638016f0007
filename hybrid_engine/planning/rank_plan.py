"""The plan of one rank at any scale: every transfer it takes part in, from the compact layouts of all ranks.

The same transfers, buckets and bytes as `planning.planner.plan` gives with `rank`, but nothing is made for ranks and
tensors that this rank has nothing to do with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.buckets import BytesByRank, Need, outline_buckets
from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.planning.planner import DEFAULT_BUCKET_NBYTES, fill_buckets, transfer_order
from hybrid_engine.planning.relays import RelayPlanner, Shipment, staging_nbytes, wire_dtype
from hybrid_engine.planning.routes import Arrival, Askers, Hosts, Lap, Piece, Routes
from hybrid_engine.planning.summary import Alike, alike
from hybrid_engine.records.holdings import Holdings, SideLayout, Spreads
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Shard
from hybrid_engine.records.owners import Spread
from hybrid_engine.records.regions import Region


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a reshard.

    Attributes:
        rank: global rank.
        buckets: all buckets of the reshard, with this rank's transfers.
        relays: the relay buffers that it has to do with.
    """

    rank: int
    buckets: tuple[Bucket, ...]
    relays: Mapping[BufferId, Buffer] = field(default_factory=dict)

    def transfers(self) -> Iterator[Transfer]:
        """All of them, in bucket order."""
        return (transfer for bucket in self.buckets for transfer in (*bucket.transfers, *bucket.fan_out))

    def received(self, link: Link) -> int:
        """Bytes that come over a link, counted as in `plan.ByteCount`."""
        counted = (each for bucket in self.buckets for each in bucket.counted())
        return sum(each.nbytes for each in counted if each.dst_rank == self.rank and each.link is link)

    def sent(self, link: Link) -> int:
        """Bytes that go over a link to other ranks."""
        return sum(each.nbytes for each in self.transfers() if each.dst_rank != self.rank and each.link is link)

    @property
    def staging_nbytes(self) -> int:
        """See `planning.relays.staging_nbytes`."""
        return staging_nbytes(self.buckets, self.relays, self.rank)


def plan_of_rank(
    source: SideLayout,
    destination: SideLayout,
    hosts: Sequence[object],
    rank: int,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    may_stay_unread: Iterable[str] = (),
    relaying_hosts: Collection[object] = (),
) -> RankPlan:
    """Plan one rank's part; arguments and errors as of `planning.planner.plan`.

    Memory: the two layouts and this rank's transfers.
    """
    planner = _RankPlanner(source, destination, Hosts(hosts, relaying_hosts), rank)
    unread = source.holdings.spreads.keys() - destination.holdings.spreads.keys() - set(may_stay_unread)
    faults = [f"{name}: a training parameter that no inference rank reads" for name in sorted(unread)]
    for tensors in alike(source.holdings, destination.holdings):
        faults += planner.add(tensors)
    if faults:
        raise PlanError(faults)
    outlines = outline_buckets(_needs(source, destination), len(hosts), bucket_nbytes)
    relays = RelayPlanner(rank)
    buckets = fill_buckets(outlines, planner.transfers, planner.shipments, relays)
    return RankPlan(rank, buckets, relays.buffers)


class _RankPlanner:
    def __init__(self, source: SideLayout, destination: SideLayout, hosts: Hosts, rank: int) -> None:
        self.transfers: dict[str, list[Transfer]] = {}
        self.shipments: dict[str, list[Shipment]] = {}
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
            lap = Lap(tensors.start, index)
            found: list[Transfer] = []
            for askers in routes.askers:
                for piece in askers.pieces:
                    pairs = self._pairs(routes, askers, piece, tensors, lap)
                    for dst_rank, src_rank in pairs:
                        want, held = tensors.wants[askers.want], tensors.sources[piece.source]
                        found += self._transfers(tensor, piece, (held, src_rank), (want, dst_rank))
            for arrival in routes.arrivals:
                found += self._arrive(tensor, routes, arrival, tensors, lap)
            self.transfers[tensor] = sorted(found, key=transfer_order)
        return faults

    def _arrive(self, tensor: str, routes: Routes, arrival: Arrival, tensors: Alike, lap: Lap) -> Iterator[Transfer]:
        """The transfers of what comes straight; shipments are kept for their bucket."""
        region = Region(tensor, arrival.region.offsets, arrival.region.lengths)
        dtype = wire_dtype(self._source.dtypes[tensor], [self._destination.dtypes[tensor]])
        for (src_rank, carrier), readers in routes.arrivals_of(arrival, lap, self._rank):
            src = _shards(self._source, tensor, tensors.sources[arrival.source], src_rank)[0].place_of(region)
            places = tuple(
                shard.place_of(region)
                for rank, want in zip(readers, arrival.wants, strict=True)
                for shard in _shards(self._destination, tensor, tensors.wants[want], rank)
            )
            itemsizes = (DTYPE_NBYTES[self._destination.dtypes[tensor]],) * len(places)
            if arrival.is_relayed:
                shipment = Shipment(region, src, carrier, dtype, places, itemsizes)
                self.shipments.setdefault(tensor, []).append(shipment)
            else:
                nbytes = region.numel * DTYPE_NBYTES[dtype]
                yield Transfer(tensor, region.lengths, src, places[0], nbytes, Link.NETWORK)

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
