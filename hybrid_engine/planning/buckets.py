"""Cutting a plan into buckets, in an order in which no rank holds much more than the larger of its two layouts.

    tensors -> clusters                 those that share a destination group, directly or through others
    clusters -> order                   every rank frees about as much as it fills
    order -> buckets                    closed as soon as some rank fills or frees `bucket_nbytes`

Tensors that no training step changes can have buckets of their own, so that later switches need not run these.

When a bucket has been sent, its training bytes can go. In the model's own order a rank of the last pipeline stage would
fill the slices of all stages before anything of its own is freed; so clusters of stages alternate here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class BytesByRank:
    """Bytes on some ranks: int arrays of one length; a rank that is named twice has the sum."""

    ranks: np.ndarray
    nbytes: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """What one tensor takes at its destinations, and what it gives back at its sources.

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
    needs: Mapping[str, Need], num_ranks: int, bucket_nbytes: int, apart: Collection[str] = ()
) -> list[Outline]:
    """The buckets of all ranks; `needs` is in the model's order, which is kept among tensors on the same ranks.

    Clusters of tensors that are all in `apart` do not share a bucket with others.
    """
    outlines: list[Outline] = []
    apart = frozenset(apart)
    filling: dict[bool, _Open] = {}
    for cluster in _alternating(_clusters(needs, num_ranks)):
        is_apart = apart.issuperset(cluster.tensors)
        bucket = filling.setdefault(is_apart, _Open(np.zeros((2, num_ranks), dtype=np.int64)))
        bucket.add(cluster)
        if bucket.moved.max() >= bucket_nbytes:
            outlines.append(filling.pop(is_apart).outline(needs))
    return [*outlines, *(bucket.outline(needs) for bucket in filling.values())]


def _alternating(clusters: Sequence[_Cluster]) -> Iterator[_Cluster]:
    """Next always the cluster that leaves the fullest rank least full, of those that come first on their ranks.

    A rank is as full as what it holds exceeds the larger of its two layouts.
    """
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
    joined_to = list(range(len(needs)))
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
