"""The inference weights of one rank, filled bucket by bucket from the training weights.

    begin                                           on every rank, before any of them goes on
    for bucket in plan.buckets:                     on every rank, but for those that all ranks skip
        buffers = weights.allocate(groups)          this rank's groups of the bucket, maybe none
        router.run(bucket, source, buffers, next)   read, transfer, write; the next bucket's messages go meanwhile
        fence.sent(bucket.index)                 training memory of earlier buckets can go (switch/release_fence.py)
        verification.filled(bucket, source, buffers)    where the fill is verified
        weights.commit(groups)                      the engine's own post-load processing
    weights.finish_fill()                           staging memory is freed

A rank that fails says so wherever another may wait for it: weights.abandon, fence.abandon, router.abandon for each
bucket that is left, fence.drain.

    EMPTY --fill--> PARTIAL --last bucket--> FILLED --release--> EMPTY
                       └────────failure, then release────────────┘

Memory: nothing in EMPTY but groups that were to stay (`keep`); in FILLED what the inference engine keeps. In between,
at most the destination buffers of the buckets so far (live storage) or of one bucket (an engine that repacks).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import Enum
from functools import partial
from itertools import pairwise

import torch

from hybrid_engine.errors import HybridEngineError, PlanError, ReshardError, StateError, first_of
from hybrid_engine.planning.plan import Bucket, Link, ReshardPlan
from hybrid_engine.planning.relays import NUM_SLOTS
from hybrid_engine.ports import InferenceWeights
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.switch.release_fence import ReleaseFence
from hybrid_engine.switch.verifier import Verification
from hybrid_engine.tracing import span, timed_span
from hybrid_engine.transports.deltas import DeltaCount
from hybrid_engine.transports.router import RunReport, TransportSet

logger = logging.getLogger(__name__)

_NUM_NAMED = 4  # groups in a message: a bucket of a large model holds hundreds

PHASES = ("allocate", "read", "transfer", "write", "commit")


class ContainerState(Enum):
    """Contents of the inference side: no weights, some of them, all of them live."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FILLED = "filled"


@dataclass(slots=True)
class FillReport:
    """Costs of one fill on this rank, summed up while it goes on.

    Attributes:
        seconds: by phase; copies that go straight from source to destination count as transfer.
        nbytes_by_link: bytes read, by what they crossed; those over HOST and NETWORK were received from other devices.
        nbytes_by_peer: the same bytes by transport name and by the rank they came from (`router.RunReport`).
        staging_nbytes: memory of messages in flight, freed since.
        least_nbytes: no plan makes this rank receive less for the buckets that were filled.
        skipped_nbytes: what it would have read, had none been skipped.
        deltas: of the messages that it sent.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    nbytes_by_link: dict[Link, int] = field(default_factory=lambda: dict.fromkeys(Link, 0))
    nbytes_by_peer: dict[str, Counter[int]] = field(default_factory=dict)
    staging_nbytes: int = 0
    least_nbytes: int = 0
    skipped_nbytes: int = 0
    deltas: DeltaCount = field(default_factory=DeltaCount)

    @property
    def received_nbytes(self) -> int:
        """Bytes that came from other devices."""
        return self.nbytes_by_link[Link.HOST] + self.nbytes_by_link[Link.NETWORK]

    def add_run(self, report: RunReport) -> None:
        """Add a bucket's costs."""
        for phase, seconds in report.seconds.items():
            self.seconds[phase] += seconds
        for link, nbytes in report.nbytes_by_link.items():
            self.nbytes_by_link[link] += nbytes
        for name, by_peer in report.nbytes.items():
            self.nbytes_by_peer.setdefault(name, Counter()).update(by_peer)

    def of_all(self, agreement: Agreement) -> FillReport:
        """With the bytes of all ranks together, in which each way between two of them counts once. Collective."""
        sums = self.staging_nbytes, self.least_nbytes, self.skipped_nbytes, *astuple(self.deltas)
        own = self.nbytes_by_link, self.nbytes_by_peer, sums
        by_link, by_way = Counter[Link](), dict[str, Counter[int]]()
        told = agreement.gather(own, _Told, "bytes of all ranks")
        for number, (links, peers, _) in enumerate(told):
            by_link.update({Link(link): nbytes for link, nbytes in links.items()})
            for name, by_peer in peers.items():
                ways = {number * len(told) + peer: nbytes for peer, nbytes in by_peer.items()}
                by_way.setdefault(name, Counter()).update(ways)
        counts = {link: by_link[link] for link in Link}
        staging, least, skipped, *deltas = (sum(column) for column in zip(*(each[2] for each in told), strict=True))
        return FillReport(self.seconds, counts, by_way, staging, least, skipped, DeltaCount(*deltas))


