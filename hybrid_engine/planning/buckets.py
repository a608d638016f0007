"""Cutting a plan into buckets, in an order in which no rank holds much more than the larger of its two layouts.

    tensors -> clusters                 those that share a destination group, directly or through others
    clusters -> order                   every rank frees about as much as it fills
    order -> buckets                    closed as soon as some rank fills or frees `bucket_nbytes`

Tensors that no training step changes can have buckets of their own, so that later switches need not run these.

When a bucket has been sent, its training bytes can go. In the model's own order a rank of the last pipeline stage would
fill the slices of all stages before anything of its own is freed; so clusters of stages alternate here.

What follows from the buckets of a plan: `release_schedule`, the parts of a rank's training buffers that nobody reads
any more after each, and `Residency`, the buckets whose weights stay on the inference side while the devices train.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid_engine.planning.plan import Bucket
from hybrid_engine.records.layout import Extent, Shard
from hybrid_engine.records.sides import Side


@dataclass(frozen=True, slots=True, eq=False)
class BytesByRank:
    """Bytes on some ranks: int arrays of one length; a rank that is named twice has the sum."""

    ranks: np.ndarray
    nbytes: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """Bytes that one tensor takes at its destinations and gives back at its sources.

    Attributes:
        groups: the destination groups (`Buffer.group`) it is part of.
        fills: destination bytes.
        frees: source bytes.
    """

    groups: tuple[str, ...]
    fills: BytesByRank
    frees: BytesByRank


@dataclass(frozen=True, slots=True)
class Outline:
    """A bucket without its transfers: its tensors, the groups it completes, the most bytes a rank fills or frees."""

    tensors: tuple[str, ...]
    groups: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Cluster:
    """Tensors that must stay in one bucket; bytes filled and freed, one number per rank."""

    tensors: tuple[str, ...]
    fills: np.ndarray
    frees: np.ndarray


@dataclass(slots=True, eq=False)
class _Open:
    """A bucket that is not full yet; `moved`: bytes filled and freed, [2, ranks]."""

    moved: np.ndarray
    tensors: list[str] = field(default_factory=list)

    def add(self, cluster: _Cluster) -> None:
        self.tensors.extend(cluster.tensors)
        self.moved += np.stack([cluster.fills, cluster.frees])

    def outline(self, needs: Mapping[str, Need]) -> Outline:
        groups = dict.fromkeys(group for tensor in self.tensors for group in needs[tensor].groups)
        return Outline(tuple(self.tensors), tuple(groups), int(self.moved.max()))


def outline_buckets(
    needs: Mapping[str, Need], num_ranks: int, bucket_nbytes: int, frozen: Collection[str] = ()
) -> list[Outline]:
    """The buckets of all ranks; `needs` is in the model's order, which is kept among tensors on the same ranks.

    Clusters of tensors that are all in `frozen` do not share a bucket with others.
    """
    outlines: list[Outline] = []
    frozen = frozenset(frozen)
    filling: dict[bool, _Open] = {}
    for cluster in _alternating(_clusters(needs, num_ranks)):
        is_frozen = frozen.issuperset(cluster.tensors)
        bucket = filling.setdefault(is_frozen, _Open(np.zeros((2, num_ranks), dtype=np.int64)))
        bucket.add(cluster)
        if bucket.moved.max() >= bucket_nbytes:
            outlines.append(filling.pop(is_frozen).outline(needs))
    return [*outlines, *(bucket.outline(needs) for bucket in filling.values())]


def _alternating(clusters: Sequence[_Cluster]) -> Iterator[_Cluster]:
    """Next always the cluster that leaves the fullest rank least full, of those that come first on their ranks.

    A rank is as full as what it holds exceeds the larger of its two layouts.
    """
    # A queue for each set of ranks filled and freed: clusters of one stage are in one, in the model's order, so only
    # the first of each has to be looked at.
    queues: dict[bytes, deque[int]] = {}
    for index, cluster in enumerate(clusters):
        queues.setdefault((cluster.fills > 0).tobytes() + (cluster.frees > 0).tobytes(), deque()).append(index)
    if len(queues) == 1:
        yield from clusters
        return
    gains = [cluster.fills - cluster.frees for cluster in clusters]
    trained, served = (sum(getattr(cluster, side) for cluster in clusters) for side in ("frees", "fills"))
    excess = trained - np.maximum(trained, served)
    while queues:
        heads = sorted((queue[0], key) for key, queue in queues.items())
        # [head, rank]: how full each rank would be; first the fullest rank counts, then what all have too much.
        after = excess + np.stack([gains[index] for index, _ in heads])
        fullest, fullness = after.max(axis=1), np.maximum(after, 0).sum(axis=1)
        best = int(np.lexsort((fullness, fullest))[0])
        index, key = heads[best]
        excess = after[best]
        queues[key].popleft()
        if not queues[key]:
            del queues[key]
        yield clusters[index]


def _clusters(needs: Mapping[str, Need], num_ranks: int) -> list[_Cluster]:
    """Tensors that share groups, directly or through others, in order of the first."""
    # Union-find: an earlier tensor of the same cluster; the first points to itself, and paths are halved on the way.
    joined_to = list(range(len(needs)))  # by ordinal of the tensor
    first_of_group: dict[str, int] = {}

    def first(ordinal: int) -> int:
        while joined_to[ordinal] != ordinal:
            joined_to[ordinal] = joined_to[joined_to[ordinal]]
            ordinal = joined_to[ordinal]
        return ordinal

    for ordinal, need in enumerate(needs.values()):
        for group in need.groups:
            ends = first(ordinal), first(first_of_group.setdefault(group, ordinal))
            joined_to[max(ends)] = min(ends)
    members: dict[int, list[str]] = {}
    for ordinal, tensor in enumerate(needs):
        members.setdefault(first(ordinal), []).append(tensor)
    return [
        _Cluster(
            tuple(tensors),
            _summed([needs[tensor].fills for tensor in tensors], num_ranks),
            _summed([needs[tensor].frees for tensor in tensors], num_ranks),
        )
        for tensors in members.values()
    ]


def _summed(parts: Sequence[BytesByRank], num_ranks: int) -> np.ndarray:
    """Bytes of all parts, one number per rank."""
    total = np.zeros(num_ranks, dtype=np.int64)
    times = Counter(map(id, parts))  # the experts of a layer are few objects, many times
    for part in {id(part): part for part in parts}.values():
        np.add.at(total, part.ranks, part.nbytes * times[id(part)])
    return total


Releases = Mapping[str, tuple[Extent, ...]]
"""Buffer name -> intervals, in elements; in order, none touching another."""


def release_schedule(shards: Iterable[Shard], steps: Sequence[Collection[str]]) -> tuple[Releases, ...]:
    """For every step what can go once all ranks are through with it and those before it.

    Args:
        shards: the training records of one rank.
        steps: the canonical tensors of each, the same on all ranks.

    An interval that records of several steps share goes with the last of them; what holds a tensor of no step (nobody
    reads it) is not among them.
    """
    number_of = {tensor: number for number, tensors in enumerate(steps) for tensor in tensors}
    never = len(steps)
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for shard in shards:
        extent, number = shard.place.extent(shard.region.lengths), number_of.get(shard.region.tensor, never)
        spans.setdefault(shard.place.buffer.name, []).append((extent.start, extent.stop, number))
    found: list[dict[str, list[Extent]]] = [{} for _ in range(never + 1)]
    for name, own in spans.items():
        for start, stop, number in _disjoint(own):
            extents = found[number].setdefault(name, [])
            if extents and extents[-1].stop == start:
                start = extents.pop().start
            extents.append(Extent(start, stop))
    return tuple({name: tuple(extents) for name, extents in one.items()} for one in found[:never])


def _disjoint(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans (start, stop, step) in order; those that overlap are one, with the last step of them."""
    joined: list[tuple[int, int, int]] = []
    for start, stop, number in sorted(spans):
        if joined and start < joined[-1][1]:
            first, last, other = joined.pop()
            joined.append((first, max(stop, last), max(number, other)))
        else:
            joined.append((start, stop, number))
    return joined


