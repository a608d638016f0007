"""Routes: the choice of the rank that sends each part of a tensor, for all its receivers at once.

    tensor classes    Tensors with the same owners on both sides are routed once, see
                      tensor_classes.py.
    receivers         Ranks that need the same box, and that hold (themselves, on their device and
                      on their host) the same parts of it, form one class. The box algebra runs
                      once per class, not once per rank.

    for every class of receivers:                        self, then device, then host, then network
        for every source box at that distance:           the one with the largest common part first
            take the part of it that is still missing
        the ranks that hold a box at that distance send it to its receivers in a round robin

    Over the network there are several round robins, each of some senders and some receivers, so
    that the number of peers of a rank does not grow with the number of ranks.

    Ranks of relaying hosts read each other's memory. The boxes that several places of such a host
    need over the network are cut into common boxes. Each crosses the network once, to one of the
    ranks that need it (host ingress); these ranks are chosen in a round robin as well.

Tensors of one class continue the same round robins, so that load stays balanced across tensors.
The choice depends only on a tensor's owners, the hosts, and its position in the model. The plan of
one rank therefore needs only the tensors that the rank holds or needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.tensor_classes import TensorClass
from hybrid_engine.records.holdings import (
    BoxOwners,
    TensorOwners,
    groups_of_columns,
    touching,
)
from hybrid_engine.records.regions import Region, subtract_all


@dataclass(frozen=True, slots=True)
class BoxSource:
    """A part of the box that a class of receivers needs, with the source that provides it.

    Attributes:
        region: the part.
        source: index of the source box.
        link: boundary between the receivers and the nearest ranks that hold the source box.
    """

    region: Region
    source: int
    link: Link


def nearest_first(
    by_link: Mapping[Link, Sequence[int]],
    common: Mapping[int, Region],
) -> Iterator[BoxSource]:
    """Yield the part that each source has of a box: nearest sources first, then largest parts.

    Args:
        by_link: indices of the sources at each distance, nearest link first.
        common: part of the box that each source has, by index.
    """
    for link, numbers in by_link.items():
        # The region itself breaks ties, so that every rank sorts alike.
        # The largest part first leaves the fewest pieces to the sources behind it.
        for number in sorted(numbers, key=lambda index: (-common[index].numel, common[index])):
            yield BoxSource(common[number], number, link)


def are_slices(needed: Region, parts: Collection[Region]) -> bool:
    """Return whether parts of `needed` tile it along a single dim, the usual way to shard."""
    whole = tuple(zip(needed.offsets, needed.lengths, strict=True))
    cut_dims = set()
    for part in parts:
        for dim, bounds in enumerate(zip(part.offsets, part.lengths, strict=True)):
            if bounds != whole[dim]:
                cut_dims.add(dim)
    # The sources cover `needed` (`tensor_classes` raises otherwise), so parts whose sizes add up to
    # it cannot overlap: with an overlap there would be a gap, too.
    return len(cut_dims) <= 1 and sum(part.numel for part in parts) == needed.numel


@dataclass(frozen=True, slots=True)
class CommonBox:
    """A box of one source that the same classes of receivers (by index) need."""

    region: Region
    source: int
    classes: tuple[int, ...]


def common_boxes(needed: Mapping[int, Sequence[BoxSource]]) -> list[CommonBox]:
    """Cut the parts that several classes of receivers need into disjoint boxes.

    Args:
        needed: parts by class of receivers. The parts of one class are disjoint.
    """
    boxes: list[CommonBox] = []
    for number, parts in needed.items():
        near = touching([box.region for box in boxes], [part.region for part in parts])
        # Pieces of each box so far: every part cuts the boxes it touches, and the rest is new.
        # Boxes stay disjoint throughout: a part is cut at the boxes so far, and only what lies
        # outside of all of them is new.
        pieces = [[box] for box in boxes]
        new: list[CommonBox] = []
        for part, touched in zip(parts, near, strict=True):
            others = [piece.region for index in touched for piece in pieces[index]]
            for region in subtract_all([part.region], others):
                new.append(CommonBox(region, part.source, (number,)))
            for index in touched:
                cut: list[CommonBox] = []
                for piece in pieces[index]:
                    cut += _cut(piece, part.region, number)
                pieces[index] = cut
        boxes = [piece for box_pieces in pieces for piece in box_pieces]
        boxes += new
    return boxes


def _cut(box: CommonBox, region: Region, number: int) -> Iterator[CommonBox]:
    """Yield the pieces of `box` outside `region`, then the one inside, shared with a class."""
    for outside in box.region.subtract(region):
        yield CommonBox(outside, box.source, box.classes)
    inside = box.region.intersect(region)
    if inside is not None:
        yield CommonBox(inside, box.source, (*box.classes, number))


class Hosts:
    """The host and the device of every rank.

    Attributes:
        numbers: host number of each rank, int array; hosts are numbered by their first rank.
        count: number of hosts.
        are_relaying: bool array by rank: ranks of its host read each other's relay buffers.
        devices: device number of each rank, numbered in the same way; empty if no two ranks
            share a device.
    """

    def __init__(
        self,
        names: Sequence[object],
        relaying: Collection[object] = (),
        devices: Sequence[object] = (),
    ) -> None:
        """Number hosts and devices.

        Args:
            names: host of every rank.
            relaying: hosts that use relay buffers.
            devices: device of every rank, unique within its host; default: none is shared.
        """
        self.numbers = _numbered(names)
        self.count = int(self.numbers.max(initial=-1)) + 1
        self.are_relaying = np.array([name in relaying for name in names], dtype=bool)
        on_hosts = list(zip(names, devices, strict=True)) if devices else []
        numbered = _numbered(on_hosts)
        is_shared = len(np.unique(numbered)) < len(numbered)
        self.devices = numbered if is_shared else numbered[:0]

    @property
    def num_ranks(self) -> int:
        return len(self.numbers)

    def on_devices(self, owners: TensorOwners) -> TensorOwners:
        """Return the owners with all ranks added that share a device with an owner."""
        if not len(self.devices):
            return owners
        shared = []
        for box in owners:
            has_box = np.isin(self.devices, self.devices[box.ranks])
            # Each rank once: a copy more of the box makes nothing less missing.
            shared.append(replace(box, ranks=np.flatnonzero(has_box)))
        return tuple(shared)


def _numbered(names: Sequence[object]) -> np.ndarray:
    number_of: dict[object, int] = {}
    numbers = [number_of.setdefault(name, len(number_of)) for name in names]
    return np.array(numbers, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Receivers:
    """Ranks that need the same box and get its parts over the same links.

    Attributes:
        destination: index of the box.
        ranks: sorted ranks, int array.
        copies: number of places of each rank that need the box, int array.
        parts: disjoint parts of the box. They cover it, except for the parts that a relaying
            host receives over the network (see `HostIngress`).
        positions: source index -> position of each rank in the round robin of the receivers from
            that source over the same link.
    """

    destination: int
    ranks: np.ndarray
    copies: np.ndarray
    parts: tuple[BoxSource, ...]
    positions: Mapping[int, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class HostIngress:
    """A box that each of some relaying hosts receives once over the network.

    Attributes:
        region: the box.
        source: index of the source box that contains it.
        readers: ranks that need it, int array [hosts, columns]. A rank that needs it for two
            destination boxes is in two columns.
        destinations: index of the destination box of each column.
        copies: number of places of a rank in each column that need it.
        positions: position of each host in the round robin of the receivers from the source over
            the network.
        number: ordinal among the boxes that these hosts receive.
    """

    region: Region
    source: int
    readers: np.ndarray
    destinations: tuple[int, ...]
    copies: tuple[int, ...]
    positions: np.ndarray
    number: int

    @property
    def is_relayed(self) -> bool:
        """True if several places read the box; the only place of a box receives it directly."""
        return sum(self.copies) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Bytes over one link, as int arrays of one length. No receiver appears twice."""

    link: Link
    senders: np.ndarray
    receivers: np.ndarray
    nbytes: np.ndarray


