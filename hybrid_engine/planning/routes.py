"""Which rank sends what of a tensor to which other, for all ranks that need it at once.

    tensor classes    tensors with the same owners on both sides are routed once for all of them: a model of 46,000
                      tensors is some hundred classes
    receivers         that need the same box, hold the same parts of it and whose hosts hold the same parts of it are
                      one class: the box algebra runs once per class, whatever the number of ranks

    for every class of receivers:                     self, then same device, then same host, then network
        for every source box that is held there:      the one with the largest common part first
            take what it has of the part that is still missing
        the ranks that hold a box equally near send it in a round robin of its receivers; over the network in
        several, each of some senders and some receivers, so that a rank does not meet more of them where there are more

    on relaying hosts, whose ranks read each other's memory: what several places of a host need over the network is cut
    into common boxes; each comes once, to one of the ranks that need it (host ingress), these too in a round robin

Tensors with the same owners continue the same round robin, so load stays balanced across tensors. The choice depends on
nothing but a tensor's owners, the hosts, and its place in the model: one rank's plan needs only the tensors it touches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.plan import Link, wire_dtype
from hybrid_engine.records.holdings import BoxOwners, Holdings, TensorOwners, groups_of_columns, touching
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.records.regions import Region, subtract_all


@dataclass(frozen=True, eq=False)
class TensorClass:
    """Tensors with the same owners on both sides.

    Attributes:
        sources, destinations: the owners in training and in inference.
        tensors: names, in the plan's order.
        first: the first one's ordinal in the plan.
        itemsizes: bytes per element on the wire, for each tensor; int array.
    """

    sources: TensorOwners
    destinations: TensorOwners
    tensors: tuple[str, ...]
    first: int
    itemsizes: np.ndarray


def tensor_classes(source: Holdings, destination: Holdings) -> list[TensorClass]:
    """The tensors that are moved, in classes. Raises PlanError with everything that `holding_faults` finds."""
    classes = _classes(source, destination)
    if faults := [*_shape_faults(source, destination), *_unserved_faults(classes)]:
        raise PlanError(faults)
    return classes


def holding_faults(source: Holdings, destination: Holdings) -> list[str]:
    """Tensors of two shapes, and boxes that some rank needs and no rank holds."""
    return [*_shape_faults(source, destination), *_unserved_faults(_classes(source, destination))]


def _classes(source: Holdings, destination: Holdings) -> list[TensorClass]:
    """The classes of tensors that have one shape; what no training rank holds has no sources."""
    names: dict[tuple[int, int], list[str]] = {}
    first: dict[tuple[int, int], int] = {}
    for ordinal, (name, destinations) in enumerate(destination.owners.items()):
        sources = source.owners.get(name, ())
        if not sources or source.shapes[name] == destination.shapes[name]:
            key = id(sources), id(destinations)
            first.setdefault(key, ordinal)
            names.setdefault(key, []).append(name)
    return [
        TensorClass(
            source.owners.get(members[0], ()),
            destination.owners[members[0]],
            tuple(members),
            first[key],
            np.array([_itemsize(name, source, destination) for name in members], dtype=np.int64),
        )
        for key, members in names.items()
    ]


def _itemsize(name: str, source: Holdings, destination: Holdings) -> int:
    """Bytes per element on the wire; of a tensor that no training rank holds, those of its destination."""
    dtype = destination.dtypes[name]
    return _wire_itemsize(source.dtypes.get(name, dtype), dtype)


@functools.cache
def _wire_itemsize(source: str, destination: str) -> int:
    return DTYPE_NBYTES[wire_dtype(source, destination)]


def _shape_faults(source: Holdings, destination: Holdings) -> list[str]:
    return [
        f"{name}: shape {source.shapes[name]} in training, {shape} in inference"
        for name, shape in destination.shapes.items()
        if source.shapes.get(name, shape) != shape
    ]


def _unserved_faults(classes: Iterable[TensorClass]) -> Iterator[str]:
    """Elements that no source holds, tensor by tensor."""
    known: dict[object, list[tuple[int, Region]]] = {}  # experts: on other ranks, but cut in the same way
    for each in classes:
        boxes = tuple(tuple((box.offsets, box.lengths) for box in side) for side in (each.sources, each.destinations))
        if boxes not in known:
            known[boxes] = list(_unserved(each.sources, each.destinations))
        for name in each.tensors if known[boxes] else ():
            for index, region in known[boxes]:
                yield _unserved_fault(name, each.destinations[index].ranks, region)


def _unserved(sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners]) -> Iterator[tuple[int, Region]]:
    """(index into `destinations`, part of that box that no source holds)."""
    for index, near in enumerate(touching(sources, destinations)):
        for region in subtract_all([destinations[index].region], [sources[number].region for number in near]):
            yield index, region


def _unserved_fault(tensor: str, ranks: np.ndarray, region: Region) -> str:
    first, *others = np.unique(ranks).tolist()
    needing = f"rank {first}" + (f" and {len(others)} other{'s' if len(others) > 1 else ''}" if others else "")
    box = f"[{region.offsets}, {region.ends})"
    return f"{tensor}: elements {box} are needed by {needing}, but no training rank holds them"


@dataclass(frozen=True, slots=True)
class BoxSource:
    """A part of the box that a class of receivers needs, and the source box (by index) it comes out of."""

    region: Region
    source: int
    link: Link


def nearest_first(by_link: Mapping[Link, Sequence[int]], common: Mapping[int, Region]) -> Iterator[BoxSource]:
    """Parts that each source has of a box, nearest first and of these the largest."""
    for link, numbers in by_link.items():
        for number in sorted(numbers, key=lambda number: (-common[number].numel, common[number])):
            yield BoxSource(common[number], number, link)


def are_slices(needed: Region, parts: Collection[Region]) -> bool:
    """Whether boxes that cover another one lie in it side by side, along one dim: as ranks shard a tensor."""
    whole = tuple(zip(needed.offsets, needed.lengths, strict=True))
    cut = {
        dim
        for part in parts
        for dim, bounds in enumerate(zip(part.offsets, part.lengths, strict=True))
        if bounds != whole[dim]
    }
    return len(cut) <= 1 and sum(part.numel for part in parts) == needed.numel


@dataclass(frozen=True, slots=True)
class CommonBox:
    """A box that the same classes of receivers (by index) need."""

    region: Region
    source: int
    classes: tuple[int, ...]


def common_boxes(needed: Mapping[int, Sequence[BoxSource]]) -> list[CommonBox]:
    """Cut what some classes of receivers need into disjoint boxes; `needed` is by class, the parts of one disjoint."""
    boxes: list[CommonBox] = []
    for number, parts in needed.items():
        near = touching([box.region for box in boxes], [part.region for part in parts])
        pieces = [[box] for box in boxes]
        new: list[CommonBox] = []
        for part, touched in zip(parts, near, strict=True):
            others = [piece.region for index in touched for piece in pieces[index]]
            new += (CommonBox(region, part.source, (number,)) for region in subtract_all([part.region], others))
            for index in touched:
                pieces[index] = [cut for piece in pieces[index] for cut in _cut(piece, part.region, number)]
        boxes = [piece for each in pieces for piece in each] + new
    return boxes


def _cut(box: CommonBox, region: Region, number: int) -> Iterator[CommonBox]:
    """The parts outside `region`, then the one inside, which class `number` needs too."""
    for outside in box.region.subtract(region):
        yield CommonBox(outside, box.source, box.classes)
    if (inside := box.region.intersect(region)) is not None:
        yield CommonBox(inside, box.source, (*box.classes, number))


class Hosts:
    """Where ranks are.

    Attributes:
        numbers: int array by rank; hosts are counted from 0 in order of their first rank.
        count: number of hosts.
        are_relaying: bool array by rank; its host's ranks read each other's relay buffers.
        devices: numbers of devices by rank, counted likewise; none where no two ranks share one.
    """

    def __init__(
        self, names: Sequence[object], relaying: Collection[object] = (), devices: Sequence[object] = ()
    ) -> None:
        """`names`, `devices`: by rank; default: each has a device of its own. `relaying`: names of hosts."""
        self.numbers = _numbered(names)
        self.count = int(self.numbers.max(initial=-1)) + 1
        self.are_relaying = np.array([name in relaying for name in names], dtype=bool)
        of_hosts = _numbered([*zip(names, devices, strict=True)] if devices else [])
        self.devices = of_hosts if len(np.unique(of_hosts)) < len(of_hosts) else of_hosts[:0]

    @property
    def num_ranks(self) -> int:
        return len(self.numbers)

    def on_devices(self, owners: TensorOwners) -> TensorOwners:
        """Who has each box on its device."""
        if not len(self.devices):
            return owners
        return tuple(
            replace(box, ranks=np.flatnonzero(np.isin(self.devices, self.devices[box.ranks]))) for box in owners
        )


def _numbered(names: Sequence[object]) -> np.ndarray:
    number_of: dict[object, int] = {}
    return np.array([number_of.setdefault(name, len(number_of)) for name in names], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Receivers:
    """Ranks that need the same box and get its parts over the same links.

    Attributes:
        destination: index of the box they need.
        ranks: sorted.
        copies: how many places of each rank need it.
        parts: disjoint boxes that together are the box, but for what comes to a relaying host over the network.
        positions: source index -> each rank's position in the round robin of those that receive from that source over
            the same link.
    """

    destination: int
    ranks: np.ndarray
    copies: np.ndarray
    parts: tuple[BoxSource, ...]
    positions: Mapping[int, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class HostIngress:
    """A box that comes to some hosts over the network, once to each of them.

    Attributes:
        region: the box.
        source: index of the source box it comes out of.
        readers: int array [hosts, columns]: ranks that need it; a rank that needs it for two boxes is in two columns.
        destinations: the box for which each column needs it.
        copies: how many places of a rank of each column need it.
        positions: of each host in the round robin of those that receive from the source over the network.
        number: position among what comes to these hosts.
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
        """Several places read it; otherwise it goes straight to the only one."""
        return sum(self.copies) > 1


