"""Release of training memory, bucket by bucket, while inference memory is allocated.

    before bucket 0     copies of all buckets to host memory start, if they can run asynchronously
    run bucket b        then fence b - 1 ends, the device memory of bucket b - 1 is released,
                        fence b starts, and bucket b is committed

A fence ends when every rank of the host has read what it needs of a bucket, and has released the
bucket before it; it runs during the transfer of the next bucket. A rank therefore holds at most its
training weights without the buckets before the last one, plus the inference weights so far. Ranks
of other hosts take no part: they get messages. `ranks/agreement.py` keeps the hosts within a few
buckets of each other.

If trainer and server are separate processes on one device, a rank that only allocates waits for a
fence before it allocates more, so the device holds as much as with a single process:

    trainer     fence b - 1 ends   b - 1 is released   fence b starts ...
    server      reads b            fence b starts and ends   commit b   allocate b + 1

A rank starts a fence only once the one before has ended without a failure, and a rank that fails
starts the next one with its failure. So all ranks of a host start the same fences, and none is left
over for the next switch. Ranks of other hosts learn of a failure from messages, or the watch at the
next bucket.
"""

from __future__ import annotations

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
    ) -> None:
        self._rank = rank
        self._group = group
        self._pace = pace
        self._offloader = offloader
        self._source = buffers
        self._schedule = schedule
        self._buckets = tuple(schedule)
        self._before_release = before_release
        self.released_nbytes = 0
        self._num_started = 0
        # The fence under way: the group's number of the operation, and the tensor that it reduces
        # in place.
        self._fence: tuple[int, torch.Tensor] | None = None
        self._has_failed = False  # the last fence carried a failure

    def begin(self) -> None:
        """Start to copy the parameters, which must not be written any more, to host memory.

        Does nothing if copies are not asynchronous, and once a bucket was sent.
        """
        if self._num_started:
            return
        with span("save parameters"):
            for index in self._buckets:
                self._offloader.save_parts("param", parts_of(self._source, self._schedule[index]))

    def sent(self, index: int) -> None:
        """Start the fence of bucket `index`, of which this rank has read all it needs.

        Before it, ends the fence of the bucket before, and releases that bucket. A rank that only
        allocates also waits for the new fence.

        Raises PeerTransportError if another rank failed, TransportError if a rank does not arrive
        in time.
        """
        assert index == self._buckets[self._num_started]
        self._pace.reach(self._num_started)
        self.finish()
        self._start(failed=False)
        if not self._source:
            self.finish()

    def finish(self) -> None:
        """End the fence under way, if any, and release its bucket. Raises as `sent` does."""
        if self._fence is None:
            return
        status = self._wait()
        if status:
            raise PeerTransportError(
                f"bucket {self._last}, phase release: rank {status - 1} failed", code="peer-failed"
            )
        with span("offload bucket", index=self._last):
            self._before_release(self.released_nbytes)
            parts = parts_of(self._source, self._schedule[self._last])
            self.released_nbytes += self._offloader.offload_parts("param", parts)

    def abandon(self) -> None:
        """Start the fence that the other ranks start next, after a failure of this rank.

        Raises TransportError if a fence is out of step, so that the next switch fails too.
        """
        self.drain()
        if not self._has_failed and self._num_started < len(self._buckets):
            self._start(failed=True)

    def drain(self) -> None:
        """Wait for the fence under way, after `abandon`, and once the transports are abandoned."""
        if self._fence is not None:
            self._wait()

    @property
    def _last(self) -> int:
        """Index of the bucket whose fence was started last."""
        return self._buckets[self._num_started - 1]

    def _start(self, *, failed: bool) -> None:
        # The reduced value is 0 if all ranks succeeded, else the highest failed rank plus one.
        status = torch.tensor([self._rank + 1 if failed else 0], dtype=torch.int64)
        try:
            self._fence = self._group.begin_maximum(status), status
        except RuntimeError as error:
            raise TransportError(
                f"bucket {self._buckets[self._num_started]}, phase release: "
                f"the ranks' group is gone ({plain_text(error)}); the job cannot go on",
                code="rank-group-is-gone",
            ) from error
        self._num_started += 1

    def _wait(self) -> int:
        """Wait for the fence under way to end; return its status (see `_start`)."""
        assert self._fence is not None
        operation, status = self._fence
        # Forgotten before the wait: a fence that failed must not be waited for again.
        self._fence = None
        try:
            with span("fence", bucket=self._last):
                self._group.end_maximum(operation, self._pace.ended)
        except RuntimeError as error:
            raise TransportError(
                f"bucket {self._last}, phase release: "
                f"not every rank read it: {plain_text(error)}. If they are only slow, "
                "raise generate_config.timeout_seconds",
                code="fence-timed-out",
            ) from error
        value = int(status.item())
        self._has_failed = value != 0
        return value
