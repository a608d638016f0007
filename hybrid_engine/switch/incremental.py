"""Selection of the buckets that a switch must send, by the weights that inference still holds.

digests of this rank's training weights -->
                                            reasons to send each bucket, OR-ed over all ranks;
live weight groups on this rank         --> the rest is skipped

leaving INFER   kept      buckets that stay, within the memory bound
next switch     digests   of the bytes to be read
                reasons   of this rank  ->  Agreement.any_of  ->  next: a Selection
                forget    nothing counts as delivered during a fill, or after an incomplete fill
                note      the fill succeeded on every rank
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        releases: parts that may be released after each remaining bucket.
    """

    whole: bool
    digests: Digests
    skipped: frozenset[int]
    unread: Releases
    releases: Sequence[Releases]


class Incremental:
    """One rank's record of delivered weights.

    No collectives: the caller combines the ranks' reasons. Ranks that receive the same flags keep
    the same buckets.

    Args:
        buckets: buckets of the plan.
        source: this rank's training layout.
        groups: this rank's groups of inference weights.
        residency: bound on the inference weights that may stay.
        frozen: tensors that no optimizer step is expected to change; their buckets are preferred
            for staying from the start.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        source: Layout,
        groups: Collection[str],
        residency: Residency,
        frozen: Collection[str],
    ) -> None:
        self._buckets = buckets
        self._shards = source.shards
        self._residency = residency
        self._groups: list[list[str]] = []
        for bucket in buckets:
            self._groups.append([group for group in bucket.groups if group in groups])

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
        self._num_changes = [int(not unchanging.issuperset(bucket.tensors)) for bucket in buckets]
        self._delivered: Digests | None = None
        # Departure of the parameters from the device, and their digests before it.
        self._departed: tuple[object | None, Digests] = (None, ())

    def digests(self, buffers: FlatBuffers) -> Digests:
        """Return digests of these training buffers' present contents. Reads all bytes."""
        digests = []
        for runs in self._runs:
            pieces = (
                buffers[name][start:stop] for name, spans in runs.items() for start, stop in spans
            )
            digests.append(tuple(box_digests(pieces)))
        return digests

    def note_departure(self, departure: object | None, selection: Selection) -> None:
        """Record that the weights of this selection have left the device unchanged.

        `Offloader.departure` identifies the offload.
        """
        self._departed = (departure, selection.digests)

    def digests_since(self, departure: object | None) -> Digests | None:
        """Return digests of parameters that have been off the device since `departure`.

        None for another departure, and without any.
        """
        noted, digests = self._departed
        return digests if departure is not None and departure is noted else None

    def reasons(self, digests: Digests, live: Collection[str]) -> list[bool]:
        """Return this rank's reasons to send, as flags.

        The first flag of each bucket: its bytes changed. After these, another flag of each bucket:
        a group of it is not live. The last flag: this rank cannot apply deltas.

        Args:
            digests: digests of this rank's training weights.
            live: groups of this rank that hold the weights of the last fill.
        """
        live = frozenset(live)
        delivered = self._delivered
        # A bucket without bytes on this rank has an empty digest, and never counts as changed here.
        changed = [
            bool(now) and (delivered is None or now != delivered[index])
            for index, now in enumerate(digests)
        ]
        gone = [not live.issuperset(groups) for groups in self._groups]
        return [*changed, *gone, delivered is None]

    def next(
        self, digests: Digests, flags: Sequence[bool], releases: Sequence[Releases]
    ) -> Selection:
        """Select the buckets that at least one rank has a reason to send.

        Args:
            digests: digests of this rank's training weights.
            flags: `reasons`, OR-ed over all ranks.
            releases: parts that may be released after each bucket if all buckets are sent.
        """
        *of_buckets, whole = flags
        num_buckets = len(self._buckets)
        changed = of_buckets[:num_buckets]
        gone = of_buckets[num_buckets:]
        for index, flag in enumerate(changed):
            self._num_changes[index] += flag
        pairs = zip(changed, gone, strict=True)
        skipped = frozenset(index for index, flags_here in enumerate(pairs) if not any(flags_here))
        unread: Releases = {}
        if skipped:
            unread, *releases = self._schedule(skipped)
        return Selection(whole, digests, skipped, unread, releases)

    def note(self, selection: Selection) -> None:
        """Record that every rank has received this selection."""
        self._delivered = selection.digests

    def forget(self) -> None:
        """Make the next switch send everything, without deltas, unless a selection is noted."""
        self._delivered = None

    def kept(self) -> frozenset[int]:
        """Return the buckets that stay while the devices train, by how often they changed.

        The least often changed come first, then plan order decides.
        """
        preferred = sorted(range(len(self._buckets)), key=self._num_changes.__getitem__)
        return self._residency.kept(preferred)

    def release(self, container: WeightContainer) -> int:
        """Release the inference weights except the kept buckets; return the bytes that stay."""
        container.release(self.groups_of(self.kept()))
        return self.nbytes_of(container.kept())

    def groups_of(self, buckets: Collection[int]) -> list[str]:
        """Return this rank's groups of these buckets."""
        return [group for index in sorted(buckets) for group in self._groups[index]]

    def nbytes_of(self, live: Collection[str]) -> int:
        """Return the bytes on this rank of buckets whose groups are all in `live`."""
        live = frozenset(live)
        buckets = [index for index, groups in enumerate(self._groups) if live.issuperset(groups)]
        return self._residency.nbytes_of(buckets)

    def _schedule(self, skipped: Collection[int]) -> Sequence[Releases]:
        """Return this rank's training memory to release after each bucket.

        That of skipped buckets goes first.
        """
        first = [tensor for index in sorted(skipped) for tensor in self._buckets[index].tensors]
        rest = [bucket.tensors for bucket in self._buckets if bucket.index not in skipped]
        return release_schedule(self._shards, [first, *rest])