@dataclass(frozen=True, slots=True)
class RoundRobinOffset:
    """Where a tensor begins in the round robins of its class: the ordinal of the class's first tensor in the plan, and
    how many tensors of the class come before this one."""

    first: int
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Bytes over one link, each from a sender to a receiver; int arrays of one length. No receiver is in it twice."""

    link: Link
    senders: np.ndarray
    receivers: np.ndarray
    nbytes: np.ndarray


class _ByPlace:
    """Some ranks, sorted by the host or device on which they are.

    Attributes:
        ranks: those of place p are `count[p]` from `start[p]` on.
        place_of: number of the place, by rank of the world.
    """

    def __init__(self, ranks: np.ndarray, place_of: np.ndarray) -> None:
        places = place_of[ranks]
        self.place_of = place_of
        self.ranks = ranks[np.argsort(places, kind="stable")]
        self.count = np.bincount(places, minlength=int(place_of.max()) + 1)
        self.start = np.cumsum(self.count) - self.count

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Ranks [places, columns] of places that have equally many."""
        return self.ranks[self.start[places][:, None] + np.arange(self.count[places[0]])]


class _Source:
    """One source box and its holders.

    Attributes:
        near: the holders by device and by host.
        rounds: how many ranks of each place have taken a position in the round robin of its holders.
    """

    def __init__(self, owners: BoxOwners, hosts: Hosts) -> None:
        self.region = owners.region
        self.ranks = np.unique(owners.ranks)
        self.held = np.zeros(hosts.num_ranks, dtype=bool)
        self.held[self.ranks] = True
        places = {Link.DEVICE: hosts.devices, Link.HOST: hosts.numbers}
        self.near = {link: _ByPlace(self.ranks, place_of) for link, place_of in places.items() if len(place_of)}
        self.rounds = {link: np.zeros_like(places.count) for link, places in self.near.items()}

    def links(self, ranks: np.ndarray) -> Iterator[tuple[Link, np.ndarray]]:
        """Whether this box comes to each of these ranks by a link, or a nearer one; nearest first."""
        yield Link.SELF, self.held[ranks]
        for link, places in self.near.items():
            yield link, places.count[places.place_of[ranks]] > 0


