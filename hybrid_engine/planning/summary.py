"""The bytes of all ranks, without a plan of every rank: the same numbers as `planning.planner.plan` gives.

Tensors with the same owners on both sides move alike but for the turns of their senders, so the work is done once for
each such set of tensors and each class of ranks in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.routes import Hosts, Routes, missing_by_hosts, missing_by_rank
from hybrid_engine.records.holdings import Holdings, TensorOwners


@dataclass(frozen=True, eq=False)
class ByteSummary:
    """Bytes of one reshard, int arrays by rank.

    Attributes:
        own: copied inside the rank. host, network: received from a rank of the same host, of another one.
        sent_host, sent_network: the same seen from the sender.
        least: no plan lets the rank receive less.
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


@dataclass(frozen=True, eq=False)
class TensorClass:
    """Tensors with the same owners on both sides.

    Attributes:
        sources, destinations: their owners in training and in inference.
        tensors: names, in the plan's order.
        start: the first one's ordinal in the plan.
        itemsizes: bytes per element in training, for each tensor.
    """

    sources: TensorOwners
    destinations: TensorOwners
    tensors: tuple[str, ...]
    start: int
    itemsizes: np.ndarray


def tensor_classes(source: Holdings, destination: Holdings) -> Iterator[TensorClass]:
    """The tensors that are moved, in sets.

    Raises PlanError naming every tensor that is wanted and that nobody holds, or held with another shape.
    """
    faults = [f"{name}: wanted, but no training rank holds it" for name in destination.owners.keys() - source.owners]
    faults += [
        f"{name}: shape {source.shapes[name]} in training, {shape} in inference"
        for name, shape in destination.shapes.items()
        if source.shapes.get(name, shape) != shape
    ]
    if faults:
        raise PlanError(sorted(faults))
    found: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for ordinal, (name, destinations) in enumerate(destination.owners.items()):
        found.setdefault((id(source.owners[name]), id(destinations)), []).append((ordinal, name))
    for members in found.values():
        names = tuple(name for _, name in members)
        itemsizes = np.array([source.itemsizes[name] for name in names], dtype=np.int64)
        yield TensorClass(source.owners[names[0]], destination.owners[names[0]], names, members[0][0], itemsizes)


def summarize(
    source: Holdings, destination: Holdings, hosts: Sequence[object], relaying_hosts: Collection[object] = ()
) -> ByteSummary:
    """What every rank receives and sends in the plan between two layouts.

    Args:
        source, destination: training and inference.
        hosts: of every rank.
        relaying_hosts: as of `plan`.

    Raises PlanError like `plan` for tensors that are not held; parts of tensors that are not held are one of its
    findings each.
    """
    tally = _Tally(Hosts(hosts, relaying_hosts))
    for tensors in tensor_classes(source, destination):
        tally.add(tensors)
    if tally.faults:
        raise PlanError(tally.faults)
    counts = tally.counts
    return ByteSummary(
        own=counts[Link.SELF],
        host=counts[Link.HOST],
        network=counts[Link.NETWORK],
        sent_host=tally.sent[Link.HOST],
        sent_network=tally.sent[Link.NETWORK],
        lower_bound=tally.lower_bound,
        network_lower_bound=tally.network_lower_bound,
    )


class _Tally:
    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        num_ranks = len(hosts.numbers)
        self.counts: Mapping[Link, np.ndarray] = {link: np.zeros(num_ranks, dtype=np.int64) for link in Link}
        self.sent: Mapping[Link, np.ndarray] = {link: np.zeros(num_ranks, dtype=np.int64) for link in Link}
        self.lower_bound = np.zeros(num_ranks, dtype=np.int64)
        self.network_lower_bound = np.zeros(hosts.count, dtype=np.int64)
        self.faults: list[str] = []

    def add(self, tensors: TensorClass) -> None:
        routes = Routes(tensors.sources, tensors.destinations, self._hosts)
        total = int(tensors.itemsizes.sum())
        for receivers in routes.receivers:
            for box in receivers.missing:
                self.faults.append(
                    f"{tensors.tensors[0]}: elements [{box.offsets}, {box.ends}) are wanted by rank "
                    f"{receivers.ranks[0]}, but no training rank holds them"
                )
            for piece in receivers.pieces:
                numel = piece.region.numel
                self.counts[piece.link][receivers.ranks] += numel * total * receivers.copies
                if piece.link is not Link.SELF:
                    for itemsize in np.unique(tensors.itemsizes):
                        laps = np.flatnonzero(tensors.itemsizes == itemsize)
                        self.sent[piece.link][:] += (
                            numel * int(itemsize) * routes.load(receivers, piece, tensors.start, laps)
                        )
        self._add_ingress(routes, tensors)
        for ranks, numel in missing_by_rank(tensors.sources, tensors.destinations, len(self._hosts.numbers)):
            self.lower_bound[ranks] += numel * total
        self.network_lower_bound += missing_by_hosts(tensors.sources, tensors.destinations, self._hosts) * total

    def _add_ingress(self, routes: Routes, tensors: TensorClass) -> None:
        for ingress in routes.ingress:
            for itemsize in np.unique(tensors.itemsizes):
                laps = np.flatnonzero(tensors.itemsizes == itemsize)
                load = routes.ingress_load(ingress, tensors.start, laps)
                nbytes = ingress.region.numel * int(itemsize)
                self.counts[Link.NETWORK][:] += nbytes * load.network
                self.sent[Link.NETWORK][:] += nbytes * load.sent_network
                self.counts[Link.HOST][:] += nbytes * load.host
                self.sent[Link.HOST][:] += nbytes * load.sent_host
