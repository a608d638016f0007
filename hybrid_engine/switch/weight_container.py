"""Inference weights of one rank, filled bucket by bucket from the training weights.

The package's docstring lists the steps of a bucket. A rank that fails signals it wherever another
rank may wait for it: weights.abandon, fence.abandon, router.abandon for each remaining bucket,
fence.drain.

    EMPTY --fill--> PARTIAL --last bucket--> FILLED --release--> EMPTY
                       └────────failure, then release────────────┘

Memory: in EMPTY only kept groups; in FILLED the engine's weights. In between, at most the buffers
of the buckets so far (live storage) or of one bucket (an engine that repacks).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import pairwise

import torch

from hybrid_engine.errors import HybridEngineError, PlanError, ReshardError, StateError, first_of
from hybrid_engine.planning.plan import Bucket, Costs, ReshardPlan
from hybrid_engine.planning.relays import NUM_SLOTS
from hybrid_engine.ports import InferenceWeights
from hybrid_engine.switch.release_fence import ReleaseFence
from hybrid_engine.switch.verifier import Verification
from hybrid_engine.tracing import span
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.router import TransportSet, collecting

logger = logging.getLogger(__name__)

_NUM_NAMED = 4
"""Maximum number of groups in a message; a bucket of a large model holds hundreds."""

PHASES = ("allocate", "read", "transfer", "write", "commit")


class ContainerState(Enum):
    """Contents of the inference side: no weights, some weights, or all weights live."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FILLED = "filled"