_Told = tuple[dict[str, int], dict[str, dict[int, int]], tuple[int, ...]]


class WeightContainer:
    """Fills, holds and releases the weights of the inference engine on this rank.

    Args:
        weights: this rank's.
        plan: made from their layout.
        router: the transports, connected for the plan.
        sends_ahead: the next bucket's messages go while one is committed; the same on all ranks.
        num_ranks: that fill together.

    No collective. Raises PlanError when the plan's buckets do not complete every group of this rank once.
    """

    def __init__(
        self,
        weights: InferenceWeights,
        plan: ReshardPlan,
        router: TransportSet,
        *,
        sends_ahead: bool = True,
        num_ranks: int = 1,
    ) -> None:
        self._weights = weights
        self._plan = plan
        self._router = router
        self._sends_ahead = sends_ahead
        self._num_ranks = num_ranks
        buffers = weights.layout().buffers
        self._groups = {buffer.group for buffer_id, buffer in buffers.items() if buffer_id.rank == router.rank}
        self._state = ContainerState.EMPTY
        self._doing, self._filling = "", list[str]()  # what the fill is at, and its groups, for messages
        self._is_in_step = True  # with the others: no message of an earlier fill is under way
        self._has_begun = False  # of begin, fill and release, begin was last: a fill may follow
        self._report = FillReport()  # of that fill, or of the last one
        self._num_met = 0  # by the router, when the fill began
        self._walked: Sequence[Bucket] = ()  # in the fill
        self._following: Mapping[int, Bucket] = {}  # bucket -> the one whose messages go meanwhile
        self._kept: frozenset[str] = frozenset()  # groups, by the last release
        self._check_groups()

    @property
    def state(self) -> ContainerState:
        return self._state

    def kept(self) -> frozenset[str]:
        """The groups of this rank that are live: those of the last fill, and while empty, those of it that stayed."""
        live = frozenset(self._groups) if self._state is ContainerState.FILLED else self._kept
        return live.intersection(self._weights.committed()) if live else live

    def begin(self, skipped: Collection[int] = (), *, whole: bool = True) -> None:
        """Prepare the next `fill` on this rank. No collective; `fill` follows once all ranks have succeeded here: one
        that fails here cannot tell those that fill already.

        Args:
            skipped: buckets to leave out, the same on all ranks: their groups are among `kept`.
            whole: no message is a delta, for some rank may not have what came last; the same on all ranks.

        Raises StateError unless empty, and where an earlier fill was interrupted even while it told the others.
        """
        self._has_begun = False
        if self._state is not ContainerState.EMPTY:
            raise StateError(f"the weight container is {self._state.value}; release() it before the next fill")
        if not self._is_in_step:
            raise StateError(
                f"rank {self._router.rank} was interrupted while it told the others that it had been interrupted: "
                "messages of that switch may be under way. The job cannot go on; the training weights are whole"
            )
        left_out = [group for index in skipped for group in self._owned(self._plan.buckets[index])]
        if gone := [group for group in left_out if group not in self._kept]:
            raise StateError(f"groups {first_of(gone, _NUM_NAMED)} were not kept: their buckets cannot be skipped")
        self._doing, self._filling = "before the first bucket", []
        self._num_met = self._router.num_met
        self._walked = [bucket for bucket in self._plan.buckets if bucket.index not in skipped]
        self._following = self._sent_ahead()
        self._report = FillReport(
            least_nbytes=sum(bucket.least.get(self._router.rank, 0) for bucket in self._walked),
            skipped_nbytes=sum(self._read_nbytes(self._plan.buckets[index]) for index in skipped),
        )
        self._router.begin(whole=whole)
        self._has_begun = True

    @torch.no_grad()
    def fill(
        self,
        source: Mapping[str, torch.Tensor],
        fence: ReleaseFence | None = None,
        verification: Verification | None = None,
    ) -> FillReport:
        """Make `source` (`TrainingWeights.buffers()`) the inference weights, bucket by bucket. All ranks call it.

        Args:
            source: by buffer name.
            fence: releases training memory behind every bucket.
            verification: of what is filled.

        The caller fences before (all sources are final) and, without a fence, after (nobody reads them any more).
        Raises StateError without a `begin` before. On any failure while buckets are filled the state is PARTIAL, the
        remaining ones are abandoned, so that no peer waits for this rank, and the error is raised: the engine's own and
        interrupts (Ctrl-C) as they are, others as ReshardError.
        """
        if not self._has_begun:
            raise StateError("begin() comes before each fill()")
        try:
            self._has_begun, self._is_in_step = False, self._num_ranks == 1  # until its end, or the others were told
            self._state = ContainerState.PARTIAL
            self._router.prepare()
            self._fill(source, fence, verification, self._report)
            self._is_in_step = True
        except BaseException as error:
            self._abandon(f"rank {self._router.rank}, {self._doing}: {type(error).__name__}: {error}", fence)
            self._is_in_step = True
            if isinstance(error, HybridEngineError) or not isinstance(error, Exception):
                raise
            groups = f", groups {first_of(self._filling, _NUM_NAMED)}" if self._filling else ""
            raise ReshardError(
                f"rank {self._router.rank}, {self._doing}{groups}: {type(error).__name__}: {error}. "
                "The inference weights are partly filled; release() them"
            ) from error
        self._state = ContainerState.FILLED
        self._report.deltas = self._router.deltas_sent()
        return self._report

    def _fill(
        self,
        source: Mapping[str, torch.Tensor],
        fence: ReleaseFence | None,
        verification: Verification | None,
        report: FillReport,
    ) -> None:
        for bucket in self._walked:
            with span("bucket", index=bucket.index, bytes=bucket.nbytes):
                self._fill_bucket(bucket, source, fence, verification, report)
        self._doing, self._filling = "after the last bucket", []
        if fence is not None:
            fence.finish()
        self._weights.finish_fill()
        report.staging_nbytes = self._router.trim()

    def release(self, keep: Collection[str] = ()) -> None:
        """Free the inference weights, whatever was filled; afterwards the container is empty. Idempotent.

        `keep`: groups of this rank that may stay as they are; nothing stays of a fill that failed.
        """
        self._has_begun = False
        if self._state is ContainerState.EMPTY and self._kept.issubset(keep):
            return
        kept = frozenset() if self._state is ContainerState.PARTIAL else frozenset(keep)
        self._state = ContainerState.PARTIAL  # should the engine fail half-way
        if kept:
            self._weights.release(kept)
        else:
            self._weights.release()
        self._state, self._kept = ContainerState.EMPTY, kept

    def _check_groups(self) -> None:
        completed = Counter(group for bucket in self._plan.buckets for group in self._owned(bucket))
        faults = [
            f"group {group!r} of rank {self._router.rank} is completed by {completed[group]} buckets, not by one; "
            "build the plan from the layouts of this engine"
            for group in sorted(self._groups)
            if completed[group] != 1
        ]
        if faults:
            raise PlanError(faults)

    def _read_nbytes(self, bucket: Bucket) -> int:
        return sum(each.nbytes for each in bucket.counted() if each.dst_rank == self._router.rank)

    def _sent_ahead(self) -> dict[int, Bucket]:
        """Not those that would go through the same memory as the bucket before them."""
        pairs = pairwise(self._walked) if self._sends_ahead else ()
        return {one.index: other for one, other in pairs if (other.index - one.index) % NUM_SLOTS}

    def _owned(self, bucket: Bucket) -> list[str]:
        return [group for group in bucket.groups if group in self._groups]

    def _fill_bucket(
        self,
        bucket: Bucket,
        source: Mapping[str, torch.Tensor],
        fence: ReleaseFence | None,
        verification: Verification | None,
        report: FillReport,
    ) -> None:
        groups = self._owned(bucket)

        def begin(phase: str) -> str:
            self._doing, self._filling = f"bucket {bucket.index}, phase {phase}", groups
            return phase

        with timed_span(report.seconds, begin("allocate")):
            destination = self._weights.allocate(groups) if groups else {}
        if fence is not None:  # not earlier: vLLM waits for all that is queued on the device as it wakes up
            begin("release")
            fence.begin()
        begin("transfer")
        report.add_run(self._router.run(bucket, source, destination, self._following.get(bucket.index)))
        if fence is not None:
            begin("release")
            fence.sent(bucket.index)
        if verification is not None:  # nothing comes between this and the commit
            begin("verify")
            verification.filled(bucket, source, destination)
        with timed_span(report.seconds, begin("commit")):
            if groups:
                self._weights.commit(groups)

    def _abandon(self, reason: str, fence: ReleaseFence | None) -> None:
        """Walk the buckets that are left without filling them, for peers that wait for this rank; then keep no memory
        for messages, and none of peers'."""
        buckets: list[Callable[[], object]] = [
            partial(self._router.abandon, bucket, reason, self._following.get(bucket.index))
            for bucket in self._walked[self._router.num_met - self._num_met :]
        ]
        steps = buckets if fence is None else [fence.abandon, *buckets, fence.drain]
        steps = [self._weights.abandon, *steps]  # first: others may wait there, and so not come to the buckets
        failures = []
        for step in [*steps, self._router.trim]:
            try:
                step()
            except Exception as error:  # one group that is dead does not keep the others from hearing
                failures.append(error)
        if failures:
            logger.warning("the fill could not be abandoned everywhere; peers end by their timeout: %s", failures[0])
