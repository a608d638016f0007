"""Selection of the buckets that a switch must send, by the weights that inference still holds.

digests of this rank's training weights -->
                                            reasons to send each bucket, OR-ed over all ranks;
live weight groups on this rank         --> the rest is skipped

leaving INFER   release   all but the buckets that stay, within the memory bound
next switch     digests   of the bytes to be read
                reasons   of this rank  ->  Agreement.any_of  ->  next: a Selection
                forget    nothing counts as delivered during a fill, or after an incomplete fill
                note      the fill succeeded on every rank
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hybrid_engine.memory.offload_items import Spans
from hybrid_engine.planning.buckets import Releases, Residency, release_schedule
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch.weight_container import WeightContainer
from hybrid_engine.transports.copies import FlatBuffers

Digests = Sequence[tuple[int, ...]]
"""Bucket -> digest of each contiguous run of its bytes on this rank.

Empty if the rank holds none of its tensors.
"""


@dataclass(frozen=True)
class Selection:
    """Buckets that one switch sends, as seen by one rank.

    Attributes:
        whole: no message is a delta, because some rank may not hold the previous weights.
        digests: digests of this rank's training weights.
        skipped: indexes of buckets that all ranks skip.
        unread: parts of this rank's training buffers that are not read as a result; they may be
            released at once.
        releases: index of each remaining bucket, in order -> parts that may be released once all
            ranks have read it.
    """

    whole: bool
    digests: Digests
    skipped: frozenset[int]
    unread: Releases
    releases: Mapping[int, Releases]


class Incremental:
    """One rank's record of delivered weights; without `generate_config.incremental`, of none.

    No collectives: the caller combines the ranks' reasons, so all keep the same buckets.

    Args:
        buckets: buckets of the plan.
        source: this rank's training layout.
        residency: bound on the inference weights that may stay.
        frozen: tensors that no optimizer step changes; their buckets are the first to stay.

    Attributes:
        everything: the selection of all buckets, which compares nothing.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        source: Layout,
        residency: Residency,
        frozen: Collection[str],
    ) -> None:
        self._buckets = buckets
        self._shards = source.shards
        self._residency = residency

        # Per bucket: buffer name -> element intervals of its tensors.
        self._runs: list[dict[str, Spans]] = [{} for _ in buckets]
        bucket_of = {tensor: bucket.index for bucket in buckets for tensor in bucket.tensors}
        for shard in source.shards:
            index = bucket_of.get(shard.region.tensor)
            if index is not None:
                extent = shard.place.extent(shard.region.lengths)
                spans = self._runs[index].setdefault(shard.place.buffer.name, Spans())
                spans.add(extent.start, extent.stop)

        unchanging = frozenset(frozen)
        # What training changes counts as changed once before the first
        # switch, so frozen buckets stay first.
        self._num_changes = [int(not unchanging.issuperset(bucket.tensors)) for bucket in buckets]
        self._delivered: Digests | None = None
        self._departure: object | None = None  # of the delivered weights from the device
        self.everything = self._selection((), frozenset(), whole=True)

    def digests(self, buffers: FlatBuffers) -> Digests:
        """Return digests of these training buffers' present contents. Reads all bytes."""
        return [
            tuple(
                box_digests(
                    buffers[name][start:stop]
                    for name, spans in runs.items()
                    for start, stop in spans
                )
            )
            for runs in self._runs
        ]

    def note_departure(self, departure: object | None) -> None:
        """Record that the delivered weights left unchanged, by `Offloader.departure`."""
        self._departure = departure

    def digests_since(self, departure: object | None) -> Digests | None:
        """Return the delivered digests if these weights are off the device since `departure`."""
        return self._delivered if departure is not None and departure is self._departure else None

    def reasons(self, digests: Digests, container: WeightContainer) -> list[bool]:
        """Return this rank's reasons to send, as flags.

        For each bucket: its bytes changed. Then for each bucket: a group of it is not live. The
        last: this rank cannot apply deltas.
        """
        delivered = self._delivered
        # A bucket without bytes on this rank has an empty digest, and never counts as changed here.
        changed = [
            bool(now) and (delivered is None or now != delivered[index])
            for index, now in enumerate(digests)
        ]
        return [*changed, *container.gone(), delivered is None]

    def next(self, digests: Digests, flags: Sequence[bool]) -> Selection:
        """Select the buckets that at least one rank has a reason to send.

        Args:
            digests: digests of this rank's training weights.
            flags: `reasons`, OR-ed over all ranks.
        """
        *of_buckets, whole = flags
        num_buckets = len(self._buckets)
        skipped = set()
        for index in range(num_buckets):
            # Of 3 buckets the flags are c0 c1 c2 g0 g1 g2, and bucket 1 has c1 and g1.
            is_changed, is_gone = of_buckets[index::num_buckets]
            self._num_changes[index] += is_changed
            if not is_changed and not is_gone:
                skipped.add(index)
        return self._selection(digests, frozenset(skipped), whole=whole)

    def _selection(self, digests: Digests, skipped: frozenset[int], *, whole: bool) -> Selection:
        sent = [bucket for bucket in self._buckets if bucket.index not in skipped]
        # Training memory of skipped buckets goes first.
        first = [tensor for index in sorted(skipped) for tensor in self._buckets[index].tensors]
        steps = [first, *(bucket.tensors for bucket in sent)]
        unread, *releases = release_schedule(self._shards, steps)
        indexes = [bucket.index for bucket in sent]
        by_bucket = dict(zip(indexes, releases, strict=True))
        return Selection(whole, digests, skipped, unread, by_bucket)

    def note(self, selection: Selection) -> None:
        """Record that every rank has received this selection."""
        self._delivered = selection.digests

    def forget(self) -> None:
        """Make the next switch send everything, without deltas, unless a selection is noted."""
        self._delivered = None

    def release(self, container: WeightContainer) -> int:
        """Release the inference weights except the kept buckets; return the bytes that stay.

        The buckets that changed least often are the first to stay.
        """
        preferred = sorted(range(len(self._buckets)), key=self._num_changes.__getitem__)
        container.release(container.groups_of(self._residency.kept(preferred)))
        stayed = [index for index, is_gone in enumerate(container.gone()) if not is_gone]
        return self._residency.nbytes_of(stayed)
