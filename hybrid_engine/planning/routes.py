"""Who sends what of one tensor to whom, for all ranks that want it at once.

    receivers that want the same region, hold the same parts of it and whose hosts hold the same parts of it are one
    class: the box algebra runs once per class, whatever the number of ranks

    for every class:                                  self, then same host, then network
        for every region that is held there:          the one with the largest common part first
            move what that region has of the part still missing
    of the ranks that hold a region equally near, receivers take turns

    on hosts whose ranks read each other's memory (relaying ones): what several places of a host need over the network
    is cut into common boxes; each comes once, to one of the ranks that want it (ingress); these take turns too

Tensors with the same owners go round in the same circle: the next one's receivers come after the last one's. So the
choice depends on nothing but a tensor's holders and receivers, the hosts, and its place in the model: one rank's plan
needs only the tensors it touches, and ranks that plan the same layouts get the same plan without talking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.planning.plan import Link
from hybrid_engine.records.owners import BoxOwners, groups_of_columns, presence_of
from hybrid_engine.records.regions import Region, subtract_all, union

_LINKS = tuple(Link)


class Hosts:
    """Host numbers by rank.

    Attributes:
        names: of the hosts, by number.
        numbers: int array by rank; hosts are counted from 0 in order of their first rank.
        count: number of hosts.
        are_relaying: bool array by rank; its host's ranks read each other's relay buffers.
    """

    def __init__(self, names: Sequence[object], relaying: Collection[object] = ()) -> None:
        """`names`: by rank. `relaying`: names of hosts."""
        number_of: dict[object, int] = {}
        self.numbers = np.array([number_of.setdefault(name, len(number_of)) for name in names], dtype=np.int64)
        self.names = tuple(number_of)
        self.count = len(number_of)
        self.are_relaying = np.array([name in relaying for name in names], dtype=bool)


@dataclass(frozen=True, slots=True)
class BoxSource:
    """A part of what a class of receivers want, and the source region (by index) it comes out of."""

    region: Region
    source: int
    link: Link


@dataclass(frozen=True, slots=True, eq=False)
class Receivers:
    """Ranks that want the same region and get its pieces over the same links.

    Attributes:
        want: index of the region they want.
        ranks: sorted.
        copies: how many places of each rank want it.
        pieces: disjoint boxes that together with `missing` are the region.
        missing: boxes that no rank holds.
        turns: source index -> each rank's turn among those that ask for that source over the same link.
    """

    want: int
    ranks: np.ndarray
    copies: np.ndarray
    pieces: tuple[BoxSource, ...]
    missing: tuple[Region, ...]
    turns: dict[int, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class HostIngress:
    """A box that comes to some hosts over the network, once to each of them.

    Attributes:
        region: the box.
        source: index of the source region it comes out of.
        readers: int array [hosts, columns]: ranks that want it; a rank that wants it by two regions is in two columns.
        destinations: the region by which each column wants it.
        copies: how many places of a rank of each column want it.
        turns: of each host among those that ask for the source over the network.
        number: position among the ingress at these hosts.
    """

    region: Region
    source: int
    readers: np.ndarray
    destinations: tuple[int, ...]
    copies: tuple[int, ...]
    turns: np.ndarray
    number: int

    @property
    def is_relayed(self) -> bool:
        """Several places read it; otherwise it goes straight to the only one."""
        return sum(self.copies) > 1


@dataclass(frozen=True, slots=True, eq=False)
class IngressLoad:
    """How often each rank takes part in an ingress; int arrays by rank.

    Attributes:
        sent_network, network: sends it, has it brought to itself.
        sent_host, host: is read by another rank of its host, reads from one.
    """

    sent_network: np.ndarray
    network: np.ndarray
    sent_host: np.ndarray
    host: np.ndarray


@dataclass(frozen=True, slots=True)
class RoundRobinOffset:
    """Which of the tensors with the same owners: the first one's ordinal in the plan, how many of them came before."""

    start: int
    index: int


class _OnHosts:
    """Some ranks, sorted by host.

    Attributes:
        by_host: the ranks; those of host h are `count[h]` from `start[h]` on.
    """

    def __init__(self, ranks: np.ndarray, hosts: Hosts) -> None:
        host_of = hosts.numbers[ranks]
        self.by_host = ranks[np.argsort(host_of, kind="stable")]
        self.count = np.bincount(host_of, minlength=hosts.count)
        self.start = np.cumsum(self.count) - self.count

    def rows(self, hosts: np.ndarray) -> np.ndarray:
        """Ranks [hosts, columns] of hosts that have equally many."""
        return self.by_host[self.start[hosts][:, None] + np.arange(self.count[hosts[0]])]


