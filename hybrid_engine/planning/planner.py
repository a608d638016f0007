"""The planner: from the boxes that ranks hold and need to the transfers of all ranks, or of one.

The package docstring numbers the steps. This module turns routes into transfers between the places
that hold the boxes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.buckets import Outline, clusters_of, outline_buckets
from hybrid_engine.planning.coalescing import by_place, coalesce
from hybrid_engine.planning.plan import (
    Bucket,
    Link,
    ReshardPlan,
    Transfer,
    fingerprint_of,
)
from hybrid_engine.planning.relays import RelayedTransfer, RelayPlanner
from hybrid_engine.planning.routes import Hosts, Routes
from hybrid_engine.planning.summary import missing_by_rank
from hybrid_engine.planning.tensor_classes import TensorClass, holding_faults, tensor_classes
from hybrid_engine.records.holdings import Holdings, contains
from hybrid_engine.records.layout import DTYPE_NBYTES, Layout, Place
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side, refined_alike
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
        source: records of all ranks in training.
        destination: records of all ranks in inference.
        hosts: host name of every global rank.
        bucket_nbytes: target size of a bucket: bytes that one rank fills or frees. A group is
            never split. Default: one bucket.
        may_stay_unread: source tensors that no destination has to read, such as a head that is
            tied to the embedding.
        rank: plan only the transfers and the bytes of this rank. Default: all ranks.
        relaying_hosts: hosts with ranks that can read each other's relay buffers. An element that
            such a host needs crosses the network once; for other hosts, once per place.
        frozen: tensors that no training step changes. Groups of only these have separate buckets.
        devices: device of every rank; ranks of one host with equal entries share a device.
            Default: every rank has a separate device.

    Raises:
        PlanError: lists every fault: shards out of bounds, overlaps, gaps, tensors with several
            dtypes or shapes, destination regions that no rank holds, source tensors that no
            destination reads.

    Round robins follow the order in which the destination declares its tensors (the model's own).
    Buckets alternate between pipeline stages (planning/buckets.py).
    """
    held, needed = _checked_sides(source, destination, may_stay_unread)
    result = plan_sides(
        held,
        needed,
        hosts,
        bucket_nbytes,
        may_stay_unread,
        rank,
        relaying_hosts,
        frozen,
        devices,
    )
    fingerprint = fingerprint_of(
        source.fingerprint,
        destination.fingerprint,
        hosts,
        relaying_hosts,
        sharing=Hosts(hosts, relaying_hosts, devices).devices.tolist(),
    )
    return replace(result, fingerprint=fingerprint)


def plan_sides(
    source: Holdings,
    destination: Holdings,
    hosts: Sequence[object],
    bucket_nbytes: int,
    may_stay_unread: Collection[str],
    rank: int | None,
    relaying_hosts: Collection[object] = (),
    frozen: Collection[str] = (),
    devices: Sequence[str] = (),
) -> ReshardPlan:
    """Plan a reshard between two sides in compact form, such as sides computed from sizes.

    Arguments as in `plan`. Memory: the two sides and the requested transfers.

    Raises:
        PlanError: as `plan`, except that buffers are not checked.
    """
    numbered = Hosts(hosts, relaying_hosts, devices)
    planner = _Planner(source, destination, numbered, rank, may_stay_unread)
    # After the planner, which raises for a tensor without holders: `clusters_of` finds the source
    # of every destination tensor.
    outlines = outline_buckets(clusters_of(source, destination), bucket_nbytes, frozen)
    relays = RelayPlanner(rank)
    buckets = tuple(
        planner.bucket(index, outline, relays) for index, outline in enumerate(outlines)
    )
    return ReshardPlan(buckets, planner.unread, relays=relays.buffers)


def frozen_tensors(
    source: Holdings,
    destination: Holdings,
    frozen: Collection[str],
    bucket_nbytes: int,
) -> frozenset[str]:
    """Return the tensors in `frozen` that have separate buckets in a plan of these sides."""
    frozen = frozenset(frozen)
    outlines = outline_buckets(clusters_of(source, destination), bucket_nbytes, frozen)
    # A frozen tensor that shares a group with a trained one is sent with it in every switch.
    separate = (outline.tensors for outline in outlines if frozen.issuperset(outline.tensors))
    return frozenset().union(*separate)


