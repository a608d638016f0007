"""Planning: box intersection of two layouts, tensor by tensor.

    sources and destinations of a tensor, region by region    who has it, who wants it
    routes                                             who sends what to whom (planning/routes.py)
    transfers                                          between the places that the records name
    buckets                                            no destination group in two (planning/buckets.py)
    relay buffers                                      for what several places of a host need (planning/relays.py)

Everything is sorted and counted by position, so ranks that plan the same layouts get the same plan without talking; a
rank that keeps only its own transfers keeps exactly those that are its own in everybody's plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.buckets import BytesByRank, Need, Outline, outline_buckets
from hybrid_engine.planning.plan import Bucket, ByteCount, Link, ReshardPlan, Transfer, fingerprint_of
from hybrid_engine.planning.relays import RelayedTransfer, RelayPlanner, wire_dtype
from hybrid_engine.planning.routes import Hosts, RoundRobinOffset, Routes, missing_by_hosts, missing_by_rank
from hybrid_engine.records.layout import Layout, Shard
from hybrid_engine.records.owners import BoxOwners
from hybrid_engine.records.regions import Region
from hybrid_engine.records.validation import layout_faults, shard_fault

DEFAULT_BUCKET_NBYTES = 256 * 1024 * 1024


def plan(
    source: Layout,
    destination: Layout,
    hosts: Sequence[str],
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    may_stay_unread: Iterable[str] = (),
    rank: int | None = None,
    relaying_hosts: Collection[str] = (),
) -> ReshardPlan:
    """Plan the reshard that fills every destination buffer.

    Args:
        source: the training layout of all ranks.
        destination: the inference layout of all ranks.
        hosts: host name of every global rank.
        bucket_nbytes: aim for this many bytes per rank and bucket, filled or freed; a group is never split.
        may_stay_unread: source tensors that no destination needs to read (a head tied to the embedding).
        rank: keep only the transfers that read from or write to this rank, and only its count of bytes.
        relaying_hosts: hosts whose ranks can read each other's relay buffers; to them each element that is needed
            comes over the network once, to others once for every place.

    Raises:
        PlanError: with every fault: bounds, overlaps, gaps, shapes that differ, destination regions that no rank
            holds, source tensors that nobody reads.

    Routes are found in the order in which the destination declares the tensors (the model's own); buckets take turns
    between pipeline stages (planning/buckets.py).
    """
    faults = [*layout_faults(source, exact=False), *layout_faults(destination, exact=True)]
    faults += _shape_faults(source, destination)
    unusable = _unusable_tensors(source, destination) if faults else set()
    src_by_tensor, dst_by_tensor = source.shards_by_tensor(), destination.shards_by_tensor()
    planner = _Planner(source, destination, Hosts(hosts, relaying_hosts), rank)
    needs: dict[str, Need] = {}
    for tensor in (name for name in destination.tensors if name in dst_by_tensor and name not in unusable):
        src_shards, dst_shards = src_by_tensor.get(tensor, []), dst_by_tensor[tensor]
        planner.add(tensor, src_shards, dst_shards)
        needs[tensor] = _need_of(source, destination, src_shards, dst_shards)
    faults += planner.faults
    unread = tuple(sorted(src_by_tensor.keys() - dst_by_tensor.keys()))
    expected = set(may_stay_unread)
    faults += [f"{name}: a training parameter that no inference rank reads" for name in unread if name not in expected]
    if faults:
        raise PlanError(faults)
    relays = RelayPlanner(rank)
    buckets = fill_buckets(
        outline_buckets(needs, len(hosts), bucket_nbytes), planner.transfers, planner.relayed, relays
    )
    return ReshardPlan(
        buckets=buckets,
        bytes_by_rank=planner.bytes_by_rank(buckets),
        unread=unread,
        fingerprint=fingerprint_of(source.fingerprint(), destination.fingerprint(), hosts, relaying_hosts),
        relays=relays.buffers,
        network_lower_bound=planner.network_lower_bound(),
    )


def fill_buckets(
    outlines: Iterable[Outline],
    transfers: Mapping[str, Sequence[Transfer]],
    relayed: Mapping[str, Sequence[RelayedTransfer]],
    relays: RelayPlanner,
) -> tuple[Bucket, ...]:
    """Buckets of these outlines, with what is known of their tensors; places in relay buffers are given by `relays`."""
    buckets = []
    for index, outline in enumerate(outlines):
        straight = (each for tensor in outline.tensors for each in transfers.get(tensor, ()))
        arriving, fan_out = relays.lay_out(
            index, (each for tensor in outline.tensors for each in relayed.get(tensor, ()))
        )
        buckets.append(
            Bucket(index, outline.tensors, (*straight, *arriving), outline.groups, outline.nbytes, tuple(fan_out))
        )
    return tuple(buckets)


def _shape_faults(source: Layout, destination: Layout) -> list[str]:
    return [
        f"{name}: shape {source.tensors[name]} in training, {destination.tensors[name]} in inference"
        for name in _tensors_of_two_shapes(source, destination)
    ]


def _tensors_of_two_shapes(source: Layout, destination: Layout) -> list[str]:
    return [name for name, shape in destination.tensors.items() if source.tensors.get(name, shape) != shape]


def _unusable_tensors(source: Layout, destination: Layout) -> set[str]:
    """Tensors whose shards cannot be intersected; their faults have been found already."""
    return set(_tensors_of_two_shapes(source, destination)) | {
        shard.region.tensor for layout in (source, destination) for shard in layout.shards if shard_fault(layout, shard)
    }


def _need_of(source: Layout, destination: Layout, src_shards: Sequence[Shard], dst_shards: Sequence[Shard]) -> Need:
    groups = dict.fromkeys(destination.buffers[shard.place.buffer].group for shard in dst_shards)
    return Need(tuple(groups), _bytes_by_rank(destination, dst_shards), _bytes_by_rank(source, src_shards))


def _bytes_by_rank(layout: Layout, shards: Sequence[Shard]) -> BytesByRank:
    nbytes = [shard.region.numel * layout.buffers[shard.place.buffer].itemsize for shard in shards]
    ranks = [shard.place.buffer.rank for shard in shards]
    return BytesByRank(np.array(ranks, dtype=np.int64), np.array(nbytes, dtype=np.int64))


class _Side:
    """Where one tensor is on one side: region by region, in order, the shards of each rank.

    Attributes:
        regions: sorted.
        shards: for every region, rank -> its shards in order of place.
        owners: the same as numbers, without places.
        key: equal for tensors with the same owners.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        by_region: dict[Region, dict[int, list[Shard]]] = {}
        for shard in shards:
            by_region.setdefault(shard.region, {}).setdefault(shard.place.buffer.rank, []).append(shard)
        self.regions = sorted(by_region)
        self.shards = [by_region[region] for region in self.regions]
        ranks = [tuple(rank for rank, own in by_rank.items() for _ in own) for by_rank in self.shards]
        self.key = tuple((region.offsets, region.lengths, own) for region, own in zip(self.regions, ranks, strict=True))

    @property
    def owners(self) -> list[BoxOwners]:
        return [BoxOwners(offsets, lengths, np.array(ranks, dtype=np.int64)) for offsets, lengths, ranks in self.key]


@dataclass(frozen=True, slots=True, eq=False)
class _Spreading:
    """What tensors with the same owners have in common.

    Attributes:
        missing_by_rank: see `routes.missing_by_rank`. network_missing: see `routes.missing_by_hosts`.
    """

    routes: Routes
    missing_by_rank: list[tuple[np.ndarray, int]]
    network_missing: np.ndarray


class _Planner:
    """Collects transfers, faults and bytes, tensor by tensor. Tensors with the same owners share their routes."""

    def __init__(self, source: Layout, destination: Layout, hosts: Hosts, rank: int | None) -> None:
        self.transfers: dict[str, list[Transfer]] = {}
        self.relayed: dict[str, list[RelayedTransfer]] = {}
        self.faults: list[str] = []
        self._source, self._destination = source, destination
        self._hosts = hosts
        self._rank = rank
        self._lower_bound: Counter[int] = Counter()
        self._network_lower_bound = np.zeros(hosts.count, dtype=np.int64)
        self._offsets: dict[object, RoundRobinOffset] = {}
        self._spreadings: dict[object, _Spreading] = {}

    def add(self, tensor: str, src_shards: Sequence[Shard], dst_shards: Sequence[Shard]) -> None:
        """Plan one tensor; tensors come in the plan's order."""
        sources, destinations = _Side(src_shards), _Side(dst_shards)
        spreading, offset = self._spreading_of(sources, destinations), self._offset_of(sources, destinations)
        routes = spreading.routes
        found: list[Transfer] = []
        for receivers in routes.receivers:
            by_rank = destinations.shards[receivers.want]
            for missing in receivers.missing:
                self.faults += [
                    _missing_fault(shard, Region(tensor, missing.offsets, missing.lengths))
                    for rank in receivers.ranks.tolist()
                    for shard in by_rank[rank]
                ]
            for piece in receivers.pieces:
                region = Region(tensor, piece.region.offsets, piece.region.lengths)
                for dst_rank, src_rank in self._pairs(receivers.ranks, routes.senders(receivers, piece, offset)):
                    src = sources.shards[piece.source][src_rank][0]
                    found += [self._send(region, src, dst, piece.link) for dst in by_rank[dst_rank]]
        for ingress in routes.ingress:
            region = Region(tensor, ingress.region.offsets, ingress.region.lengths)
            for (src_rank, relay_rank), readers in routes.ingress_of(ingress, offset, self._rank):
                src = sources.shards[ingress.source][src_rank][0]
                dsts = [
                    shard
                    for rank, want in zip(readers, ingress.destinations, strict=True)
                    for shard in destinations.shards[want][rank]
                ]
                if ingress.is_relayed:
                    self.relayed.setdefault(tensor, []).append(self._relay(region, src, relay_rank, dsts))
                else:
                    found.append(self._send(region, src, dsts[0], Link.NETWORK))
        self.transfers[tensor] = sorted(found, key=transfer_order)
        self._count_lower_bound(spreading, src_shards, dst_shards)

    def bytes_by_rank(self, buckets: Iterable[Bucket]) -> dict[int, ByteCount]:
        """Of every destination rank, or of the one that the plan is for if it is one."""
        moved: Counter[tuple[int, Link]] = Counter()
        for each in chain.from_iterable(bucket.counted() for bucket in buckets):
            moved[each.dst_rank, each.link] += each.nbytes
        return {
            rank: ByteCount(
                own=moved[rank, Link.SELF],
                host=moved[rank, Link.HOST],
                network=moved[rank, Link.NETWORK],
                lower_bound=least,
            )
            for rank, least in sorted(self._lower_bound.items())
        }

    def network_lower_bound(self) -> dict[str, int]:
        """By host."""
        return {
            str(name): int(nbytes) for name, nbytes in zip(self._hosts.names, self._network_lower_bound, strict=True)
        }

    def _spreading_of(self, sources: _Side, destinations: _Side) -> _Spreading:
        key = sources.key, destinations.key
        if key not in self._spreadings:
            src, dst = sources.owners, destinations.owners
            self._spreadings[key] = _Spreading(
                Routes(src, dst, self._hosts),
                list(missing_by_rank(src, dst, len(self._hosts.numbers))),
                missing_by_hosts(src, dst, self._hosts),
            )
        return self._spreadings[key]

    def _pairs(self, dst_ranks: np.ndarray, src_ranks: np.ndarray) -> Iterable[tuple[int, int]]:
        """(destination, source), all of them or those of the rank that the plan is for."""
        if self._rank is not None:
            own = (dst_ranks == self._rank) | (src_ranks == self._rank)
            dst_ranks, src_ranks = dst_ranks[own], src_ranks[own]
        return zip(dst_ranks.tolist(), src_ranks.tolist(), strict=True)

    def _offset_of(self, sources: _Side, destinations: _Side) -> RoundRobinOffset:
        first = self._offsets.setdefault((sources.key, destinations.key), RoundRobinOffset(len(self.transfers), 0))
        self._offsets[sources.key, destinations.key] = RoundRobinOffset(first.start, first.index + 1)
        return first

    def _send(self, region: Region, src: Shard, dst: Shard, link: Link) -> Transfer:
        src_buffer, dst_buffer = self._source.buffers[src.place.buffer], self._destination.buffers[dst.place.buffer]
        nbytes = region.numel * min(src_buffer.itemsize, dst_buffer.itemsize)
        return Transfer(region.tensor, region.lengths, src.place_of(region), dst.place_of(region), nbytes, link)

    def _relay(self, region: Region, src: Shard, relay_rank: int, dsts: Sequence[Shard]) -> RelayedTransfer:
        buffers = [self._destination.buffers[dst.place.buffer] for dst in dsts]
        return RelayedTransfer(
            region,
            src.place_of(region),
            relay_rank,
            wire_dtype(self._source.buffers[src.place.buffer].dtype, [buffer.dtype for buffer in buffers]),
            tuple(dst.place_of(region) for dst in dsts),
            tuple(buffer.itemsize for buffer in buffers),
        )

    def _count_lower_bound(
        self, spreading: _Spreading, src_shards: Sequence[Shard], dst_shards: Sequence[Shard]
    ) -> None:
        if not src_shards:
            return
        sides = (self._source, src_shards), (self._destination, dst_shards)
        itemsize = min(layout.buffers[shard.place.buffer].itemsize for layout, shards in sides for shard in shards)
        for ranks, numel in spreading.missing_by_rank:
            for rank in ranks.tolist():
                if self._rank in (None, rank):
                    self._lower_bound[rank] += numel * itemsize
        self._network_lower_bound += spreading.network_missing * itemsize


def transfer_order(transfer: Transfer) -> tuple[object, ...]:
    """Sort key of one tensor's transfers: by place. The order of a rank's own does not depend on those of others."""
    return transfer.dst.buffer, transfer.dst.offset, transfer.src.buffer, transfer.src.offset, transfer.lengths


def _missing_fault(shard: Shard, region: Region) -> str:
    buffer_id = shard.place.buffer
    return (
        f"{region.tensor}: elements [{region.offsets}, {region.ends}) are wanted by {buffer_id.name!r} "
        f"on rank {buffer_id.rank}, but no training rank holds them"
    )
