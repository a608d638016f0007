"""Buckets: a plan in parts, ordered so that no rank holds much more than its larger layout.

    tensors -> clusters     tensors that share a destination group, directly or through others
    clusters -> order       every rank frees about as much as it fills
    order -> buckets        a bucket is closed once some rank fills or frees `bucket_nbytes` in it

Tensors that no training step changes can have separate buckets, which later switches skip.

Once a bucket has been sent, its training memory can be released. In the model's own order, a rank
of the last pipeline stage would fill its slices of all stages before it could free anything;
therefore the clusters of the stages alternate.

Two things follow from the buckets of a plan: `release_schedule` returns the parts of a rank's
training buffers that can be released after each bucket, and `Residency` chooses the buckets with
weights that stay on the inference side during training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.planning.plan import Bucket
from hybrid_engine.records.holdings import Holdings
from hybrid_engine.records.layout import Extent, Shard
from hybrid_engine.records.sides import Side


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A bucket without its transfers, or a part of one. Outlines add up.

    Attributes:
        tensors: canonical tensors in the bucket.
        groups: destination groups (`Buffer.group`) that contain the tensors.
        moved: bytes that each rank fills and frees, int array [2, ranks].
    """

    tensors: tuple[str, ...]
    groups: tuple[str, ...]
    moved: np.ndarray

    @property
    def nbytes(self) -> int:
        """Largest number of bytes that any rank fills or frees."""
        return int(self.moved.max())

    def __add__(self, other: Outline) -> Outline:
        groups = dict.fromkeys((*self.groups, *other.groups))
        return Outline((*self.tensors, *other.tensors), tuple(groups), self.moved + other.moved)


def outline_buckets(
    clusters: Sequence[Outline],
    bucket_nbytes: int,
    frozen: Collection[str] = (),
) -> list[Outline]:
    """Return the buckets of all ranks.

    Args:
        clusters: tensors that must share a bucket, in the model's order. Clusters on the same ranks
            keep it.
        bucket_nbytes: close a bucket once some rank fills or frees this many bytes in it.
        frozen: tensors that no training step changes. Clusters of only these share no bucket
            with other clusters.
    """
    frozen = frozenset(frozen)
    outlines: list[Outline] = []
    # Both kinds keep an open bucket: with one, every change from trained to frozen tensors and back
    # would close a bucket early.
    filling: dict[bool, Outline] = {}  # by whether the bucket's tensors are frozen
    for cluster in _alternating(clusters):
        is_frozen = frozen.issuperset(cluster.tensors)
        bucket = filling[is_frozen] + cluster if is_frozen in filling else cluster
        filling[is_frozen] = bucket
        # A cluster is never split, so a bucket exceeds the target by less than one cluster: with a
        # target of 100 and clusters of 60, buckets have 120.
        if bucket.nbytes >= bucket_nbytes:
            outlines.append(filling.pop(is_frozen))
    return [*outlines, *filling.values()]


def _alternating(clusters: Sequence[Outline]) -> Iterator[Outline]:
    """Yield clusters in an order that keeps the fullest rank as empty as possible.

    The fullness of a rank is the number of bytes by which its current contents exceed the larger
    of its two layouts. Clusters that fill and free the same ranks keep their order.
    """
    # Clusters of one stage fill and free the same ranks, so they share a queue, and only the head
    # of each queue is a candidate for the next place.
    queues: dict[bytes, deque[int]] = {}
    for index, cluster in enumerate(clusters):
        # Two clusters with the same key differ in sizes only. Taking them in the model's order
        # loses little, and a step then compares a few queues, not all clusters that are left.
        queues.setdefault((cluster.moved > 0).tobytes(), deque()).append(index)
    if len(queues) == 1:
        yield from clusters
        return
    gains = [cluster.moved[0] - cluster.moved[1] for cluster in clusters]
    inference = sum(cluster.moved[0] for cluster in clusters)
    training = sum(cluster.moved[1] for cluster in clusters)
    # Before the first bucket every rank holds exactly its training layout.
    # Zero or less: a rank of 10 GiB in training and 4 in inference starts at 0, one of 4 and 10
    # starts at -6, with 6 GiB to fill before it holds more than its larger layout.
    excess = training - np.maximum(training, inference)
    while queues:
        # Sorted by ordinal: `lexsort` is stable, so the model's order decides between equal
        # candidates.
        heads = sorted((queue[0], key) for key, queue in queues.items())
        # Fullness of each rank after each candidate, [head, rank].
        after = excess + np.stack([gains[index] for index, _ in heads])
        fullest = after.max(axis=1)
        total_excess = np.maximum(after, 0).sum(axis=1)
        # `lexsort` sorts by its last key first: by the fullest rank, then by the excess of all.
        best = int(np.lexsort((total_excess, fullest))[0])
        index, key = heads[best]
        excess = after[best]
        queues[key].popleft()
        if not queues[key]:
            del queues[key]
        yield clusters[index]


