"""Bytes of all ranks: what must be received whatever the plan, and what a plan moves, counted on its routes.

No transfer is made for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.routes import Hosts, Routes, tensor_classes
from hybrid_engine.records.holdings import BoxOwners, Holdings, groups_of_columns, presence_of
from hybrid_engine.records.regions import subtract_all, union


def missing_by_rank(
    sources: Sequence[BoxOwners],
    destinations: Sequence[BoxOwners],
    num_ranks: int,
    ranks: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, int]]:
    """Elements that each rank must receive: |needed minus held|, each element once.

    Args:
        sources, destinations: the owners of one tensor.
        num_ranks: of the world. ranks: those to look at; default: all.

    Yields (ranks, elements); every rank that needs anything is in one of them.
    """
    ranks = np.arange(num_ranks) if ranks is None else ranks
    needs = [presence_of(box, num_ranks)[ranks] for box in destinations]
    concerned = np.flatnonzero(np.any(needs, axis=0)) if needs else np.zeros(0, dtype=np.int64)
    ranks, needs = ranks[concerned], [need[concerned] for need in needs]
    holds = [presence_of(box, num_ranks)[ranks] for box in sources]
    # Ranks that need the same boxes and hold the same boxes have equal columns, and the box algebra is done once.
    for members in groups_of_columns([*needs, *holds], len(ranks)):
        first = members[0]
        needed = union(box.region for box, need in zip(destinations, needs, strict=True) if need[first])
        held = [box.region for box, hold in zip(sources, holds, strict=True) if hold[first]]
        yield ranks[members], sum(region.numel for region in subtract_all(needed, held))


def missing_by_host(sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners], hosts: Hosts) -> np.ndarray:
    """Elements that must come to each host over the network; int array by host."""
    numel = np.zeros(hosts.count, dtype=np.int64)

    def by_host(owners: Sequence[BoxOwners]) -> list[BoxOwners]:
        return [BoxOwners(each.offsets, each.lengths, hosts.numbers[each.ranks]) for each in owners]

    for numbers, count in missing_by_rank(by_host(sources), by_host(destinations), hosts.count):
        numel[numbers] += count
    return numel


@dataclass(frozen=True, eq=False)
class ByteSummary:
    """Bytes of one reshard, int arrays by rank.

    Attributes:
        own: copied inside the rank. host, network: received from a rank of the same host, of another one.
        sent_host, sent_network: the same seen from the sender.
        lower_bound: no plan lets the rank receive less.
        network_lower_bound: by host: no plan lets its ranks together receive less from other hosts.
    """

    own: np.ndarray
    host: np.ndarray
    network: np.ndarray
    sent_host: np.ndarray
    sent_network: np.ndarray
    lower_bound: np.ndarray
    network_lower_bound: np.ndarray

    @property
    def received(self) -> np.ndarray:
        """Bytes from other ranks."""
        return self.host + self.network

    @property
    def sent(self) -> np.ndarray:
        """Bytes to other ranks."""
        return self.sent_host + self.sent_network


def summarize(
    source: Holdings, destination: Holdings, hosts: Sequence[object], relaying_hosts: Collection[object] = ()
) -> ByteSummary:
    """Bytes that every rank receives and sends in the plan between two sides.

    Args:
        source, destination: training and inference.
        hosts: of every rank.
        relaying_hosts: as of `planner.plan`.

    Raises:
        PlanError: naming tensors of two shapes, and what some rank needs and no rank holds.
    """
    by_number = Hosts(hosts, relaying_hosts)
    received, sent = ({link: np.zeros(by_number.num_ranks, dtype=np.int64) for link in Link} for _ in range(2))
    lower_bound = np.zeros(by_number.num_ranks, dtype=np.int64)
    network_lower_bound = np.zeros(by_number.count, dtype=np.int64)
    for tensors in tensor_classes(source, destination):
        owners, itemsize = (tensors.sources, tensors.destinations), int(tensors.itemsizes.sum())
        for flow in Routes(*owners, by_number).flows(tensors.first, tensors.itemsizes):
            received[flow.link][flow.receivers] += flow.nbytes
            np.add.at(sent[flow.link], flow.senders, flow.nbytes)
        for ranks, numel in missing_by_rank(*owners, by_number.num_ranks):
            lower_bound[ranks] += numel * itemsize
        network_lower_bound += missing_by_host(*owners, by_number) * itemsize
    return ByteSummary(
        own=received[Link.SELF],
        host=received[Link.HOST],
        network=received[Link.NETWORK],
        sent_host=sent[Link.HOST],
        sent_network=sent[Link.NETWORK],
        lower_bound=lower_bound,
        network_lower_bound=network_lower_bound,
    )