class _Source(_OnHosts):
    """One source region and its holders."""

    def __init__(self, box: BoxOwners, hosts: Hosts) -> None:
        self.region = box.region
        self.ranks = np.unique(box.ranks)
        self.held = np.zeros(len(hosts.numbers), dtype=bool)
        self.held[self.ranks] = True
        super().__init__(self.ranks, hosts)


@dataclass(frozen=True, slots=True)
class _Box:
    """A box that the same classes of receivers (numbers) need."""

    region: Region
    source: int
    receivers: tuple[int, ...]


def _common_boxes(needed: Mapping[int, Sequence[BoxSource]]) -> list[_Box]:
    """Cut the pieces of some classes of receivers into disjoint boxes; `needed` is by class."""
    boxes: list[_Box] = []
    for receivers, pieces in needed.items():
        for piece in pieces:
            cut: list[_Box] = []
            for box in boxes:
                common = box.region.intersect(piece.region)
                rest = box.region.subtract(piece.region)
                cut += [_Box(region, box.source, box.receivers) for region in rest]
                if common is not None:
                    cut.append(_Box(common, box.source, (*box.receivers, receivers)))
            new = subtract_all([piece.region], [box.region for box in boxes])
            boxes = cut + [_Box(region, piece.source, (receivers,)) for region in new]
    return boxes