class WeightContainer:
    """Inference weights of this rank, with the operations to fill and release them.

    Args:
        weights: this rank's inference weights.
        plan, router: made from their layout, and connected for the plan.
        num_ranks: number of ranks that fill together.

    Attributes:
        state: contents of the inference side.

    Raises PlanError if no bucket of the plan completes a group of this rank.
    """

    def __init__(
        self,
        weights: InferenceWeights,
        plan: ReshardPlan,
        router: TransportSet,
        *,
        num_ranks: int = 1,
    ) -> None:
        self._weights = weights
        self._plan = plan
        self._router = router
        self._num_ranks = num_ranks
        buffers = weights.layout().buffers
        groups = {
            buffer.group for buffer_id, buffer in buffers.items() if buffer_id.rank == router.rank
        }
        # By bucket of the plan.
        self._groups = [
            [group for group in bucket.groups if group in groups] for bucket in plan.buckets
        ]
        self.state = ContainerState.EMPTY
        # For messages: the current step of the fill, and the groups that it fills.
        self._step = ""
        self._filling: list[str] = []
        self._is_in_step = True  # with the other ranks: no message of an earlier fill is in flight
        self._has_begun = False  # `begin` was called last, so `fill` may follow
        self._costs = Costs()  # of the current fill, or of the last one
        self._buckets: Sequence[Bucket] = ()  # buckets of the fill, without skipped ones
        # Bucket index -> bucket whose messages start during its commit.
        self._following: Mapping[int, Bucket] = {}
        # Groups of the last fill, or those that stayed at the release after it.
        self._live: frozenset[str] = frozenset()
        incomplete = sorted(groups.difference(*self._groups))
        if incomplete:
            names = first_of(incomplete, _NUM_NAMED)
            raise PlanError(
                [
                    f"no bucket completes groups {names} of rank {router.rank}; "
                    "build the plan from the layouts of this engine"
                ]
            )

    def groups_of(self, buckets: Collection[int]) -> list[str]:
        """Return this rank's groups of these buckets."""
        return [group for index in sorted(buckets) for group in self._groups[index]]

    def gone(self) -> list[bool]:
        """Return by bucket whether a group of it is not live, or voided by the engine."""
        live = self._live.intersection(self._weights.committed())
        return [not live.issuperset(groups) for groups in self._groups]

    def begin(self, skipped: Collection[int] = (), *, whole: bool = True) -> None:
        """Prepare the next `fill` on this rank. No collective.

        `fill` may follow only after all ranks have succeeded here: a rank that fails here cannot
        notify ranks that are already filling.

        Args:
            skipped: indexes of buckets to leave out, on all ranks; their groups must have stayed.
            whole: send no deltas, on all ranks: one may not hold the previous weights.

        Raises StateError unless empty, and if an earlier fill was interrupted while it notified the
        other ranks.
        """
        self._has_begun = False
        if self.state is not ContainerState.EMPTY:
            raise StateError(
                f"the weight container is {self.state.value}; release() it before the next fill",
                code="container-not-empty",
            )
        if not self._is_in_step:
            raise StateError(
                f"rank {self._router.rank} was interrupted while it notified "
                "the other ranks of an interrupt: messages of that switch may be in flight. "
                "The job cannot go on; the training weights are whole",
                code="interrupted-twice",
            )
        gone = [group for group in self.groups_of(skipped) if group not in self._live]
        if gone:
            raise StateError(
                f"groups {first_of(gone, _NUM_NAMED)} were not kept: "
                "their buckets cannot be skipped",
                code="group-not-kept",
            )
        self._step = "before the first bucket"
        self._filling = []
        self._buckets = [bucket for bucket in self._plan.buckets if bucket.index not in skipped]
        # Messages of a bucket may not start if those of the bucket before use the same slot.
        # With 2 slots buckets 3 and 5 use the same one, if 4 is skipped.
        self._following = {
            bucket.index: next_bucket
            for bucket, next_bucket in pairwise(self._buckets)
            if (next_bucket.index - bucket.index) % NUM_SLOTS
        }
        self._costs = Costs()
        self._costs.seconds.update(dict.fromkeys(PHASES, 0.0))
        counts = self._costs.counts
        counts["bytes_least"] = sum(
            bucket.least.get(self._router.rank, 0) for bucket in self._buckets
        )
        counts["bytes_skipped"] = sum(
            transfer.nbytes
            for index in skipped
            for transfer in self._plan.buckets[index].counted()
            if transfer.dst_rank == self._router.rank
        )
        self._router.num_met = 0
        self._router.begin(whole=whole)
        self._has_begun = True

    @torch.no_grad()
    def fill(
        self,
        source: FlatBuffers,
        fence: ReleaseFence | None = None,
        verification: Verification | None = None,
    ) -> Costs:
        """Fill the inference weights from `source`, bucket by bucket. All ranks call it.

        The caller fences before the call (all sources are final) and, without `fence`, after it (no
        rank reads the sources any more).

        Args:
            source: `TrainingWeights.buffers()`, by buffer name.
            fence: releases training memory after every bucket.
            verification: verification of this fill.

        Raises StateError without a preceding `begin`. After a failure the state is PARTIAL, and no
        peer waits for this rank. HybridEngineErrors and interrupts are raised as they are, other
        errors as ReshardError.
        """
        if not self._has_begun:
            raise StateError("begin() comes before each fill()", code="fill-without-begin")
        try:
            # Out of step until the fill ends, or until the other ranks were notified of a failure.
            self._is_in_step = self._num_ranks == 1
            self._has_begun = False
            self.state = ContainerState.PARTIAL
            self._live = frozenset()
            self._router.prepare()
            for bucket in self._buckets:
                with span("bucket", index=bucket.index, bytes=bucket.nbytes):
                    self._fill_bucket(bucket, source, fence, verification)
            self._step = "after the last bucket"
            self._filling = []
            if fence is not None:
                fence.finish()
            self._weights.finish_fill()
            self._costs.add(self._router.trim())
            self._is_in_step = True
        except BaseException as error:
            where = f"rank {self._router.rank}, {self._step}"
            self._abandon(f"{where}: {type(error).__name__}: {error}", fence)
            self._is_in_step = True
            if isinstance(error, HybridEngineError) or not isinstance(error, Exception):
                raise
            groups = f", groups {first_of(self._filling, _NUM_NAMED)}" if self._filling else ""
            raise ReshardError(
                f"{where}{groups}: {type(error).__name__}: {error}. "
                "The inference weights are partly filled; release() them",
                code="fill-failed",
            ) from error
        self._live = frozenset(self.groups_of(range(len(self._groups))))
        self.state = ContainerState.FILLED
        return self._costs

    def release(self, keep: Collection[str] = ()) -> None:
        """Release the inference weights, also after a failed fill. Idempotent; ends in EMPTY.

        `keep`: groups of this rank that may stay unchanged; after a failed fill none stays.
        """
        self._has_begun = False
        if self.state is ContainerState.EMPTY and self._live.issubset(keep):
            return
        kept = self._live.intersection(keep)
        # In case the engine's release fails midway.
        self._live = frozenset()
        self.state = ContainerState.PARTIAL
        if kept:
            self._weights.release(kept)
        else:
            self._weights.release()
        self._live = kept
        self.state = ContainerState.EMPTY

    def _fill_bucket(
        self,
        bucket: Bucket,
        source: FlatBuffers,
        fence: ReleaseFence | None,
        verification: Verification | None,
    ) -> None:
        costs = self._costs
        groups = self._groups[bucket.index]
        self._filling = groups

        def begin(phase: str) -> str:
            self._step = f"bucket {bucket.index}, phase {phase}"
            return phase

        with costs.timed(begin("allocate")):
            destination = self._weights.allocate(groups) if groups else {}
        if fence is not None:
            # Only after `allocate`: vLLM's wake-up waits for everything queued on the device, also
            # for these copies.
            begin("release")
            fence.begin()
        begin("transfer")
        following = self._following.get(bucket.index)
        costs.add(self._router.run(bucket, source, destination, following))
        if fence is not None:
            begin("release")
            fence.sent(bucket.index)
        if verification is not None:
            # Directly before the commit, so that nothing can change the bytes in between.
            begin("verify")
            verification.filled(bucket, source, destination)
        with costs.timed(begin("commit")):
            if groups:
                self._weights.commit(groups)

    def _abandon(self, reason: str, fence: ReleaseFence | None) -> None:
        """Notify the peers, which may wait in each remaining bucket, and free messages' memory."""
        remaining = self._buckets[self._router.num_met :]
        # The engine comes first: other ranks may wait in its commit, and not reach the buckets.
        steps: list[Callable[[], object]] = [self._weights.abandon]
        if fence is not None:
            steps.append(fence.abandon)
        steps += [
            partial(self._router.abandon, bucket, reason, self._following.get(bucket.index))
            for bucket in remaining
        ]
        if fence is not None:
            steps.append(fence.drain)
        steps.append(self._router.trim)
        failures: list[Exception] = []
        for step in steps:
            # The other steps still run: one dead group must not keep peers from being notified by
            # the others.
            with collecting(failures):
                step()
        if failures:
            logger.warning(
                "the fill could not be abandoned everywhere; peers end by their timeout: %s",
                failures[0],
            )