def largest_bucket(
    source: Holdings,
    destination: Holdings,
    bucket_nbytes: int,
) -> int:
    """Return the most bytes that any rank fills or frees in one bucket of a plan.

    The result exceeds `bucket_nbytes` if a group is larger, as all experts of a layer may be.
    """
    outlines = outline_buckets(clusters_of(source, destination), bucket_nbytes)
    return max((outline.nbytes for outline in outlines), default=0)


def box_transfers(
    source: Side,
    destination: Side,
    hosts: Sequence[str],
    rank: int,
    may_stay_unread: Collection[str] = (),
) -> list[Transfer]:
    """Return one rank's transfers as boxes of canonical tensors, sorted by place within a tensor.

    They are for files, which are read and written box by box, and have neither buckets nor
    coalescing. Arguments and errors as in `plan`.
    """
    # Finer shapes first: without coalescing, every second row of [E, 2 I] would be a box per row,
    # where [E, I, 2] has a single box.
    held, needed = _checked_sides(*refined_alike(source, destination), may_stay_unread)
    planner = _Planner(held, needed, Hosts(hosts), rank, may_stay_unread)
    transfers: list[Transfer] = []
    for tensor in needed.owners:
        transfers += sorted(planner.transfers.get(tensor, ()), key=by_place)
    return transfers


def _checked_sides(
    source: Side,
    destination: Side,
    may_stay_unread: Collection[str],
) -> tuple[Holdings, Holdings]:
    """Return the compact form of both sides.

    Raises:
        PlanError: lists every fault if records are faulty. Ranks that hold the same are checked
            once, as their first.
    """
    faults = [
        *layout_faults(source.layout, exact=False),
        *layout_faults(destination.layout, exact=True),
    ]
    if not faults:
        return source.holdings, destination.holdings
    # Compare holdings only of tensors with sound records on both sides.
    unusable = unusable_tensors(source.layout) | unusable_tensors(destination.layout)
    usable_source = source.holdings_of(source.layout.without(unusable))
    usable_destination = destination.holdings_of(destination.layout.without(unusable))
    faults += holding_faults(usable_source, usable_destination)
    unread = _unread(_held(source.layout), _held(destination.layout))
    raise PlanError([*faults, *_unread_faults(unread, may_stay_unread)])


def _held(layout: Layout) -> set[str]:
    return {shard.region.tensor for shard in layout.shards}


def _unread(source: Iterable[str], destination: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(source) - set(destination)))


def _unread_faults(unread: Iterable[str], may_stay_unread: Collection[str]) -> list[str]:
    unexpected = sorted(set(unread).difference(may_stay_unread))
    return [f"{name}: a training parameter that no inference rank reads" for name in unexpected]


