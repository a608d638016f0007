"""The planner: from who holds and who needs which boxes to the transfers of all ranks, or of one.

The steps are in the package's docstring; here routes become transfers between the places that have the boxes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.buckets import BytesByRank, Need, Outline, outline_buckets
from hybrid_engine.planning.coalescing import by_place, coalesce
from hybrid_engine.planning.plan import Bucket, ByteCount, Link, ReshardPlan, Transfer, fingerprint_of, wire_dtype
from hybrid_engine.planning.relays import RelayedTransfer, RelayPlanner
from hybrid_engine.planning.routes import Hosts, RoundRobinOffset, Routes, TensorClass, holding_faults, tensor_classes
from hybrid_engine.planning.summary import missing_by_rank
from hybrid_engine.records.holdings import Holdings, PlacedHoldings, PlaceIndex, TensorOwners, contains
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from hybrid_engine.records.validation import layout_faults, unusable_tensors


def plan(
    source: Side,
    destination: Side,
    hosts: Sequence[str],
    bucket_nbytes: int = sys.maxsize,
    may_stay_unread: Collection[str] = (),
    rank: int | None = None,
    relaying_hosts: Collection[str] = (),
    frozen: Collection[str] = (),
    devices: Sequence[str] = (),
) -> ReshardPlan:
    """Plan the reshard that fills every destination buffer.

    Args:
        source: what all ranks hold for training.
        destination: what they need for inference.
        hosts: host name of every global rank.
        bucket_nbytes: aim for this many bytes per rank and bucket, filled or freed; a group is never split. Default:
            one bucket.
        may_stay_unread: source tensors that no destination needs to read (a head tied to the embedding).
        rank: keep only the transfers that read from or write to this rank, and only its count of bytes.
        relaying_hosts: hosts whose ranks can read each other's relay buffers; to them each element that is needed
            comes over the network once, to others once for every place.
        frozen: tensors that no training step changes; groups of nothing else have buckets of their own.
        devices: of every rank; equal for those of one host that share one. Default: each has its own.

    Raises:
        PlanError: with every fault: bounds, overlaps, gaps, tensors of several dtypes or shapes, destination regions
            that no rank holds, source tensors that nobody reads.

    Round robins go through the tensors in the order in which the destination declares them (the model's own); buckets
    alternate between pipeline stages (planning/buckets.py).
    """
    sides = _checked_sides(source, destination, may_stay_unread)
    where = Hosts(hosts, relaying_hosts, devices)
    found = _plan_sides(*sides, where, bucket_nbytes, may_stay_unread, rank, frozen)
    sharing = where.devices.tolist()
    fingerprint = fingerprint_of(source.fingerprint, destination.fingerprint, hosts, relaying_hosts, sharing)
    return replace(found, fingerprint=fingerprint)


def plan_sides(
    source: PlacedHoldings,
    destination: PlacedHoldings,
    hosts: Sequence[object],
    bucket_nbytes: int = sys.maxsize,
    may_stay_unread: Collection[str] = (),
    rank: int | None = None,
    relaying_hosts: Collection[object] = (),
    frozen: Collection[str] = (),
) -> ReshardPlan:
    """The same for sides in compact form, e.g. computed from sizes; arguments as of `plan`.

    Memory: the two sides, and the transfers that are asked for.

    Raises:
        PlanError: as `plan`, but for faults of buffers.
    """
    return _plan_sides(source, destination, Hosts(hosts, relaying_hosts), bucket_nbytes, may_stay_unread, rank, frozen)


def _plan_sides(
    source: PlacedHoldings,
    destination: PlacedHoldings,
    hosts: Hosts,
    bucket_nbytes: int,
    may_stay_unread: Collection[str],
    rank: int | None,
    frozen: Collection[str],
) -> ReshardPlan:
    unread = _unread(source.holdings.owners, destination.holdings.owners)
    if faults := _unread_faults(unread, may_stay_unread):
        raise PlanError([*holding_faults(source.holdings, destination.holdings), *faults])
    planner = _Planner(source, destination, hosts, rank)
    for tensors in tensor_classes(source.holdings, destination.holdings):
        planner.add(tensors)
    outlines = outline_buckets(_needs(source, destination), hosts.num_ranks, bucket_nbytes, frozen)
    relays = RelayPlanner(rank)
    buckets = tuple(planner.bucket(index, outline, relays) for index, outline in enumerate(outlines))
    return ReshardPlan(buckets, planner.bytes_by_rank(buckets), unread, relays=relays.buffers)


def frozen_tensors(
    source: PlacedHoldings, destination: PlacedHoldings, frozen: Collection[str], bucket_nbytes: int
) -> frozenset[str]:
    """The destination's tensors in `frozen` that a plan of these sides has buckets of their own for."""
    frozen = frozenset(frozen)
    outlines = outline_buckets(_needs(source, destination), destination.holdings.num_ranks, bucket_nbytes, frozen)
    return frozenset(name for one in outlines if frozen.issuperset(one.tensors) for name in one.tensors)


def largest_bucket(source: PlacedHoldings, destination: PlacedHoldings, bucket_nbytes: int) -> int:
    """The most bytes that any rank fills or frees in one bucket of a plan of these sides.

    More than `bucket_nbytes` where a group is larger, as all experts of a layer are.
    """
    outlines = outline_buckets(_needs(source, destination), destination.holdings.num_ranks, bucket_nbytes)
    return max((outline.nbytes for outline in outlines), default=0)


def box_transfers(
    source: Side, destination: Side, hosts: Sequence[str], rank: int, may_stay_unread: Collection[str] = ()
) -> list[Transfer]:
    """One rank's transfers as boxes of canonical tensors, in order of place: for files, read and written box by box.

    Without buckets, and not coalesced. Arguments and errors as of `plan`.
    """
    sides = _checked_sides(source, destination, may_stay_unread)
    planner = _Planner(*sides, Hosts(hosts), rank)
    for tensors in tensor_classes(sides[0].holdings, sides[1].holdings):
        planner.add(tensors)
    in_order = (sorted(planner.transfers.get(tensor, ()), key=by_place) for tensor in sides[1].holdings.owners)
    return list(chain.from_iterable(in_order))


def _checked_sides(
    source: Side, destination: Side, may_stay_unread: Collection[str]
) -> tuple[PlacedHoldings, PlacedHoldings]:
    """Who holds what on both sides. Raises PlanError with every fault; of ranks that hold the same, the first's."""
    layouts = source.layout, destination.layout
    faults = [*layout_faults(layouts[0], exact=False), *layout_faults(layouts[1], exact=True)]
    names = ({shard.region.tensor for shard in layout.shards} for layout in layouts)
    unread_faults = _unread_faults(_unread(*names), may_stay_unread)
    if not faults and not unread_faults:
        return source.placed, destination.placed
    # only what is sound on both sides can be looked at further
    unusable = unusable_tensors(layouts[0]) | unusable_tensors(layouts[1])
    sides = (
        each.placed_of(layout.without(unusable)) for each, layout in zip((source, destination), layouts, strict=True)
    )
    raise PlanError([*faults, *holding_faults(*(side.holdings for side in sides)), *unread_faults])


def _unread(source: Iterable[str], destination: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(source) - set(destination)))