class Routes:
    """The choice of senders for one tensor, or for all tensors with the same owners.

    Args:
        sources: what training ranks hold.
        destinations: what inference ranks want.
        hosts: of all ranks.

    Attributes:
        receivers: the classes, in a fixed order; together they are all ranks and regions of `destinations`. On relaying
            hosts their pieces are those that the host has.
        ingress: what comes to relaying hosts over the network.
    """

    def __init__(self, sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners], hosts: Hosts) -> None:
        self._hosts = hosts
        self._sources = [_Source(box, hosts) for box in sources]
        self._network_turns = np.zeros(len(sources), dtype=np.int64)
        self._host_turns: dict[int, np.ndarray] = {}
        touching = _touching(sources, destinations)
        self._brought: list[tuple[Receivers, tuple[BoxSource, ...]]] = []  # to relaying hosts over the network
        self.receivers = [
            receivers
            for index, want in enumerate(destinations)
            for receivers in self._classes(index, want, touching[index])
        ]
        self.ingress = list(self._find_ingress())

    def senders(self, receivers: Receivers, piece: BoxSource, offset: RoundRobinOffset) -> np.ndarray:
        """The rank that sends `piece` of one tensor to each of `receivers.ranks`."""
        if piece.link is Link.SELF:
            return receivers.ranks
        if piece.link is Link.NETWORK:
            return self._network_senders(piece.source, receivers.turns[piece.source], offset)
        source, host = self._sources[piece.source], self._hosts.numbers[receivers.ranks]
        turns = receivers.turns[piece.source] + offset.start + offset.index * self._host_turns[piece.source][host]
        return source.by_host[source.start[host] + turns % source.count[host]]

    def load(self, receivers: Receivers, piece: BoxSource, start: int, indices: np.ndarray) -> np.ndarray:
        """How often each rank sends `piece` to these receivers in the laps `indices`; int array by rank."""
        load = np.zeros(len(self._hosts.numbers), dtype=np.int64)
        if piece.link is Link.SELF:
            return load
        source = self._sources[piece.source]
        counts = source.count[self._hosts.numbers[receivers.ranks]] if piece.link is Link.HOST else len(source.ranks)
        period = int(np.lcm.reduce(np.unique(counts)))  # laps this far apart are the same
        for index, times in zip(*np.unique(indices % period, return_counts=True), strict=True):
            np.add.at(
                load, self.senders(receivers, piece, RoundRobinOffset(start, int(index))), times * receivers.copies
            )
        return load

    def relay_ranks(self, ingress: HostIngress, offset: RoundRobinOffset) -> np.ndarray:
        """The rank of each host to which an ingress of one tensor comes; one of its readers."""
        return ingress.readers[:, (ingress.number + offset.start + offset.index) % ingress.readers.shape[1]]

    def ingress_senders(self, ingress: HostIngress, offset: RoundRobinOffset) -> np.ndarray:
        """The rank that sends an ingress of one tensor to each host."""
        return self._network_senders(ingress.source, ingress.turns, offset)

    def ingress_of(
        self, ingress: HostIngress, offset: RoundRobinOffset, rank: int | None = None
    ) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """For each host, or each at which this rank sends or reads: (sender, relay rank), the ranks of the columns."""
        senders, readers = self.ingress_senders(ingress, offset), ingress.readers
        relay_ranks = self.relay_ranks(ingress, offset)
        if rank is not None:
            own = (senders == rank) | (readers == rank).any(axis=1)
            senders, relay_ranks, readers = senders[own], relay_ranks[own], readers[own]
        return zip(zip(senders.tolist(), relay_ranks.tolist(), strict=True), readers.tolist(), strict=True)

    def ingress_load(self, ingress: HostIngress, start: int, indices: np.ndarray) -> IngressLoad:
        """How often each rank takes part in an ingress in the laps `indices`."""
        load = IngressLoad(*(np.zeros(len(self._hosts.numbers), dtype=np.int64) for _ in range(4)))
        num_columns = ingress.readers.shape[1]
        period = int(np.lcm(len(self._sources[ingress.source].ranks), num_columns))
        for index, times in zip(*np.unique(indices % period, return_counts=True), strict=True):
            offset = RoundRobinOffset(start, int(index))
            relay_ranks = self.relay_ranks(ingress, offset)
            np.add.at(load.sent_network, self.ingress_senders(ingress, offset), times)
            np.add.at(load.network, relay_ranks, times)
            for column, copies in enumerate(ingress.copies):
                readers = ingress.readers[:, column]
                others = readers != relay_ranks
                np.add.at(load.host, readers[others], times * copies)
                np.add.at(load.sent_host, relay_ranks[others], times * copies)
        return load

    def _network_senders(self, source: int, turns: np.ndarray, offset: RoundRobinOffset) -> np.ndarray:
        ranks = self._sources[source].ranks
        return ranks[(turns + offset.start + offset.index * self._network_turns[source]) % len(ranks)]

    def _classes(self, index: int, want: BoxOwners, touching: Sequence[int]) -> Iterator[Receivers]:
        ranks, copies = np.unique(want.ranks, return_counts=True)
        host = self._hosts.numbers[ranks]
        nearness = [self._sources[number].held[ranks] for number in touching]
        nearness += [self._sources[number].count[host] > 0 for number in touching]
        kinds = [self._hosts.are_relaying[ranks], *(copies == number for number in np.unique(copies))]
        for members in groups_of_columns([*nearness, *kinds], len(ranks)):
            first = members[0]
            tiers: dict[Link, list[int]] = {link: [] for link in _LINKS}
            for position, number in enumerate(touching):
                own, near = nearness[position][first], nearness[position + len(touching)][first]
                tiers[Link.SELF if own else Link.HOST if near else Link.NETWORK].append(number)
            pieces, missing = self._cover(want.region, tiers)
            brought: tuple[BoxSource, ...] = ()
            if self._hosts.are_relaying[ranks[first]]:
                brought = tuple(piece for piece in pieces if piece.link is Link.NETWORK)
                pieces = tuple(piece for piece in pieces if piece.link is not Link.NETWORK)
            asked = {piece.source: piece for piece in pieces if piece.link is not Link.SELF}
            turns = {number: self._take_turns(piece, host[members]) for number, piece in asked.items()}
            receivers = Receivers(index, ranks[members], copies[members], pieces, missing, turns)
            if brought:
                self._brought.append((receivers, brought))
            yield receivers

    def _find_ingress(self) -> Iterator[HostIngress]:
        """What relaying hosts need over the network, worked out once for hosts with equally many equal receivers."""
        if not self._brought:
            return
        by_host = [_OnHosts(receivers.ranks, self._hosts) for receivers, _ in self._brought]
        kinds, kind_of = np.unique([ranks.count for ranks in by_host], axis=1, return_inverse=True)
        for kind, counts in enumerate(kinds.T):
            present = np.flatnonzero(counts)
            hosts = np.flatnonzero(kind_of.ravel() == kind)
            boxes = _common_boxes({number: self._brought[number][1] for number in present.tolist()})
            turns = {box.source: self._network_turns[box.source] + np.arange(len(hosts)) for box in boxes}
            for source in turns:
                self._network_turns[source] += len(hosts)
            for number, box in enumerate(boxes):
                wanting = [self._brought[receivers][0] for receivers in box.receivers for _ in range(counts[receivers])]
                yield HostIngress(
                    box.region,
                    box.source,
                    np.concatenate([by_host[receivers].rows(hosts) for receivers in box.receivers], axis=1),
                    tuple(receivers.want for receivers in wanting),
                    tuple(int(receivers.copies[0]) for receivers in wanting),
                    turns[box.source],
                    number,
                )

    def _cover(self, wanted: Region, tiers: dict[Link, list[int]]) -> tuple[tuple[BoxSource, ...], tuple[Region, ...]]:
        """Cut `wanted` into pieces, nearest sources first, each as much as it has of what is still missing."""
        pieces: list[BoxSource] = []
        missing = [wanted]
        for link, numbers in tiers.items():
            commons = {number: wanted.intersect(self._sources[number].region) for number in numbers}
            for number in sorted(numbers, key=lambda number: (-commons[number].numel, commons[number])):
                region = self._sources[number].region
                found = [common for part in missing if (common := part.intersect(region)) is not None]
                if found:
                    pieces += (BoxSource(common, number, link) for common in found)
                    missing = subtract_all(missing, [region])
                if not missing:
                    return tuple(pieces), ()
        return tuple(pieces), tuple(missing)

    def _take_turns(self, piece: BoxSource, host: np.ndarray) -> np.ndarray:
        """The next turns at a source for ranks on these hosts; over the network one queue, else one for each host.

        Classes ask one after another, so the receivers of a source have consecutive turns and its holders equal shares.
        """
        if piece.link is Link.NETWORK:
            turns = self._network_turns[piece.source] + np.arange(len(host))
            self._network_turns[piece.source] += len(host)
            return turns
        queues = self._host_turns.setdefault(piece.source, np.zeros(self._hosts.count, dtype=np.int64))
        turns = queues[host] + _position_on_host(host)
        queues += np.bincount(host, minlength=self._hosts.count)
        return turns


