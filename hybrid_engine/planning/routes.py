"""Who sends what of one tensor to whom, for all ranks that want it at once.

    askers that want the same region, hold the same parts of it and whose hosts hold the same parts of it are one class:
    the box algebra runs once per class, whatever the number of ranks

    for every class:                                  self, then same host, then network
        for every region that is held there:          the one with the largest common part first
            move what that region has of the part still missing
    of the ranks that hold a region equally near, askers take turns

Tensors that are spread alike go round in the same circle: the next one's askers come after the last one's. So the
choice depends on nothing but a tensor's holders and askers, the hosts, and its place in the model: one rank's plan
needs only the tensors it touches, and ranks that plan the same layouts get the same plan without talking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.regions import Region, subtract_all, union

_LINKS = tuple(Link)


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """One box of a tensor and the ranks that hold (or want) it.

    Attributes:
        offsets, lengths: of the box, in elements, one entry per dim.
        ranks: sorted; a rank is in it once for every place in which it has the box.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    ranks: np.ndarray

    @property
    def region(self) -> Region:
        """The box, of a tensor without a name: equal for all tensors that are spread alike."""
        return Region("", self.offsets, self.lengths)


class Hosts:
    """Host numbers by rank.

    Attributes:
        numbers: int array by rank; hosts are counted from 0 in order of their first rank.
        count: number of hosts.
    """

    def __init__(self, names: Sequence[object]) -> None:
        number_of: dict[object, int] = {}
        self.numbers = np.array([number_of.setdefault(name, len(number_of)) for name in names], dtype=np.int64)
        self.count = len(number_of)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of what a class of askers wants, and the source region (by index) it comes out of."""

    region: Region
    source: int
    link: Link


@dataclass(frozen=True, slots=True, eq=False)
class Askers:
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
    pieces: tuple[Piece, ...]
    missing: tuple[Region, ...]
    turns: dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class Lap:
    """Which of the tensors that are spread alike: the first one's ordinal in the plan, how many of them came before."""

    start: int
    index: int


class _Source:
    """One source region and its holders, sorted by host."""

    def __init__(self, spread: Spread, hosts: Hosts) -> None:
        self.region = spread.region
        self.ranks = np.unique(spread.ranks)
        self.held = np.zeros(len(hosts.numbers), dtype=bool)
        self.held[self.ranks] = True
        host_of = hosts.numbers[self.ranks]
        self.by_host = self.ranks[np.argsort(host_of, kind="stable")]
        self.count = np.bincount(host_of, minlength=hosts.count)
        self.start = np.cumsum(self.count) - self.count


class Routes:
    """The choice of senders for one tensor, or for all tensors that are spread in the same way.

    Args:
        sources: what training ranks hold.
        wants: what inference ranks want.
        hosts: of all ranks.

    Attributes:
        askers: the classes, in a fixed order; together they are all ranks and regions of `wants`.
    """

    def __init__(self, sources: Sequence[Spread], wants: Sequence[Spread], hosts: Hosts) -> None:
        self._hosts = hosts
        self._sources = [_Source(spread, hosts) for spread in sources]
        self._network_turns = np.zeros(len(sources), dtype=np.int64)
        self._host_turns: dict[int, np.ndarray] = {}
        touching = _touching(sources, wants)
        self.askers = [
            askers for index, want in enumerate(wants) for askers in self._classes(index, want, touching[index])
        ]

    def senders(self, askers: Askers, piece: Piece, lap: Lap) -> np.ndarray:
        """The rank that sends `piece` of one tensor to each of `askers.ranks`."""
        if piece.link is Link.SELF:
            return askers.ranks
        source, turns = self._sources[piece.source], askers.turns[piece.source] + lap.start
        if piece.link is Link.NETWORK:
            turns = turns + lap.index * self._network_turns[piece.source]
            return source.ranks[turns % len(source.ranks)]
        host = self._hosts.numbers[askers.ranks]
        turns = turns + lap.index * self._host_turns[piece.source][host]
        return source.by_host[source.start[host] + turns % source.count[host]]

    def load(self, askers: Askers, piece: Piece, start: int, indices: np.ndarray) -> np.ndarray:
        """How often each rank sends `piece` to these askers in the laps `indices`; int array by rank."""
        load = np.zeros(len(self._hosts.numbers), dtype=np.int64)
        if piece.link is Link.SELF:
            return load
        source = self._sources[piece.source]
        counts = source.count[self._hosts.numbers[askers.ranks]] if piece.link is Link.HOST else len(source.ranks)
        period = int(np.lcm.reduce(np.unique(counts)))  # laps this far apart are the same
        for index, times in zip(*np.unique(indices % period, return_counts=True), strict=True):
            np.add.at(load, self.senders(askers, piece, Lap(start, int(index))), times * askers.copies)
        return load

    def _classes(self, index: int, want: Spread, touching: Sequence[int]) -> Iterator[Askers]:
        ranks, copies = np.unique(want.ranks, return_counts=True)
        host = self._hosts.numbers[ranks]
        nearness = [self._sources[number].held[ranks] for number in touching]
        nearness += [self._sources[number].count[host] > 0 for number in touching]
        for members in groups_of_columns(nearness, len(ranks)):
            first = members[0]
            tiers: dict[Link, list[int]] = {link: [] for link in _LINKS}
            for position, number in enumerate(touching):
                own, near = nearness[position][first], nearness[position + len(touching)][first]
                tiers[Link.SELF if own else Link.HOST if near else Link.NETWORK].append(number)
            pieces, missing = self._cover(want.region, tiers)
            asked = {piece.source: piece for piece in pieces if piece.link is not Link.SELF}
            turns = {number: self._take_turns(piece, host[members]) for number, piece in asked.items()}
            yield Askers(index, ranks[members], copies[members], pieces, missing, turns)

    def _cover(self, wanted: Region, tiers: dict[Link, list[int]]) -> tuple[tuple[Piece, ...], tuple[Region, ...]]:
        """Cut `wanted` into pieces, nearest sources first, each as much as it has of what is still missing."""
        pieces: list[Piece] = []
        missing = [wanted]
        for link, numbers in tiers.items():
            commons = {number: wanted.intersect(self._sources[number].region) for number in numbers}
            for number in sorted(numbers, key=lambda number: (-commons[number].numel, commons[number])):
                region = self._sources[number].region
                found = [common for part in missing if (common := part.intersect(region)) is not None]
                if found:
                    pieces += (Piece(common, number, link) for common in found)
                    missing = subtract_all(missing, [region])
                if not missing:
                    return tuple(pieces), ()
        return tuple(pieces), tuple(missing)

    def _take_turns(self, piece: Piece, host: np.ndarray) -> np.ndarray:
        """The next turns at a source for ranks on these hosts; over the network one queue, else one for each host.

        Classes ask one after another, so the askers of a source have consecutive turns and its holders equal shares.
        """
        if piece.link is Link.NETWORK:
            turns = self._network_turns[piece.source] + np.arange(len(host))
            self._network_turns[piece.source] += len(host)
            return turns
        queues = self._host_turns.setdefault(piece.source, np.zeros(self._hosts.count, dtype=np.int64))
        turns = queues[host] + _position_on_host(host)
        queues += np.bincount(host, minlength=self._hosts.count)
        return turns