def clusters_of(source: Holdings, destination: Holdings) -> list[Outline]:
    """Return the tensors that share groups, directly or through others, in order of their first.

    The source holds every tensor of the destination, whose order is that of the plan.
    """
    groups = {
        tensor: tuple(dict.fromkeys(placed.group for placed in destination.placed[tensor]))
        for tensor in destination.owners
    }
    # Union-find over the ordinals of tensors: each points to an earlier tensor of its cluster, the
    # first to itself. Paths are halved during a search, so that later searches are short.
    parent = list(range(len(groups)))

    def root(ordinal: int) -> int:
        while parent[ordinal] != ordinal:
            parent[ordinal] = parent[parent[ordinal]]
            ordinal = parent[ordinal]
        return ordinal

    first_of_group: dict[str, int] = {}
    for ordinal, groups_of_tensor in enumerate(groups.values()):
        for group in groups_of_tensor:
            # The earlier root becomes the parent, so that a root is the first tensor of its
            # cluster.
            ends = (root(ordinal), root(first_of_group.setdefault(group, ordinal)))
            parent[max(ends)] = min(ends)
    members: dict[int, list[str]] = {}
    for ordinal, tensor in enumerate(groups):
        members.setdefault(root(ordinal), []).append(tensor)
    return [
        Outline(
            tuple(tensors),
            tuple(dict.fromkeys(group for tensor in tensors for group in groups[tensor])),
            np.stack([side.nbytes_by_rank(tensors) for side in (destination, source)]),
        )
        for tensors in members.values()
    ]


Releases = Mapping[str, tuple[Extent, ...]]
"""Buffer name -> intervals in elements, sorted and not adjacent."""


def release_schedule(
    shards: Iterable[Shard],
    steps: Sequence[Collection[str]],
) -> tuple[Releases, ...]:
    """Return the intervals that can be released after each step, once all ranks completed it.

    Args:
        shards: training records of one rank.
        steps: canonical tensors of each step, the same on all ranks.

    An interval that shards of several steps share is released after the last of them. An interval
    that holds a tensor of no step is never released.
    """
    step_of = {tensor: number for number, tensors in enumerate(steps) for tensor in tensors}
    never = len(steps)
    spans_by_buffer: dict[str, list[tuple[int, int, int]]] = {}
    for shard in shards:
        extent = shard.place.extent(shard.region.lengths)
        step = step_of.get(shard.region.tensor, never)
        spans = spans_by_buffer.setdefault(shard.place.buffer.name, [])
        spans.append((extent.start, extent.stop, step))
    # The last entry collects the intervals that stay, and is dropped below.
    schedule: list[dict[str, list[Extent]]] = [{} for _ in range(never + 1)]
    for name, spans in spans_by_buffer.items():
        for start, stop, step in _disjoint(spans):
            extents = schedule[step].setdefault(name, [])
            if extents and extents[-1].stop == start:
                # Adjacent to the previous extent: merge the two.
                start = extents.pop().start
            extents.append(Extent(start, stop))
    return tuple(
        {name: tuple(extents) for name, extents in released.items()}
        for released in schedule[:never]
    )


def _disjoint(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sort spans (start, stop, step) and merge overlapping ones, keeping the latest step."""
    joined: list[tuple[int, int, int]] = []
    # Extents overlap where tensors alternate in memory: query, key and value of an interleaved QKV
    # span nearly the same interval. Spans [0, 4) of step 1 and [2, 6) of step 3 become [0, 6) of
    # step 3, the first moment at which no element of it is needed. Touching spans stay apart, so
    # that each is released at its own step.
    for start, stop, step in sorted(spans):
        if joined and start < joined[-1][1]:
            last_start, last_stop, last_step = joined.pop()
            joined.append((last_start, max(stop, last_stop), max(step, last_step)))
        else:
            joined.append((start, stop, step))
    return joined


@dataclass(frozen=True, eq=False)
class Residency:
    """Bytes of each bucket's weights on the inference side, and the limit of resident bytes.

    Attributes:
        nbytes: bytes of each bucket's groups on ranks of each kind, int array [buckets, kinds].
        kind: number of this rank's kind (see `Side`).
        limit: bytes that may stay on a rank; None: no limit.
    """

    nbytes: np.ndarray
    kind: int
    limit: int | None = None

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        destination: Side,
        rank: int,
        limit: int | None,
    ) -> Residency:
        """Count the bytes of a plan's buckets on all kinds of ranks of `destination`."""
        bucket_of = {group: bucket.index for bucket in buckets for group in bucket.groups}
        nbytes = np.zeros((len(buckets), len(destination.kinds)), dtype=np.int64)
        for kind, layout in enumerate(destination.kinds):
            for buffer in layout.buffers.values():
                nbytes[bucket_of[buffer.group], kind] += buffer.nbytes
        return cls(nbytes, int(destination.kind_of[rank]), limit)

    def kept(self, preferred: Iterable[int]) -> frozenset[int]:
        """Return the buckets that stay: in order of preference, each that fits on every rank.

        A bucket stays on all ranks or on none, since a bucket that any rank lacks is sent anyway.
        """
        kept: list[int] = []
        resident = np.zeros(self.nbytes.shape[1], dtype=np.int64)  # bytes by kind
        # A bucket that does not fit is passed over, and a smaller one behind it may still fit.
        for index in preferred:
            total = resident + self.nbytes[index]
            if self.limit is None or total.max(initial=0) <= self.limit:
                resident = total
                kept.append(index)
        return frozenset(kept)

    def nbytes_of(self, buckets: Collection[int]) -> int:
        """Return the bytes of these buckets on this rank."""
        return int(self.nbytes[sorted(buckets), self.kind].sum())


def frozen_everywhere(ranks: Iterable[tuple[Collection[str], Collection[str]]]) -> frozenset[str]:
    """Return the tensors that no rank trains.

    Args:
        ranks: for each rank, the tensors it holds and the subset it does not train.
    """
    held: set[str] = set()
    trained: set[str] = set()
    for tensors, untrained in ranks:
        held.update(tensors)
        trained.update(set(tensors).difference(untrained))
    return frozenset(held - trained)