class _Planner:
    """Collector of transfers and byte counts, class by class.

    Attributes:
        transfers: direct transfers by tensor.
        relayed: transfers over relay buffers by tensor.
        unread: tensors that only the source holds, sorted.
    """

    def __init__(
        self,
        source: Holdings,
        destination: Holdings,
        hosts: Hosts,
        rank: int | None,
        may_stay_unread: Collection[str],
    ) -> None:
        """Plan the transfers of all tensors.

        Raises:
            PlanError: lists every fault of the holdings, and source tensors that are not read.
        """
        self.transfers: dict[str, list[Transfer]] = {}
        self.relayed: dict[str, list[RelayedTransfer]] = {}
        self._source = source
        self._destination = destination
        self._hosts = hosts
        self._rank = rank
        # Tensor -> (elements that each rank must receive, bytes per element). The tensors of a
        # class share the mapping of elements.
        self._missing: dict[str, tuple[Mapping[int, int], int]] = {}
        self.unread = _unread(source.owners, destination.owners)
        faults = _unread_faults(self.unread, may_stay_unread)
        for tensors in tensor_classes(source, destination, faults):
            self._add(tensors)

    def _add(self, tensors: TensorClass) -> None:
        """Plan the tensors of a class, unless the plan is for a rank that has no part in them."""
        boxes = (*tensors.sources, *tensors.destinations)
        # The plan of one rank skips most classes here: on a pipeline stage, those of all other
        # stages.
        if not any(self._is_planned(box.ranks) for box in boxes):
            return
        # Ranks that share a device read each other's memory, so nothing is missing between them.
        on_devices = self._hosts.on_devices(tensors.sources)
        missing: dict[int, int] = {}
        for ranks, numel in missing_by_rank(
            on_devices,
            tensors.destinations,
            self._hosts.num_ranks,
            None if self._rank is None else np.array([self._rank]),
        ):
            missing.update(dict.fromkeys(ranks.tolist(), numel))
        routes = Routes(tensors, self._hosts)
        for index, name in enumerate(tensors.tensors):
            self._missing[name] = (missing, int(tensors.itemsizes[index]))
            self.transfers[name] = list(self._direct(routes, name, index))
            self._add_ingress(routes, name, index)

    def bucket(self, index: int, outline: Outline, relays: RelayPlanner) -> Bucket:
        """Return the bucket of an outline; `relays` assigns places in relay buffers."""
        direct: list[Transfer] = []
        relayed: list[RelayedTransfer] = []
        least: Counter[int] = Counter()
        for tensor in outline.tensors:
            direct += self.transfers.get(tensor, ())
            relayed += self.relayed.get(tensor, ())
            # The classes that `_add` skipped have no entry.
            if tensor in self._missing:
                missing, itemsize = self._missing[tensor]
                # `Counter.update` adds to the counts, unlike that of a dict.
                least.update({rank: numel * itemsize for rank, numel in missing.items()})
        # Relayed boxes are laid out in the plan's order, and coalesced only afterwards.
        arriving, fan_out = relays.lay_out(index, relayed)
        return Bucket(
            index=index,
            tensors=outline.tensors,
            transfers=tuple(coalesce([*direct, *arriving])),
            groups=outline.groups,
            nbytes=outline.nbytes,
            fan_out=tuple(coalesce(fan_out)),
            least=dict(least),
        )

    def _direct(self, routes: Routes, tensor: str, index: int) -> Iterator[Transfer]:
        """Yield the transfers of a class's tensor from one rank to one other."""
        _, itemsize = self._missing[tensor]
        for receivers in routes.receivers:
            destination = routes.tensors.destinations[receivers.destination]
            for part in receivers.parts:
                source = routes.tensors.sources[part.source]
                # Skip before `senders`, which computes the senders of all receivers at once.
                if not self._is_planned(receivers.ranks) and not self._is_planned(source.ranks):
                    continue
                # The routes of a class have boxes without a name.
                region = Region(tensor, part.region.offsets, part.region.lengths)
                nbytes = region.numel * itemsize
                senders = routes.senders(receivers, part, index)
                dst_ranks = receivers.ranks
                if self._rank is not None:
                    involved = (dst_ranks == self._rank) | (senders == self._rank)
                    dst_ranks = dst_ranks[involved]
                    senders = senders[involved]
                pairs = zip(dst_ranks.tolist(), senders.tolist(), strict=True)
                for dst_rank, src_rank in pairs:
                    # Any copy that the sender has will do; take its first place.
                    src = self._source.places(tensor, source, src_rank, region)[0]
                    for dst in self._destination.places(tensor, destination, dst_rank, region):
                        yield Transfer(tensor, region.lengths, src, dst, nbytes, part.link)

    def _add_ingress(self, routes: Routes, tensor: str, index: int) -> None:
        """Add the transfers of a class's tensor to relaying hosts.

        A box goes over a relay buffer, or directly to its place if it has only one.
        """
        dtype = routes.tensors.dtypes[index]
        for ingress in routes.ingress:
            region = Region(tensor, ingress.region.offsets, ingress.region.lengths)
            source = routes.tensors.sources[ingress.source]
            hosts = routes.ingress_of(ingress, index, self._rank)
            for (src_rank, relay_rank), readers in hosts:
                src = self._source.places(tensor, source, src_rank, region)[0]
                places: list[Place] = []
                for rank, number in zip(readers, ingress.destinations, strict=True):
                    destination = routes.tensors.destinations[number]
                    places += self._destination.places(tensor, destination, rank, region)
                if ingress.is_relayed:
                    relayed = RelayedTransfer(region, src, relay_rank, dtype, tuple(places))
                    self.relayed.setdefault(tensor, []).append(relayed)
                else:
                    transfer = Transfer(
                        tensor,
                        region.lengths,
                        src,
                        # `is_relayed` is false only if a single place reads the box.
                        places[0],
                        region.numel * DTYPE_NBYTES[dtype],
                        Link.NETWORK,
                    )
                    self.transfers[tensor].append(transfer)

    def _is_planned(self, ranks: np.ndarray) -> bool:
        """Return whether the plan covers any of these sorted ranks."""
        return self._rank is None or contains(ranks, self._rank)
