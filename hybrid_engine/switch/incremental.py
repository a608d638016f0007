"""Weights that the inference side has from earlier switches, so that they are neither read nor sent again.

digests of what this rank trains     -->
                                         reasons to send each bucket; one rank's reason counts for all: the rest is
groups that are live on this rank    -->                                                                 skipped

leaving INFER   kept      which groups stay within the bound
next switch     digests   of the bytes to be read
                reasons   of this rank  ->  Agreement.any_of  ->  next: a Selection
                forget    nothing counts as delivered while a fill goes on, or after one that did not end
                note      the fill succeeded on every rank
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.memory.offload_items import Spans
from hybrid_engine.planning.buckets import Releases, Residency, release_schedule
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch.weight_container import WeightContainer

Digests = Sequence[tuple[int, ...]]
"""By bucket, of each run of bytes in which this rank has its tensors; empty where it has none of them."""


@dataclass(frozen=True)
class Selection:
    """The buckets that one switch sends, on one rank.

    Attributes:
        whole: no message is a delta: some rank does not know that it has what came last.
        digests: of this rank's weights.
        skipped: buckets that all ranks leave out.
        unread: what that leaves unread of this rank's training buffers; it can go at once.
        releases: what can go after each of the other buckets.
    """

    whole: bool
    digests: Digests
    skipped: frozenset[int]
    unread: Releases
    releases: Sequence[Releases]


class Incremental:
    """Decides on one rank what is sent. No collective: the caller brings the ranks' reasons together.

    Args:
        buckets: of the plan.
        source: what this rank holds for training.
        groups: of this rank's inference weights.
        residency: how much of them may stay.
        frozen: tensors that no step changes, as far as is known; their buckets stay before others from the beginning.

    Ranks that were told the same flags keep the same buckets.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        source: Layout,
        groups: Collection[str],
        residency: Residency,
        frozen: Collection[str],
    ) -> None:
        self._buckets, self._shards, self._residency = buckets, source.shards, residency
        self._groups = [[group for group in bucket.groups if group in groups] for bucket in buckets]
        self._runs: list[dict[str, Spans]] = [{} for _ in buckets]  # by buffer, in elements
        bucket_of = {tensor: bucket.index for bucket in buckets for tensor in bucket.tensors}
        for shard in source.shards:
            if (index := bucket_of.get(shard.region.tensor)) is not None:
                extent = shard.place.extent(shard.region.lengths)
                self._runs[index].setdefault(shard.place.buffer.name, Spans()).add(extent.start, extent.stop)
        self._num_changes = [int(not frozenset(frozen).issuperset(bucket.tensors)) for bucket in buckets]
        self._delivered: Digests | None = None
        self._departed: tuple[object | None, Digests] = None, ()  # what was read before the parameters left

    def digests(self, buffers: Mapping[str, torch.Tensor]) -> Digests:
        """Digests of what is in these training buffers now; reads all of it."""
        return [
            tuple(box_digests(buffers[name][start:stop] for name, spans in runs.items() for start, stop in spans))
            for runs in self._runs
        ]

    def note_departure(self, departure: object | None, selection: Selection) -> None:
        """Note that what was read for this selection has left the device since (`Offloader.departure`)."""
        self._departed = departure, selection.digests

    def digests_since(self, departure: object | None) -> Digests | None:
        """Digests of parameters that have been off the device since this departure; None where it is another."""
        before, digests = self._departed
        return digests if departure is not None and departure is before else None

    def reasons(self, digests: Digests, live: Collection[str]) -> list[bool]:
        """This rank's reasons to send: for each bucket that its bytes changed, then for each that a group is gone; at
        last whether it can take no delta.

        Args:
            digests: of this rank's weights.
            live: groups of this rank that hold what they got last.
        """
        live, delivered = frozenset(live), self._delivered
        changed = [bool(now) and (delivered is None or now != delivered[index]) for index, now in enumerate(digests)]
        return [*changed, *(not live.issuperset(groups) for groups in self._groups), delivered is None]

    def next(self, digests: Digests, flags: Sequence[bool], releases: Sequence[Releases]) -> Selection:
        """Select the buckets that any rank has a reason for.

        Args:
            digests: of this rank's weights.
            flags: `reasons` of any rank.
            releases: what can go after each bucket if all are sent.
        """
        *of_buckets, whole = flags
        changed, gone = of_buckets[: len(self._buckets)], of_buckets[len(self._buckets) :]
        for index, flag in enumerate(changed):
            self._num_changes[index] += flag
        skipped = frozenset(index for index, found in enumerate(zip(changed, gone, strict=True)) if not any(found))
        unread: Releases = {}
        if skipped:
            unread, *releases = self._schedule(skipped)
        return Selection(whole, digests, skipped, unread, releases)

    def note(self, selection: Selection) -> None:
        """Every rank has what this one sent, and what it skipped."""
        self._delivered = selection.digests

    def forget(self) -> None:
        """Send everything next time, and no deltas, unless a selection is noted before."""
        self._delivered = None

    def kept(self) -> frozenset[int]:
        """The buckets that stay when the devices train again: those that changed least often, in the plan's order."""
        preferred = sorted(range(len(self._buckets)), key=self._num_changes.__getitem__)
        return self._residency.kept(preferred)

    def release(self, container: WeightContainer) -> int:
        """Release inference weights but for what stays; returns the bytes of that."""
        container.release(self.groups_of(self.kept()))
        return self.nbytes_of(container.kept())

    def groups_of(self, buckets: Collection[int]) -> list[str]:
        """This rank's groups of these buckets."""
        return [group for index in sorted(buckets) for group in self._groups[index]]

    def nbytes_of(self, live: Collection[str]) -> int:
        """Bytes on this rank of the buckets whose groups are all among these."""
        live = frozenset(live)
        buckets = [index for index, groups in enumerate(self._groups) if live.issuperset(groups)]
        return self._residency.nbytes_of(buckets)

    def _schedule(self, skipped: Collection[int]) -> Sequence[Releases]:
        """Training memory of this rank that goes: first that of skipped buckets, which nobody reads, then that of
        each other one."""
        first = [tensor for index in sorted(skipped) for tensor in self._buckets[index].tensors]
        rest = [bucket.tensors for bucket in self._buckets if bucket.index not in skipped]
        return release_schedule(self._shards, [first, *rest])
