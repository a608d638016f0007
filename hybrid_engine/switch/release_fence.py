"""Training memory goes while inference memory comes, bucket by bucket.

    copies of all buckets to host memory begin, where they run by themselves, before the first bucket
    run bucket b  ->  fence b starts  ->  commit b  ->  run bucket b + 1  ->  fence b ends, b is copied: pages of b go

A fence ends when every rank of the host has read all it needs of a bucket; it runs while the next bucket is on its way.
So a rank never holds more than its training weights, less those of the buckets before the last, and the inference
weights so far. Ranks of other hosts have no part in it: what they need of this rank's memory it has copied into
messages by itself. That they are no more than a few buckets apart is up to `ranks/agreement.py`.

Where the two sides are processes of their own on one device, that a bucket was read says nothing of whether its memory
has gone. There a fence tells both: the bucket was read, and the one before has gone. Whoever only takes memory waits
for it before it takes more, and the device holds as much as where one process does both:

    trainer     fence b - 1 ends   b - 1 goes   fence b starts ...
    server      reads b            fence b starts and ends   commit b   allocate b + 1

When a rank fails, all ranks of its host must still start the same fences, or the next switch would meet the leftovers.
They start those up to the one after the first that tells of a failure: none can observe the failure later than that.
Those of other hosts hear of it by messages that they wait for, or at the next bucket, from the watch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.memory.offload_items import Part
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.planning.buckets import Releases
from hybrid_engine.ranks.agreement import Pace
from hybrid_engine.ranks.groups import RankGroup, plain_text
from hybrid_engine.tracing import span

logger = logging.getLogger(__name__)


def parts_of(buffers: Mapping[str, torch.Tensor], releases: Releases) -> list[Part]:
    """Parts of these buffers that `releases` names."""
    return [Part(buffers[name], extent.start, extent.stop) for name, extents in releases.items() for extent in extents]


class ReleaseFence:
    """The fences of one switch on one rank.

    Args:
        rank: global rank of this process.
        group: of the ranks of its host, used for nothing else.
        pace: of the switch's phase.
        offloader: of the parameters, which go.
        buffers: the parameters', by name.
        schedule: what of them goes once a bucket was read, by the index of the buckets that are filled, in order.
        before_release: called before each release, with the bytes released so far.
        is_apart: ranks of the job have one side alone; the same on all.

    Attributes:
        released_nbytes: so far.
    """

    def __init__(
        self,
        rank: int,
        group: RankGroup,
        pace: Pace,
        offloader: Offloader,
        buffers: Mapping[str, torch.Tensor],
        schedule: Mapping[int, Releases],
        before_release: Callable[[int], None] = lambda nbytes: None,
        *,
        is_apart: bool = False,
    ) -> None:
        self._rank = rank
        self._group = group
        self._pace = pace
        self._offloader = offloader
        self._source, self._schedule = buffers, schedule
        self._buckets = tuple(schedule)
        self._before_release = before_release
        self._is_apart, self._takes_only = is_apart, is_apart and not buffers
        self.released_nbytes = 0
        self._fences: list[tuple[int, torch.Tensor]] = []  # the group's numbers of those started, in order of buckets
        self._num_ended = 0
        self._told_by: int | None = None  # the first fence that tells of a failure

    def begin(self) -> None:
        """The training weights are not written from here on: begin to save what will go, where copies are queued.

        Does nothing once a bucket was sent.
        """
        if self._fences:
            return
        with span("save parameters"):
            for index in self._buckets:
                self._offloader.save_parts("param", self._parts(index))

    def sent(self, index: int) -> None:
        """This rank has read all it needs of a bucket. Gives back the bucket before; without any, waits until others
        have.

        Raises PeerTransportError when another rank failed, TransportError when one does not come.
        """
        assert index == self._buckets[len(self._fences)]
        self._pace.reach(len(self._fences))
        if self._is_apart:
            self._end_started()
        self._start(failed=False)
        if self._takes_only:
            self._end_started()
        elif len(self._fences) > 1 and not self._is_apart:
            self._end_next()

    def finish(self) -> None:
        """All buckets are sent: give back the last. Raises as `sent`."""
        self._end_started()

    def _end_started(self) -> None:
        while self._num_ended < len(self._fences):
            self._end_next()

    def abandon(self) -> None:
        """This rank failed, or heard of a failure: start the fences that the others start. Waits for nobody new."""
        try:
            while self._num_ended < len(self._fences) and self._told_by is None:
                self._wait()
        except TransportError as error:
            logger.warning("fences of the switch are out of step; the next one will fail: %s", error)
            return
        if self._told_by is None:
            self._told_by = len(self._fences)
        while len(self._fences) < min(self._told_by + 2, len(self._buckets)):
            self._start(failed=True)

    def drain(self) -> None:
        """After `abandon`, once the transports are abandoned too: wait until the fences are over."""
        while self._num_ended < len(self._fences):
            self._wait()

    def _start(self, *, failed: bool) -> None:
        """Tell the others: 0 for a success, else this rank's number and one."""
        told = torch.tensor([self._rank + 1 if failed else 0], dtype=torch.int64)
        try:
            self._fences.append((self._group.begin_maximum(told), told))
        except RuntimeError as error:
            raise TransportError(
                f"bucket {self._buckets[len(self._fences)]}, phase release: the ranks' group is gone "
                f"({plain_text(error)}); the job cannot go on"
            ) from error

    def _end_next(self) -> None:
        number = self._num_ended
        if failed_rank := self._wait():
            raise PeerTransportError(f"bucket {self._buckets[number]}, phase release: rank {failed_rank - 1} failed")
        with span("offload bucket", index=self._buckets[number]):
            self._before_release(self.released_nbytes)
            self.released_nbytes += self._offloader.offload_parts("param", self._parts(self._buckets[number]))

    def _parts(self, index: int) -> list[Part]:
        return parts_of(self._source, self._schedule[index])

    def _wait(self) -> int:
        """End the oldest fence; returns what it tells."""
        number = self._num_ended
        maximum, told = self._fences[number]
        self._num_ended += 1
        try:
            with span("fence", bucket=self._buckets[number]):
                self._group.end_maximum(maximum, self._pace.ended)
        except RuntimeError as error:
            raise TransportError(
                f"bucket {self._buckets[number]}, phase release: not every rank read it: {plain_text(error)}. If they "
                "are only slow, raise generate_config.timeout_seconds"
            ) from error
        if told.item() and self._told_by is None:
            self._told_by = number
        return int(told.item())