def missing_by_rank(
    sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners], num_ranks: int
) -> Iterator[tuple[np.ndarray, int]]:
    """What each rank must receive whatever the plan: |wanted minus held|, each element once.

    Yields (ranks, elements); every rank that wants anything is in one of them.
    """
    num_wants = len(destinations)
    presence = [presence_of(box, num_ranks) for box in (*destinations, *sources)]
    concerned = np.flatnonzero(np.any(presence[:num_wants], axis=0)) if destinations else np.zeros(0, dtype=np.int64)
    columns = [present[concerned] for present in presence]
    for members in groups_of_columns(columns, len(concerned)):
        has = [bool(column[members[0]]) for column in columns]
        wanted = union(box.region for box, yes in zip(destinations, has[:num_wants], strict=True) if yes)
        held = [box.region for box, yes in zip(sources, has[num_wants:], strict=True) if yes]
        yield concerned[members], sum(region.numel for region in subtract_all(wanted, held))


def missing_by_hosts(sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners], hosts: Hosts) -> np.ndarray:
    """Elements that must come to each host over the network whatever the plan; int array by host."""
    numel = np.zeros(hosts.count, dtype=np.int64)

    def by_host(owners: Sequence[BoxOwners]) -> list[BoxOwners]:
        return [BoxOwners(each.offsets, each.lengths, hosts.numbers[each.ranks]) for each in owners]

    for numbers, count in missing_by_rank(by_host(sources), by_host(destinations), hosts.count):
        numel[numbers] += count
    return numel


def _touching(sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners]) -> list[list[int]]:
    """For every wanted box, the indices of the source boxes that share elements with it."""
    if not sources or not destinations:
        return [[] for _ in destinations]
    shape = (len(sources), len(destinations[0].offsets))  # a scalar has no dims, and all of it is common
    low = np.array([box.offsets for box in sources], dtype=np.int64).reshape(shape)
    high = low + np.array([box.lengths for box in sources], dtype=np.int64).reshape(shape)
    found = []
    for want in destinations:
        start = np.array(want.offsets, dtype=np.int64)
        stop = start + np.array(want.lengths, dtype=np.int64)
        common = np.all(np.maximum(low, start) < np.minimum(high, stop), axis=1)
        found.append(np.flatnonzero(common).tolist())
    return found


def _position_on_host(host: np.ndarray) -> np.ndarray:
    """How many earlier entries are equal to each entry."""
    order = np.argsort(host, kind="stable")
    in_order = host[order]
    starts = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    lengths = np.diff(np.r_[starts, len(host)])
    positions = np.empty(len(host), dtype=np.int64)
    positions[order] = np.arange(len(host)) - np.repeat(starts, lengths)
    return positions