def unheld(sources: Sequence[Spread], wants: Sequence[Spread], num_ranks: int) -> Iterator[tuple[np.ndarray, int]]:
    """What each rank must receive whatever the plan: |wanted minus held|, each element once.

    Yields (ranks, elements); every rank that wants anything is in one of them.
    """
    num_wants = len(wants)
    presence = [presence_of(spread, num_ranks) for spread in (*wants, *sources)]
    concerned = np.flatnonzero(np.any(presence[:num_wants], axis=0)) if wants else np.zeros(0, dtype=np.int64)
    columns = [present[concerned] for present in presence]
    for members in groups_of_columns(columns, len(concerned)):
        has = [bool(column[members[0]]) for column in columns]
        wanted = union(spread.region for spread, yes in zip(wants, has[:num_wants], strict=True) if yes)
        held = [spread.region for spread, yes in zip(sources, has[num_wants:], strict=True) if yes]
        yield concerned[members], sum(region.numel for region in subtract_all(wanted, held))


def presence_of(spread: Spread, num_ranks: int) -> np.ndarray:
    present = np.zeros(num_ranks, dtype=bool)
    present[spread.ranks] = True
    return present


def _touching(sources: Sequence[Spread], wants: Sequence[Spread]) -> list[list[int]]:
    """For every wanted box, the indices of the source boxes that share elements with it."""
    if not sources or not wants:
        return [[] for _ in wants]
    shape = (len(sources), len(wants[0].offsets))  # a scalar has no dims, and all of it is common
    low = np.array([spread.offsets for spread in sources], dtype=np.int64).reshape(shape)
    high = low + np.array([spread.lengths for spread in sources], dtype=np.int64).reshape(shape)
    found = []
    for want in wants:
        start = np.array(want.offsets, dtype=np.int64)
        stop = start + np.array(want.lengths, dtype=np.int64)
        common = np.all(np.maximum(low, start) < np.minimum(high, stop), axis=1)
        found.append(np.flatnonzero(common).tolist())
    return found


def groups_of_columns(rows: Sequence[np.ndarray], num_columns: int) -> list[np.ndarray]:
    """Indices of equal columns of a boolean matrix, as groups in a fixed order; each group is sorted."""
    if num_columns == 0:
        return []
    if not rows:
        return [np.arange(num_columns)]
    packed = np.ascontiguousarray(np.packbits(np.array(rows), axis=0).T)
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, group_of = np.unique(keys, return_inverse=True)
    order = np.argsort(group_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group_of))[:-1])


def _position_on_host(host: np.ndarray) -> np.ndarray:
    """How many earlier entries are equal to each entry."""
    order = np.argsort(host, kind="stable")
    in_order = host[order]
    starts = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    lengths = np.diff(np.r_[starts, len(host)])
    positions = np.empty(len(host), dtype=np.int64)
    positions[order] = np.arange(len(host)) - np.repeat(starts, lengths)
    return positions
