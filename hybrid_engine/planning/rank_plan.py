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
from hybrid_engine.planning.relays import RelayedTransfer, RelayPlanner, staging_nbytes, wire_dtype
from hybrid_engine.planning.routes import BoxSource, HostIngress, Hosts, Receivers, RoundRobinOffset, Routes
from hybrid_engine.planning.summary import TensorClass, tensor_classes
from hybrid_engine.records.holdings import Holdings, SideLayout, TensorOwners
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Shard
from hybrid_engine.records.owners import BoxOwners
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
    unread = source.holdings.owners.keys() - destination.holdings.owners.keys() - set(may_stay_unread)
    faults = [f"{name}: a training parameter that no inference rank reads" for name in sorted(unread)]
    for tensors in tensor_classes(source.holdings, destination.holdings):
        faults += planner.add(tensors)
    if faults:
        raise PlanError(faults)
    outlines = outline_buckets(_needs(source, destination), len(hosts), bucket_nbytes)
    relays = RelayPlanner(rank)
    buckets = fill_buckets(outlines, planner.transfers, planner.relayed, relays)
    return RankPlan(rank, buckets, relays.buffers)


class _RankPlanner:
    def __init__(self, source: SideLayout, destination: SideLayout, hosts: Hosts, rank: int) -> None:
        self.transfers: dict[str, list[Transfer]] = {}
        self.relayed: dict[str, list[RelayedTransfer]] = {}
        self._source, self._destination = source, destination
        self._hosts = hosts
        self._rank = rank

    def add(self, tensors: TensorClass) -> list[str]:
        """Plan a set of tensors, if the rank has to do with them; returns faults."""
        if not any(_has(box, self._rank) for box in (*tensors.sources, *tensors.destinations)):
            return []
        routes = Routes(tensors.sources, tensors.destinations, self._hosts)
        faults = [
            f"{tensors.tensors[0]}: elements [{box.offsets}, {box.ends}) are wanted by rank {receivers.ranks[0]}, but "
            "no training rank holds them"
            for receivers in routes.receivers
            for box in receivers.missing
        ]
        for index, tensor in enumerate(tensors.tensors):
            offset = RoundRobinOffset(tensors.start, index)
            found: list[Transfer] = []
            for receivers in routes.receivers:
                for piece in receivers.pieces:
                    pairs = self._pairs(routes, receivers, piece, tensors, offset)
                    for dst_rank, src_rank in pairs:
                        want, held = tensors.destinations[receivers.want], tensors.sources[piece.source]
                        found += self._transfers(tensor, piece, (held, src_rank), (want, dst_rank))
            for ingress in routes.ingress:
                found += self._bring_in(tensor, routes, ingress, tensors, offset)
            self.transfers[tensor] = sorted(found, key=transfer_order)
        return faults

    def _bring_in(
        self, tensor: str, routes: Routes, ingress: HostIngress, tensors: TensorClass, offset: RoundRobinOffset
    ) -> Iterator[Transfer]:
        """The transfers of what comes straight; relayed are kept for their bucket."""
        region = Region(tensor, ingress.region.offsets, ingress.region.lengths)
        dtype = wire_dtype(self._source.dtypes[tensor], [self._destination.dtypes[tensor]])
        for (src_rank, relay_rank), readers in routes.ingress_of(ingress, offset, self._rank):
            src = _shards(self._source, tensor, tensors.sources[ingress.source], src_rank)[0].place_of(region)
            places = tuple(
                shard.place_of(region)
                for rank, want in zip(readers, ingress.destinations, strict=True)
                for shard in _shards(self._destination, tensor, tensors.destinations[want], rank)
            )
            itemsizes = (DTYPE_NBYTES[self._destination.dtypes[tensor]],) * len(places)
            if ingress.is_relayed:
                relayed = RelayedTransfer(region, src, relay_rank, dtype, places, itemsizes)
                self.relayed.setdefault(tensor, []).append(relayed)
            else:
                nbytes = region.numel * DTYPE_NBYTES[dtype]
                yield Transfer(tensor, region.lengths, src, places[0], nbytes, Link.NETWORK)

    def _pairs(
        self, routes: Routes, receivers: Receivers, piece: BoxSource, tensors: TensorClass, offset: RoundRobinOffset
    ) -> Iterator[tuple[int, int]]:
        """(destination, source) of the transfers of a piece that this rank is part of."""
        if not _has(tensors.sources[piece.source], self._rank) and not _contains(receivers.ranks, self._rank):
            return iter(())
        senders = routes.senders(receivers, piece, offset)
        own = (receivers.ranks == self._rank) | (senders == self._rank)
        return zip(receivers.ranks[own].tolist(), senders[own].tolist(), strict=True)

    def _transfers(
        self, tensor: str, piece: BoxSource, source: tuple[BoxOwners, int], destination: tuple[BoxOwners, int]
    ) -> Iterator[Transfer]:
        region = Region(tensor, piece.region.offsets, piece.region.lengths)
        nbytes = region.numel * DTYPE_NBYTES[self._source.dtypes[tensor]]
        src = _shards(self._source, tensor, *source)[0]
        for dst in _shards(self._destination, tensor, *destination):
            yield Transfer(tensor, region.lengths, src.place_of(region), dst.place_of(region), nbytes, piece.link)


def _shards(side: SideLayout, tensor: str, box: BoxOwners, rank: int) -> list[Shard]:
    """A rank's records of exactly this box, in order of place."""
    box = box.offsets, box.lengths
    shards = [shard for shard, _ in side.shards_of(rank, tensor)]
    same = [shard for shard in shards if (shard.region.offsets, shard.region.lengths) == box]
    return sorted(same, key=lambda shard: (shard.place.buffer, shard.place.offset))


def _needs(source: SideLayout, destination: SideLayout) -> dict[str, Need]:
    """Bytes of every tensor on both sides, in the plan's order."""
    elements: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def bytes_of(holdings: Holdings, tensor: str) -> BytesByRank:
        owners = holdings.owners.get(tensor, ())
        if id(owners) not in elements:
            elements[id(owners)] = _elements(owners)
        ranks, numel = elements[id(owners)]
        return BytesByRank(ranks, numel * holdings.itemsizes.get(tensor, 0))

    return {
        tensor: Need(
            tuple(dict.fromkeys(placed.group for placed in destination.placed[tensor])),
            bytes_of(destination.holdings, tensor),
            bytes_of(source.holdings, tensor),
        )
        for tensor in destination.holdings.owners
    }


def _elements(owners: TensorOwners) -> tuple[np.ndarray, np.ndarray]:
    """(ranks, how many elements each has)."""
    if not owners:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ranks = np.concatenate([box.ranks for box in owners])
    return ranks, np.concatenate([np.full(len(box.ranks), box.region.numel) for box in owners])


def _has(box: BoxOwners, rank: int) -> bool:
    return _contains(box.ranks, rank)


def _contains(ranks: np.ndarray, rank: int) -> bool:
    position = np.searchsorted(ranks, rank)
    return bool(position < len(ranks) and ranks[position] == rank)