@dataclass(frozen=True, eq=False)
class Residency:
    """Bytes of the buckets' weights where they stay, and how many may.

    Attributes:
        nbytes: of the groups of each bucket on ranks of each kind: int array [buckets, kinds].
        kind: number of this rank's.
        limit: bytes on a rank; None: no limit.
    """

    nbytes: np.ndarray
    kind: int
    limit: int | None = None

    @classmethod
    def of(cls, buckets: Sequence[Bucket], destination: Side, rank: int, limit: int | None) -> Residency:
        """Count the plan's buckets by what all ranks hold for inference; `rank`: this one."""
        bucket_of = {group: bucket.index for bucket in buckets for group in bucket.groups}
        nbytes = np.zeros((len(buckets), len(destination.kinds)), dtype=np.int64)
        for kind, layout in enumerate(destination.kinds):
            for buffer in layout.buffers.values():
                nbytes[bucket_of[buffer.group], kind] += buffer.nbytes
        return cls(nbytes, int(destination.kind_of[rank]), limit)

    def kept(self, preferred: Iterable[int]) -> frozenset[int]:
        """The buckets that stay: in this order, each that still fits on every rank.

        On all ranks or on none: a bucket that is missing anywhere has to be sent in any case.
        """
        kept: list[int] = []
        taken = np.zeros(self.nbytes.shape[1], dtype=np.int64)
        for index in preferred:
            if self.limit is None or (taken + self.nbytes[index]).max(initial=0) <= self.limit:
                taken += self.nbytes[index]
                kept.append(index)
        return frozenset(kept)

    def nbytes_of(self, buckets: Collection[int]) -> int:
        """Bytes of these buckets on this rank."""
        return int(self.nbytes[sorted(buckets), self.kind].sum())


def frozen_everywhere(ranks: Iterable[tuple[Collection[str], Collection[str]]]) -> frozenset[str]:
    """Tensors that no rank trains; of each, what it holds, and what of that it does not train."""
    held: set[str] = set()
    trained: set[str] = set()
    for own, untrained in ranks:
        held.update(own)
        trained.update(set(own).difference(untrained))
    return frozenset(held - trained)
