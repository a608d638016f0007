"""Release of training memory, bucket by bucket, while inference memory is allocated.

    before bucket 0     copies of all buckets to host memory start, if they can run asynchronously
    run bucket b        then fence b starts, then bucket b is committed
    run bucket b + 1    then fence b ends, and the device memory of bucket b is released

A fence ends when every rank of the host has read what it needs of a bucket; it runs during the
transfer of the next bucket. A rank therefore holds at most its training weights without the buckets
before the last one, plus the inference weights so far. Ranks of other hosts take no part: they get
messages. `ranks/agreement.py` keeps the hosts within a few buckets of each other.

If trainer and server are separate processes on one device, a fence means both: the bucket was read,
and the previous one was released. A rank that only allocates waits for it before it allocates more,
so the device holds as much as with a single process:

    trainer     fence b - 1 ends   b - 1 is released   fence b starts ...
    server      reads b            fence b starts and ends   commit b   allocate b + 1

If a rank fails, all ranks of its host must still start the same fences, or the next switch would
receive the leftover ones: up to the one after the first that carries a failure, in which the last
rank observes it. Ranks of other hosts learn of it from messages, or the watch at the next bucket.
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
from hybrid_engine.transports.copies import FlatBuffers

logger = logging.getLogger(__name__)


def parts_of(buffers: FlatBuffers, releases: Releases) -> list[Part]:
    """Return the parts of these buffers that `releases` names."""
    return [
        Part(buffers[name], extent.start, extent.stop)
        for name, extents in releases.items()
        for extent in extents
    ]


class ReleaseFence:
    """Fences of one switch on one rank.

    Args:
        rank: global rank of this process.
        group: ranks of this host; used for fences only.
        pace: pace of the switch's phase.
        offloader: offloader of the parameters.
        buffers: parameter buffers by name; empty if this rank has no training side.
        schedule: index of each bucket that is filled, in order -> parts to release once it was
            read.
        before_release: called before each release with the bytes released so far.
        is_apart: some rank of the job has one side only; the same on all ranks.

    Attributes:
        released_nbytes: bytes of device memory released so far.
    """

    def __init__(
        self,
        rank: int,
        group: RankGroup,
        pace: Pace,
        offloader: Offloader,
        buffers: FlatBuffers,
        schedule: Mapping[int, Releases],
        before_release: Callable[[int], None] = lambda nbytes: None,
        *,
        is_apart: bool = False,
    ) -> None:
        self._rank = rank
        self._group = group
        self._pace = pace
        self._offloader = offloader
        self._source = buffers
        self._schedule = schedule
        self._buckets = tuple(schedule)
        self._before_release = before_release
        self._is_apart = is_apart
        self._only_allocates = is_apart and not buffers
        self.released_nbytes = 0
        # Started fences in bucket order: the group's number of the operation, and the tensor that
        # it reduces in place.
        self._fences: list[tuple[int, torch.Tensor]] = []
        self._num_ended = 0
        self._first_failed: int | None = None  # number of the first fence that carried a failure

    def begin(self) -> None:
        """Start to copy the parameters, which must not be written any more, to host memory.

        Does nothing if copies are not asynchronous, and once a bucket was sent.
        """
        if self._fences:
            return
        with span("save parameters"):
            for index in self._buckets:
                self._offloader.save_parts("param", parts_of(self._source, self._schedule[index]))

    def sent(self, index: int) -> None:
        """Start the fence of bucket `index`, of which this rank has read all it needs.

        Releases the bucket before it. A rank that only allocates waits for the fence instead.

        Raises PeerTransportError if another rank failed, TransportError if a rank does not arrive
        in time.
        """
        assert index == self._buckets[len(self._fences)]
        self._pace.reach(len(self._fences))
        if self._is_apart:
            # Release the previous bucket first: starting a fence then also announces that release.
            self.finish()
        self._start(failed=False)
        if self._only_allocates:
            self.finish()
        elif len(self._fences) > 1 and not self._is_apart:
            # The fence just started goes on during the next bucket's transfer; the one before ends.
            self._end_next()

    def finish(self) -> None:
        """End the fences that were started, and release their buckets. Raises as `sent` does."""
        while self._num_ended < len(self._fences):
            self._end_next()

    def abandon(self) -> None:
        """Start the fences that the other ranks start, after a failure; wait for started ones."""
        try:
            while self._num_ended < len(self._fences) and self._first_failed is None:
                self._wait()
        except TransportError as error:
            logger.warning(
                "fences of the switch are out of step; the next one will fail: %s", error
            )
            return
        if self._first_failed is None:
            # This rank's own failure goes with the next fence that it starts.
            self._first_failed = len(self._fences)
        # The fence after the first failed one is the last in which any rank can observe the
        # failure.
        # If fence 3 carries it, ranks may have started fence 4 before they end 3: 5 fences in all.
        num_expected = min(self._first_failed + 2, len(self._buckets))
        while len(self._fences) < num_expected:
            self._start(failed=True)

    def drain(self) -> None:
        """Wait for all started fences, after `abandon`, and once the transports are abandoned."""
        while self._num_ended < len(self._fences):
            self._wait()

    def _start(self, *, failed: bool) -> None:
        # The reduced value is 0 if all ranks succeeded, else the highest failed rank plus one.
        status = torch.tensor([self._rank + 1 if failed else 0], dtype=torch.int64)
        try:
            self._fences.append((self._group.begin_maximum(status), status))
        except RuntimeError as error:
            raise TransportError(
                f"bucket {self._buckets[len(self._fences)]}, phase release: "
                f"the ranks' group is gone ({plain_text(error)}); the job cannot go on",
                code="rank-group-is-gone",
            ) from error

    def _end_next(self) -> None:
        """End the oldest fence, and release its bucket."""
        bucket = self._buckets[self._num_ended]
        status = self._wait()
        if status:
            raise PeerTransportError(
                f"bucket {bucket}, phase release: rank {status - 1} failed", code="peer-failed"
            )
        with span("offload bucket", index=bucket):
            self._before_release(self.released_nbytes)
            parts = parts_of(self._source, self._schedule[bucket])
            self.released_nbytes += self._offloader.offload_parts("param", parts)

    def _wait(self) -> int:
        """Wait for the oldest fence to end; return its status (see `_start`)."""
        number = self._num_ended
        operation, status = self._fences[number]
        # Counted before the wait: a fence that failed must not be waited for again.
        self._num_ended += 1
        try:
            with span("fence", bucket=self._buckets[number]):
                self._group.end_maximum(operation, self._pace.ended)
        except RuntimeError as error:
            raise TransportError(
                f"bucket {self._buckets[number]}, phase release: "
                f"not every rank read it: {plain_text(error)}. If they are only slow, "
                "raise generate_config.timeout_seconds",
                code="fence-timed-out",
            ) from error
        value = int(status.item())
        if value and self._first_failed is None:
            self._first_failed = number
        return value
