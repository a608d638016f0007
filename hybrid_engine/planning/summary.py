"""Byte counts of all ranks: the lower bound of any plan, and the bytes that a plan moves.

The bytes are counted on routes. No transfer is created.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.routes import Hosts, Routes
from hybrid_engine.planning.tensor_classes import tensor_classes
from hybrid_engine.records.holdings import BoxOwners, Holdings, groups_of_columns, presence_of
from hybrid_engine.records.regions import subtract_all, union


def missing_by_rank(
    sources: Sequence[BoxOwners],
    destinations: Sequence[BoxOwners],
    num_ranks: int,
    ranks: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (ranks, elements that each of them must receive): |needed minus held|.

    Every rank that needs any part of the tensor appears once. An element that a rank needs in
    several places counts once.

    Args:
        sources: the tensor's boxes in training.
        destinations: the tensor's boxes in inference.
        num_ranks: size of the world.
        ranks: ranks to look at; default: all.
    """
    ranks = np.arange(num_ranks) if ranks is None else ranks
    needs = [presence_of(box, num_ranks)[ranks] for box in destinations]
    concerned = np.flatnonzero(np.any(needs, axis=0)) if needs else np.zeros(0, dtype=np.int64)
    ranks = ranks[concerned]
    needs = [need[concerned] for need in needs]
    holds = [presence_of(box, num_ranks)[ranks] for box in sources]
    # Ranks that need and hold the same boxes have equal columns: one box computation serves all.
    for members in groups_of_columns([*needs, *holds], len(ranks)):
        first = members[0]
        # Two boxes that a rank needs may overlap, hence the union; `held` may overlap without harm.
        needed = union(
            box.region for box, need in zip(destinations, needs, strict=True) if need[first]
        )
        held = [box.region for box, hold in zip(sources, holds, strict=True) if hold[first]]
        missing = subtract_all(needed, held)
        yield ranks[members], sum(region.numel for region in missing)


def missing_by_host(
    sources: Sequence[BoxOwners],
    destinations: Sequence[BoxOwners],
    hosts: Hosts,
) -> np.ndarray:
    """Return the elements that each host must receive over the network; int array by host."""

    def by_host(owners: Sequence[BoxOwners]) -> list[BoxOwners]:
        return [BoxOwners(box.offsets, box.lengths, hosts.numbers[box.ranks]) for box in owners]

    numel = np.zeros(hosts.count, dtype=np.int64)
    # A host as a whole holds and needs what its ranks do, so hosts take the place of ranks here.
    for numbers, count in missing_by_rank(by_host(sources), by_host(destinations), hosts.count):
        numel[numbers] += count
    return numel


@dataclass(frozen=True, eq=False)
class ByteSummary:
    """Bytes of one reshard; int arrays by rank unless noted.

    Attributes:
        own: copied within the rank.
        host: received from other ranks of the same host.
        network: received from ranks of other hosts.
        sent_host: sent to other ranks of the same host.
        sent_network: sent to ranks of other hosts.
        lower_bound: least bytes that the rank receives under any plan.
        network_lower_bound: int array by host: least bytes that the host's ranks together
            receive from other hosts under any plan.
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
    source: Holdings,
    destination: Holdings,
    hosts: Sequence[object],
    relaying_hosts: Collection[object] = (),
) -> ByteSummary:
    """Count the bytes that every rank receives and sends in the plan between two sides.

    Args:
        source: holdings in training.
        destination: holdings in inference.
        hosts: host of every rank.
        relaying_hosts: hosts that use relay buffers, as in `planner.plan`.

    Raises:
        PlanError: lists tensors with different shapes on the two sides, and boxes that some rank
            needs and no rank holds.
    """
    numbered = Hosts(hosts, relaying_hosts)
    num_ranks = numbered.num_ranks
    received = {link: np.zeros(num_ranks, dtype=np.int64) for link in Link}
    sent = {link: np.zeros(num_ranks, dtype=np.int64) for link in Link}
    lower_bound = np.zeros(num_ranks, dtype=np.int64)
    network_lower_bound = np.zeros(numbered.count, dtype=np.int64)
    for tensors in tensor_classes(source, destination):
        sources = tensors.sources
        destinations = tensors.destinations
        for flow in Routes(tensors, numbered).flows():
            # A receiver is unique within a flow but a sender is not: `+=` would lose its repeats.
            received[flow.link][flow.receivers] += flow.nbytes
            np.add.at(sent[flow.link], flow.senders, flow.nbytes)
        # All tensors of the class have the same boxes, so their item sizes add up.
        itemsize = int(tensors.itemsizes.sum())
        for ranks, numel in missing_by_rank(sources, destinations, num_ranks):
            lower_bound[ranks] += numel * itemsize
        network_lower_bound += missing_by_host(sources, destinations, numbered) * itemsize
    return ByteSummary(
        own=received[Link.SELF],
        host=received[Link.HOST],
        network=received[Link.NETWORK],
        sent_host=sent[Link.HOST],
        sent_network=sent[Link.NETWORK],
        lower_bound=lower_bound,
        network_lower_bound=network_lower_bound,
    )