def _unread_faults(unread: Iterable[str], may_stay_unread: Collection[str]) -> list[str]:
    unexpected = sorted(set(unread).difference(may_stay_unread))
    return [f"{name}: a training parameter that no inference rank reads" for name in unexpected]


def _needs(source: PlacedHoldings, destination: PlacedHoldings) -> dict[str, Need]:
    """Bytes of every tensor on both sides, in the plan's order."""
    known: dict[tuple[int, str], BytesByRank] = {}  # one object for tensors with the same owners and dtype

    def bytes_of(holdings: Holdings, tensor: str) -> BytesByRank:
        owners, dtype = holdings.owners[tensor], holdings.dtypes[tensor]
        if (id(owners), dtype) not in known:
            known[id(owners), dtype] = _bytes_by_rank(owners, DTYPE_NBYTES[dtype])
        return known[id(owners), dtype]

    return {
        tensor: Need(
            tuple(dict.fromkeys(placed.group for placed in destination.placed[tensor])),
            bytes_of(destination.holdings, tensor),
            bytes_of(source.holdings, tensor),
        )
        for tensor in destination.holdings.owners
    }


def _bytes_by_rank(owners: TensorOwners, itemsize: int) -> BytesByRank:
    nbytes = [np.full(len(box.ranks), box.region.numel * itemsize) for box in owners]
    return BytesByRank(np.concatenate([box.ranks for box in owners]), np.concatenate(nbytes))


@dataclass(frozen=True, slots=True, eq=False)
class _Moving:
    """One tensor of a class, as `_Planner` works on it.

    Attributes:
        offset: where it begins in the round robins of its class.
        dtype: on the wire; `itemsize`: its bytes per element.
    """

    name: str
    classed: TensorClass
    routes: Routes
    offset: RoundRobinOffset
    dtype: str

    def box(self, region: Region) -> Region:
        """A box of this tensor; routes know boxes of tensors without names."""
        return Region(self.name, region.offsets, region.lengths)

    def nbytes(self, region: Region) -> int:
        return region.numel * DTYPE_NBYTES[self.dtype]