class _ByPlace:
    """Some ranks, sorted by place: a host or a device.

    Attributes:
        place_of: number of the place of every rank of the world.
        ranks: the ranks. `ranks[start[p] : start[p] + count[p]]` are on place p.
    """

    def __init__(self, ranks: np.ndarray, place_of: np.ndarray) -> None:
        places = place_of[ranks]
        self.place_of = place_of
        # Stable, so the ranks of each place stay sorted.
        self.ranks = ranks[np.argsort(places, kind="stable")]
        self.count = np.bincount(places, minlength=int(place_of.max()) + 1)
        # Counts [2, 0, 3] give starts [0, 2, 2].
        self.start = np.cumsum(self.count) - self.count

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Return the ranks of places that have equally many, int array [places, columns]."""
        columns = np.arange(self.count[places[0]])
        return self.ranks[self.start[places][:, None] + columns]


class _Source:
    """A source box and its holders.

    Attributes:
        region: the box.
        ranks: the holders, sorted.
        held: bool array by rank of the world.
        near: the holders by device (if ranks share devices) and by host.
        rounds: positions that the ranks of each place have taken so far in the round robin of the
            holders at that place.
    """

    def __init__(self, owners: BoxOwners, hosts: Hosts) -> None:
        self.region = owners.region
        self.ranks = np.unique(owners.ranks)
        self.held = np.zeros(hosts.num_ranks, dtype=bool)
        self.held[self.ranks] = True
        # Links in order of distance. There are no device numbers if no two ranks share a device.
        places = {Link.DEVICE: hosts.devices, Link.HOST: hosts.numbers}
        self.near = {
            link: _ByPlace(self.ranks, place_of)
            for link, place_of in places.items()
            if len(place_of)
        }
        self.rounds = {link: np.zeros_like(places.count) for link, places in self.near.items()}

    def reached(self, ranks: np.ndarray) -> dict[Link, np.ndarray]:
        """Return, nearest link first, whether each rank can get the box over it or a nearer one."""
        reached = {Link.SELF: self.held[ranks]}
        for link, places in self.near.items():
            num_holders = places.count[places.place_of[ranks]]
            # A holder is on its own device and host, so each row includes the rows of nearer links.
            reached[link] = num_holders > 0
        return reached


class Routes:
    """The choice of senders for the tensors of one class.

    A tensor is named by its index in the class.

    Attributes:
        tensors: the class. Training ranks hold all elements that inference ranks need.
        receivers: classes of receivers in a fixed order. Together they are all ranks and boxes of
            the destinations.
        ingress: boxes that relaying hosts receive over the network.
    """

    def __init__(self, tensors: TensorClass, hosts: Hosts) -> None:
        self.tensors = tensors
        self._hosts = hosts
        self._sources = [_Source(box, hosts) for box in tensors.sources]
        # Number of receivers of each source over the network. Each tensor advances the round robin
        # by this number.
        self._network_rounds = np.zeros(len(tensors.sources), dtype=np.int64)
        # Classes on relaying hosts, with the parts that these hosts receive over the network.
        self._from_network: list[tuple[Receivers, tuple[BoxSource, ...]]] = []
        self.receivers: list[Receivers] = []
        for index, near in enumerate(touching(tensors.sources, tensors.destinations)):
            self.receivers += self._classes(index, tensors.destinations[index], near)
        self.ingress = list(self._find_ingress())

    def senders(self, receivers: Receivers, part: BoxSource, index: int) -> np.ndarray:
        """Return the rank that sends `part` of one tensor to each of `receivers.ranks`."""
        if part.link is Link.SELF:
            return receivers.ranks
        positions = receivers.positions[part.source]
        if part.link is Link.NETWORK:
            return self._network_senders(part.source, positions, index)
        source = self._sources[part.source]
        near = source.near[part.link]
        place = near.place_of[receivers.ranks]
        # Every earlier tensor of the class has taken as many positions as this place has receivers.
        rounds = self.tensors.first + index * source.rounds[part.link][place]
        # 3 receivers and 2 holders on a host: the first tensor takes holders 0 1 0 and the second 1
        # 0 1, after which each holder has sent three times. `first` starts classes at different
        # holders.
        holder = (positions + rounds) % near.count[place]
        return near.ranks[near.start[place] + holder]

    def ingress_senders(self, ingress: HostIngress, index: int) -> np.ndarray:
        """Return the rank that sends a box of one tensor to each host."""
        return self._network_senders(ingress.source, ingress.positions, index)

    def relay_ranks(self, ingress: HostIngress, index: int) -> np.ndarray:
        """Return the rank of each host, one of its readers, that receives a box of one tensor."""
        # Consecutive boxes and consecutive tensors enter the host at different ranks, so that no
        # network interface takes them all.
        column = (ingress.number + self.tensors.first + index) % ingress.readers.shape[1]
        return ingress.readers[:, column]

    def ingress_of(
        self,
        ingress: HostIngress,
        index: int,
        rank: int | None,
    ) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """Yield ((sender, relay rank), readers by column) for each host.

        With `rank`, only for the hosts with a box that this rank sends or reads.
        """
        senders = self.ingress_senders(ingress, index)
        relay_ranks = self.relay_ranks(ingress, index)
        readers = ingress.readers
        if rank is not None:
            involved = (senders == rank) | (readers == rank).any(axis=1)
            senders = senders[involved]
            relay_ranks = relay_ranks[involved]
            readers = readers[involved]
        pairs = zip(senders.tolist(), relay_ranks.tolist(), strict=True)
        return zip(pairs, readers.tolist(), strict=True)

    def flows(self) -> Iterator[Flow]:
        """Yield all bytes of the class's tensors."""
        for receivers in self.receivers:
            for part in receivers.parts:
                # Each place of a rank receives the part separately.
                numel = part.region.numel * receivers.copies
                period = self._period(receivers, part)
                for index, itemsize in self._distinct(period):
                    senders = self.senders(receivers, part, index)
                    yield Flow(part.link, senders, receivers.ranks, numel * itemsize)
        for ingress in self.ingress:
            num_holders = len(self._sources[ingress.source].ranks)
            # The sender repeats after `num_holders` tensors, or a divisor of it, and the relay rank
            # after as many as there are columns.
            period = math.lcm(num_holders, ingress.readers.shape[1])
            for index, itemsize in self._distinct(period):
                yield from self._ingress_flows(ingress, index, ingress.region.numel * itemsize)

    def _distinct(self, period: int) -> Iterator[tuple[int, int]]:
        """Yield the first tensor with each choice of senders, and the bytes per element of all.

        Tensors that are a multiple of `period` apart have the same senders.
        """
        # With period 2 and item sizes [2, 2, 4], tensors 0 and 2 share senders: 6 bytes per element
        # at index 0, and 2 at index 1.
        itemsizes = self.tensors.itemsizes
        for index in range(min(period, len(itemsizes))):
            yield index, int(itemsizes[index::period].sum())

    def _ingress_flows(self, ingress: HostIngress, index: int, nbytes: int) -> Iterator[Flow]:
        relay_ranks = self.relay_ranks(ingress, index)
        once = np.full(len(relay_ranks), nbytes)
        yield Flow(Link.NETWORK, self.ingress_senders(ingress, index), relay_ranks, once)
        for column, copies in enumerate(ingress.copies):
            readers = ingress.readers[:, column]
            # A relay rank reads its own buffer, which crosses no link.
            others = readers != relay_ranks
            yield Flow(Link.HOST, relay_ranks[others], readers[others], once[others] * copies)

    def _period(self, receivers: Receivers, part: BoxSource) -> int:
        """Return a distance between tensors of the class after which senders repeat."""
        if part.link is Link.SELF:
            return 1
        # A common multiple of the lengths of all round robins that serve these receivers.
        source = self._sources[part.source]
        # The round robins of a source have equally many senders, a divisor of this number.
        if part.link is Link.NETWORK:
            return len(source.ranks)
        near = source.near[part.link]
        counts = np.unique(near.count[near.place_of[receivers.ranks]])
        return int(np.lcm.reduce(counts))

    def _network_senders(self, source: int, positions: np.ndarray, index: int) -> np.ndarray:
        """Return the rank that sends a source's box over the network to each position."""
        # Senders and receivers are divided into as many round robins as divides both evenly, so
        # that a rank meets few peers.
        ranks = self._sources[source].ranks
        # 4 senders (ranks 0 to 3) and 6 receivers: gcd 2, so 2 parts of 2 senders and 3 receivers.
        #     position         0  1  2  3  4  5
        #     part             0  1  0  1  0  1    part 0 has senders 0 and 1, part 1 has 2 and 3
        #     first tensor     0  2  1  3  0  2
        #     second tensor    1  3  0  2  1  3    continues at position 3, and 3 % 2 = 1
        # With one round robin, every receiver would in time meet all 4 senders.
        num_receivers = int(self._network_rounds[source])
        num_parts = math.gcd(num_receivers, len(ranks))
        receivers_per_part = num_receivers // num_parts
        senders_per_part = len(ranks) // num_parts
        # Neighbouring positions need boxes of one size. They go to different parts, so that every
        # part has some of every size.
        position, part = np.divmod(positions, num_parts)
        rounds = self.tensors.first + index * receivers_per_part
        sender = (position + rounds) % senders_per_part
        return ranks[part * senders_per_part + sender]

    def _classes(
        self,
        index: int,
        destination: BoxOwners,
        near: Sequence[int],
    ) -> Iterator[Receivers]:
        """Yield the classes of receivers of one box.

        The ranks of a class, their devices and their hosts hold the same of the box, and equally
        many places of each rank need it.

        Args:
            index: of the destination box.
            destination: the box and the ranks that need it.
            near: indices of the source boxes that share elements with it.
        """
        ranks, copies = np.unique(destination.ranks, return_counts=True)
        region = destination.region
        reached = {number: self._sources[number].reached(ranks) for number in near}
        common: dict[int, Region] = {}
        for number in near:
            part = region.intersect(self._sources[number].region)
            if part is not None:
                common[number] = part
        are_disjoint = are_slices(region, common.values())

        # Ranks with equal columns in these rows form a class.
        rows = [row for by_link in reached.values() for row in by_link.values()]
        rows.append(self._hosts.are_relaying[ranks])
        # A row per distinct number, true where a rank has that many copies.
        rows += [copies == number for number in np.unique(copies)]
        for members in groups_of_columns(rows, len(ranks)):
            first = members[0]
            by_link: dict[Link, list[int]] = {link: [] for link in Link}  # nearest first
            for number, rows_by_link in reached.items():
                # The nearest link whose row is true. A source that none of them reaches is remote.
                links = (link for link, row in rows_by_link.items() if row[first])
                by_link[next(links, Link.NETWORK)].append(number)
            in_order = nearest_first(by_link, common)
            parts = tuple(in_order if are_disjoint else self._cover(region, in_order))
            from_network: tuple[BoxSource, ...] = ()
            if self._hosts.are_relaying[ranks[first]]:
                # On a relaying host these parts are shared with other classes before they become
                # transfers.
                from_network = tuple(part for part in parts if part.link is Link.NETWORK)
                parts = tuple(part for part in parts if part.link is not Link.NETWORK)
            # A class enqueues once at each source, even for several parts of one source.
            remote = {part.source: part for part in parts if part.link is not Link.SELF}
            positions = {
                number: self._enqueue(part, ranks[members]) for number, part in remote.items()
            }
            receivers = Receivers(index, ranks[members], copies[members], parts, positions)
            if from_network:
                self._from_network.append((receivers, from_network))
            yield receivers

    def _find_ingress(self) -> Iterator[HostIngress]:
        """Yield the boxes that relaying hosts need over the network.

        They are computed once for all hosts with equally many receivers of each class.
        """
        if not self._from_network:
            return
        by_host = [
            _ByPlace(receivers.ranks, self._hosts.numbers) for receivers, _ in self._from_network
        ]
        # A column per host: the number of its ranks in each class of receivers. Hosts with equal
        # columns are of one kind: the same boxes go to the same positions among their ranks.
        num_receivers = [ranks.count for ranks in by_host]
        # [classes, hosts] -> distinct columns. Hosts that receive nothing have a column of zeros,
        # from which no box follows.
        kinds, kind_of = np.unique(num_receivers, axis=1, return_inverse=True)
        for kind, counts in enumerate(kinds.T):
            hosts = np.flatnonzero(kind_of.ravel() == kind)
            present = np.flatnonzero(counts).tolist()
            boxes = common_boxes({number: self._from_network[number][1] for number in present})
            # A host gets all boxes of one source from the same sender, so it takes one position.
            positions = {}
            for source in dict.fromkeys(box.source for box in boxes):
                positions[source] = self._network_rounds[source] + np.arange(len(hosts))
                self._network_rounds[source] += len(hosts)
            for number, box in enumerate(boxes):
                # The class of receivers of each column, and the ranks of each class.
                columns: list[Receivers] = []
                readers = []
                for index in box.classes:
                    columns += [self._from_network[index][0]] * int(counts[index])
                    readers.append(by_host[index].rows(hosts))
                yield HostIngress(
                    region=box.region,
                    source=box.source,
                    readers=np.concatenate(readers, axis=1),
                    destinations=tuple(receivers.destination for receivers in columns),
                    copies=tuple(int(receivers.copies[0]) for receivers in columns),
                    positions=positions[box.source],
                    number=number,
                )

    def _cover(self, needed: Region, in_order: Iterable[BoxSource]) -> Iterator[BoxSource]:
        """Cut `needed` into parts: each source in order provides its share of the missing boxes."""
        missing = [needed]
        for source in in_order:
            # The boxes in `missing` are disjoint, and so are the parts cut from them.
            region = self._sources[source.source].region
            for box in missing:
                part = box.intersect(region)
                if part is not None:
                    yield BoxSource(part, source.source, source.link)
            missing = subtract_all(missing, [region])
            if not missing:
                return

    def _enqueue(self, part: BoxSource, ranks: np.ndarray) -> np.ndarray:
        """Take the next positions of a source's round robin for `ranks`.

        There is one round robin over the network, and one for each host and device. Classes
        enqueue one after another, so the receivers of a source have consecutive positions and its
        holders get equal shares.
        """
        if part.link is Link.NETWORK:
            positions = self._network_rounds[part.source] + np.arange(len(ranks))
            self._network_rounds[part.source] += len(ranks)
            return positions
        source = self._sources[part.source]
        place = source.near[part.link].place_of[ranks]
        rounds = source.rounds[part.link]
        # Place 0 has taken 3 positions so far: ranks at places 0, 1, 0 take positions 3, 0, 4.
        positions = rounds[place] + _position_in_place(place)
        rounds += np.bincount(place, minlength=len(rounds))
        return positions


def _position_in_place(place: np.ndarray) -> np.ndarray:
    """Count the earlier entries equal to each entry: [5, 7, 5, 5, 7] -> [0, 0, 1, 2, 1]."""
    # A stable sort makes equal entries neighbours and keeps their order.
    order = np.argsort(place, kind="stable")
    in_order = place[order]
    is_start = np.r_[True, in_order[1:] != in_order[:-1]]
    starts = np.flatnonzero(is_start)  # start of each run of equal entries
    lengths = np.diff(np.r_[starts, len(place)])
    positions = np.empty(len(place), dtype=np.int64)
    # Number each run from its start; indexing with `order` puts the numbers back in input order.
    positions[order] = np.arange(len(place)) - np.repeat(starts, lengths)
    return positions