class Routes:
    """The choice of senders for the tensors of one class.

    Args:
        sources: what training ranks hold. destinations: what inference ranks need; all of it is held by some rank.
        hosts: of all ranks.

    Attributes:
        receivers: their classes, in a fixed order; together they are all ranks and boxes of `destinations`.
        ingress: what comes to relaying hosts over the network.
    """

    def __init__(self, sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners], hosts: Hosts) -> None:
        self._hosts = hosts
        self._sources = [_Source(box, hosts) for box in sources]
        # How many receive from each source over the network: as far as a tensor advances the round robin.
        self._network_rounds = np.zeros(len(sources), dtype=np.int64)
        self._from_network: list[tuple[Receivers, tuple[BoxSource, ...]]] = []  # of relaying hosts
        near = touching(sources, destinations)
        self.receivers = [
            receivers
            for index, destination in enumerate(destinations)
            for receivers in self._classes(index, destination, near[index])
        ]
        self.ingress = list(self._find_ingress())

    def senders(self, receivers: Receivers, part: BoxSource, offset: RoundRobinOffset) -> np.ndarray:
        """The rank that sends `part` of one tensor to each of `receivers.ranks`."""
        if part.link is Link.SELF:
            return receivers.ranks
        if part.link is Link.NETWORK:
            return self._network_senders(part.source, receivers.positions[part.source], offset)
        source = self._sources[part.source]
        near = source.near[part.link]
        place = near.place_of[receivers.ranks]
        rounds = offset.first + offset.index * source.rounds[part.link][place]
        return near.ranks[near.start[place] + (receivers.positions[part.source] + rounds) % near.count[place]]

    def ingress_senders(self, ingress: HostIngress, offset: RoundRobinOffset) -> np.ndarray:
        """The rank that sends a box of one tensor to each host."""
        return self._network_senders(ingress.source, ingress.positions, offset)

    def relay_ranks(self, ingress: HostIngress, offset: RoundRobinOffset) -> np.ndarray:
        """The rank of each host to which a box of one tensor comes; one of its readers."""
        return ingress.readers[:, (ingress.number + offset.first + offset.index) % ingress.readers.shape[1]]

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

    def flows(self, first: int, itemsizes: np.ndarray) -> Iterator[Flow]:
        """All bytes of the class's tensors.

        Args:
            first: ordinal of the class's first tensor in the plan.
            itemsizes: bytes per element of each tensor.
        """
        for receivers in self.receivers:
            for part in receivers.parts:
                numel = part.region.numel * receivers.copies
                period = 1 if part.link is Link.SELF else self._period(receivers, part)
                for offset, itemsize in _distinct_offsets(first, itemsizes, period):
                    senders = self.senders(receivers, part, offset)
                    yield Flow(part.link, senders, receivers.ranks, numel * itemsize)
        for ingress in self.ingress:
            period = int(np.lcm(len(self._sources[ingress.source].ranks), ingress.readers.shape[1]))
            for offset, itemsize in _distinct_offsets(first, itemsizes, period):
                yield from self._flows_of_ingress(ingress, offset, ingress.region.numel * itemsize)

    def _flows_of_ingress(self, ingress: HostIngress, offset: RoundRobinOffset, nbytes: int) -> Iterator[Flow]:
        relay_ranks = self.relay_ranks(ingress, offset)
        once = np.full(len(relay_ranks), nbytes)
        yield Flow(Link.NETWORK, self.ingress_senders(ingress, offset), relay_ranks, once)
        for column, copies in enumerate(ingress.copies):
            readers = ingress.readers[:, column]
            others = readers != relay_ranks
            yield Flow(Link.HOST, relay_ranks[others], readers[others], once[others] * copies)

    def _period(self, receivers: Receivers, part: BoxSource) -> int:
        """Tensors this far apart in a class have the same senders: a multiple of the holders in every round robin."""
        source = self._sources[part.source]
        near = source.near.get(part.link)
        counts = len(source.ranks) if near is None else near.count[near.place_of[receivers.ranks]]
        return int(np.lcm.reduce(np.unique(counts)))

    def _network_senders(self, source: int, positions: np.ndarray, offset: RoundRobinOffset) -> np.ndarray:
        """In as many round robins as divide senders and receivers evenly, so that each meets few of the others."""
        ranks, num_receivers = self._sources[source].ranks, int(self._network_rounds[source])
        num_parts = math.gcd(num_receivers, len(ranks))
        of_part, senders = num_receivers // num_parts, len(ranks) // num_parts
        # neighbours need boxes of one size: they are in different parts, each of which has some of every size
        position, part = np.divmod(positions, num_parts)
        return ranks[part * senders + (position + offset.first + offset.index * of_part) % senders]

    def _classes(self, index: int, destination: BoxOwners, near: Sequence[int]) -> Iterator[Receivers]:
        """The receivers of one box, by what they and their hosts hold of it and by how many places need it."""
        ranks, copies = np.unique(destination.ranks, return_counts=True)
        links = [dict(self._sources[number].links(ranks)) for number in near]
        kinds = [self._hosts.are_relaying[ranks], *(copies == number for number in np.unique(copies))]
        region = destination.region
        common = {number: part for number in near if (part := region.intersect(self._sources[number].region))}
        are_disjoint = are_slices(region, common.values())
        for members in groups_of_columns([*(row for each in links for row in each.values()), *kinds], len(ranks)):
            first = members[0]
            by_link: dict[Link, list[int]] = {link: [] for link in Link}  # nearest first
            for number, reach in zip(near, links, strict=True):
                by_link[next((link for link, reached in reach.items() if reached[first]), Link.NETWORK)].append(number)
            in_order = nearest_first(by_link, common)
            parts = tuple(in_order if are_disjoint else self._cover(region, in_order))
            from_network: tuple[BoxSource, ...] = ()
            if self._hosts.are_relaying[ranks[first]]:
                from_network = tuple(part for part in parts if part.link is Link.NETWORK)
                parts = tuple(part for part in parts if part.link is not Link.NETWORK)
            asked = {part.source: part for part in parts if part.link is not Link.SELF}
            positions = {number: self._enqueue(part, ranks[members]) for number, part in asked.items()}
            receivers = Receivers(index, ranks[members], copies[members], parts, positions)
            if from_network:
                self._from_network.append((receivers, from_network))
            yield receivers

    def _find_ingress(self) -> Iterator[HostIngress]:
        """Boxes that relaying hosts need over the network, found once for hosts with equally many equal receivers."""
        if not self._from_network:
            return
        by_host = [_ByPlace(receivers.ranks, self._hosts.numbers) for receivers, _ in self._from_network]
        # A column for each host: how many of its ranks are in each class of receivers. Hosts of equal columns are of
        # one kind: the same boxes come to them, to ranks at the same positions.
        kinds, kind_of = np.unique([ranks.count for ranks in by_host], axis=1, return_inverse=True)
        for kind, counts in enumerate(kinds.T):
            hosts = np.flatnonzero(kind_of.ravel() == kind)
            present = np.flatnonzero(counts).tolist()
            boxes = common_boxes({number: self._from_network[number][1] for number in present})
            # All boxes that a host takes from one source come from the same sender: one position for each host.
            positions = {box.source: self._network_rounds[box.source] + np.arange(len(hosts)) for box in boxes}
            for source in positions:
                self._network_rounds[source] += len(hosts)
            for number, box in enumerate(boxes):
                columns = [self._from_network[each][0] for each in box.classes for _ in range(counts[each])]
                yield HostIngress(
                    box.region,
                    box.source,
                    np.concatenate([by_host[each].rows(hosts) for each in box.classes], axis=1),
                    tuple(receivers.destination for receivers in columns),
                    tuple(int(receivers.copies[0]) for receivers in columns),
                    positions[box.source],
                    number,
                )

    def _cover(self, needed: Region, in_order: Iterable[BoxSource]) -> Iterator[BoxSource]:
        """Cut `needed` into parts: sources in order, each as much as it has of what is still missing."""
        missing = [needed]
        for source in in_order:
            region = self._sources[source.source].region
            for part in (part for each in missing if (part := each.intersect(region)) is not None):
                yield BoxSource(part, source.source, source.link)
            missing = subtract_all(missing, [region])
            if not missing:
                return

    def _enqueue(self, part: BoxSource, ranks: np.ndarray) -> np.ndarray:
        """The next positions of these ranks in a source's round robin: one over the network, one per host and device.

        Classes enqueue one after another, so the receivers of a source have consecutive positions and its holders equal
        shares.
        """
        if part.link is Link.NETWORK:
            positions = self._network_rounds[part.source] + np.arange(len(ranks))
            self._network_rounds[part.source] += len(ranks)
            return positions
        source = self._sources[part.source]
        place, rounds = source.near[part.link].place_of[ranks], source.rounds[part.link]
        positions = rounds[place] + _position_in_place(place)
        rounds += np.bincount(place, minlength=len(rounds))
        return positions


def _distinct_offsets(first: int, itemsizes: np.ndarray, period: int) -> Iterator[tuple[RoundRobinOffset, int]]:
    """Tensors of a class a multiple of `period` apart have the same senders: one offset for them, bytes per element of
    all of them together."""
    for index in range(min(period, len(itemsizes))):
        yield RoundRobinOffset(first, index), int(itemsizes[index::period].sum())


def _position_in_place(place: np.ndarray) -> np.ndarray:
    """How many earlier entries are equal to each entry: [5, 7, 5, 5, 7] -> [0, 0, 1, 2, 1]."""
    order = np.argsort(place, kind="stable")  # equal entries are neighbours now, in the order in which they came
    in_order = place[order]
    starts = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])  # where each run of equal entries begins
    lengths = np.diff(np.r_[starts, len(place)])
    positions = np.empty(len(place), dtype=np.int64)
    # A run's entries are numbered from its start; `positions[order]` takes the numbers back to where entries came from.
    positions[order] = np.arange(len(place)) - np.repeat(starts, lengths)
    return positions