class _Planner:
    """Collects transfers and bytes, class by class.

    Attributes:
        transfers, relayed: tensor -> what goes straight, and what goes over relay buffers.
    """

    def __init__(self, source: PlacedHoldings, destination: PlacedHoldings, hosts: Hosts, rank: int | None) -> None:
        self.transfers: dict[str, list[Transfer]] = {}
        self.relayed: dict[str, list[RelayedTransfer]] = {}
        self._dtypes = source.holdings.dtypes, destination.holdings.dtypes
        self._sources, self._destinations = PlaceIndex(source), PlaceIndex(destination)
        self._hosts = hosts
        self._rank = rank
        # Elements of a tensor that ranks must receive, by rank, in an object that its class shares; bytes per element.
        self._missing: dict[str, tuple[Mapping[int, int], int]] = {}

    def add(self, tensors: TensorClass) -> None:
        """Plan the tensors of a class, if the rank has to do with them."""
        owners = tensors.sources, tensors.destinations
        if not any(self._is_among(box.ranks) for box in chain(*owners)):
            return
        among = None if self._rank is None else np.array([self._rank])
        on_devices = self._hosts.on_devices(tensors.sources)
        missing = missing_by_rank(on_devices, tensors.destinations, self._hosts.num_ranks, among)
        numel = {rank: numel for ranks, numel in missing for rank in ranks.tolist()}
        routes = Routes(*owners, self._hosts)
        for index, name in enumerate(tensors.tensors):
            dtype = wire_dtype(*(dtypes[name] for dtypes in self._dtypes))
            moving = _Moving(name, tensors, routes, RoundRobinOffset(tensors.first, index), dtype)
            self._missing[name] = numel, int(tensors.itemsizes[index])
            self.transfers[name] = [*self._straight(moving)]
            self._add_ingress(moving)

    def bucket(self, index: int, outline: Outline, relays: RelayPlanner) -> Bucket:
        """The bucket of an outline; places in relay buffers are given by `relays`."""
        straight = chain.from_iterable(self.transfers.get(tensor, ()) for tensor in outline.tensors)
        relayed = chain.from_iterable(self.relayed.get(tensor, ()) for tensor in outline.tensors)
        arriving, fan_out = relays.lay_out(index, relayed)
        transfers = tuple(coalesce(chain(straight, arriving)))
        least: Counter[int] = Counter()
        for by_rank, itemsize in (self._missing[tensor] for tensor in outline.tensors if tensor in self._missing):
            least.update({rank: numel * itemsize for rank, numel in by_rank.items()})
        return Bucket(
            index, outline.tensors, transfers, outline.groups, outline.nbytes, tuple(coalesce(fan_out)), dict(least)
        )

    def bytes_by_rank(self, buckets: Sequence[Bucket]) -> dict[int, ByteCount]:
        """Byte counts of every destination rank, or of the one that the plan is for if it is one."""
        lower_bound: Counter[int] = Counter()
        for bucket in buckets:
            lower_bound.update(bucket.least)
        moved: Counter[tuple[int, Link]] = Counter()
        for each in chain.from_iterable(bucket.counted() for bucket in buckets):
            moved[each.dst_rank, each.link] += each.nbytes
        return {
            rank: ByteCount(
                moved[rank, Link.SELF] + moved[rank, Link.DEVICE],
                moved[rank, Link.HOST],
                moved[rank, Link.NETWORK],
                least,
            )
            for rank, least in sorted(lower_bound.items())
        }

    def _straight(self, moving: _Moving) -> Iterator[Transfer]:
        """Transfers from one rank to one other."""
        sources, destinations = moving.classed.sources, moving.classed.destinations
        for receivers in moving.routes.receivers:
            destination = destinations[receivers.destination]
            for part in receivers.parts:
                source = sources[part.source]
                if not self._is_among(receivers.ranks) and not self._is_among(source.ranks):
                    continue
                region, nbytes = moving.box(part.region), moving.nbytes(part.region)
                senders = moving.routes.senders(receivers, part, moving.offset)
                for dst_rank, src_rank in self._own(receivers.ranks, senders):
                    src = self._sources.places(moving.name, source, src_rank, region)[0]
                    for dst in self._destinations.places(moving.name, destination, dst_rank, region):
                        yield Transfer(moving.name, region.lengths, src, dst, nbytes, part.link)

    def _add_ingress(self, moving: _Moving) -> None:
        """Add what comes to relaying hosts: over a relay buffer, or straight where one place needs it."""
        for ingress in moving.routes.ingress:
            region, source = moving.box(ingress.region), moving.classed.sources[ingress.source]
            for (src_rank, relay_rank), readers in moving.routes.ingress_of(ingress, moving.offset, self._rank):
                src = self._sources.places(moving.name, source, src_rank, region)[0]
                places = tuple(
                    place
                    for rank, index in zip(readers, ingress.destinations, strict=True)
                    for place in self._destinations.places(
                        moving.name, moving.classed.destinations[index], rank, region
                    )
                )
                if ingress.is_relayed:
                    relayed = RelayedTransfer(region, src, relay_rank, moving.dtype, places)
                    self.relayed.setdefault(moving.name, []).append(relayed)
                else:
                    nbytes = moving.nbytes(region)
                    transfer = Transfer(moving.name, region.lengths, src, places[0], nbytes, Link.NETWORK)
                    self.transfers[moving.name].append(transfer)

    def _own(self, dst_ranks: np.ndarray, src_ranks: np.ndarray) -> Iterable[tuple[int, int]]:
        """(destination, source), all of them or those of the rank that the plan is for."""
        if self._rank is not None:
            own = (dst_ranks == self._rank) | (src_ranks == self._rank)
            dst_ranks, src_ranks = dst_ranks[own], src_ranks[own]
        return zip(dst_ranks.tolist(), src_ranks.tolist(), strict=True)

    def _is_among(self, ranks: np.ndarray) -> bool:
        """Whether the rank that the plan is for is among sorted ranks; always if the plan is for all."""
        return self._rank is None or contains(ranks, self._rank)
