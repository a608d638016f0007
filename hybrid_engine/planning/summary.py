"""The bytes of all ranks, counted on the same routes as a plan's transfers, without making any of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.planning.lower_bound import missing_by_host, missing_by_rank
from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.routes import Hosts, LinkBytes, Routes
from hybrid_engine.planning.tensor_classes import tensor_classes
from hybrid_engine.records.holdings import Holdings


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
        """From other ranks."""
        return self.host + self.network

    @property
    def sent(self) -> np.ndarray:
        """To other ranks."""
        return self.sent_host + self.sent_network


def summarize(
    source: Holdings, destination: Holdings, hosts: Sequence[object], relaying_hosts: Collection[object] = ()
) -> ByteSummary:
    """What every rank receives and sends in the plan between two sides.

    Args:
        source, destination: training and inference.
        hosts: of every rank.
        relaying_hosts: as of `planner.plan`.

    Raises:
        PlanError: naming tensors of two shapes, and what some rank needs and no rank holds.
    """
    by_number = Hosts(hosts, relaying_hosts)
    total = LinkBytes(by_number.num_ranks)
    lower_bound = np.zeros(by_number.num_ranks, dtype=np.int64)
    network_lower_bound = np.zeros(by_number.count, dtype=np.int64)
    for tensors in tensor_classes(source, destination):
        owners, itemsize = (tensors.sources, tensors.destinations), int(tensors.itemsizes.sum())
        for flow in Routes(*owners, by_number).flows(tensors.first, tensors.itemsizes):
            total.add(flow)
        for ranks, numel in missing_by_rank(*owners, by_number.num_ranks):
            lower_bound[ranks] += numel * itemsize
        network_lower_bound += missing_by_host(*owners, by_number) * itemsize
    return ByteSummary(
        own=total.received[Link.SELF],
        host=total.received[Link.HOST],
        network=total.received[Link.NETWORK],
        sent_host=total.sent[Link.HOST],
        sent_network=total.sent[Link.NETWORK],
        lower_bound=lower_bound,
        network_lower_bound=network_lower_bound,
    )


def group_traffic(
    source: Holdings,
    destination: Holdings,
    hosts: Sequence[object],
    relaying_hosts: Collection[object],
    groupings: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Bytes between groups of ranks, [senders, receivers], for each of some ways to group them.

    Args:
        source, destination, hosts, relaying_hosts: as of `summarize`.
        groupings: number of its group for each rank, counted from 0.

    Copies within a rank are not in it; what ranks of one group send each other is.
    """
    by_number = Hosts(hosts, relaying_hosts)
    found = [np.zeros((int(groups.max()) + 1,) * 2, dtype=np.int64) for groups in groupings]
    for tensors in tensor_classes(source, destination):
        for flow in Routes(tensors.sources, tensors.destinations, by_number).flows(tensors.first, tensors.itemsizes):
            if flow.link is not Link.SELF:
                for groups, nbytes in zip(groupings, found, strict=True):
                    np.add.at(nbytes, (groups[flow.senders], groups[flow.receivers]), flow.nbytes)
    return found
