"""The switch between training and inference.

                 params   grads, optimizer   inference weights
    TRAIN        device   device             released
    FORWARD      device   host *             released
    INFER        host *   host *             device
    IDLE         host *   host *             released            (* if configured to be offloaded)

The package's docstring lists the phases of a switch; each ends with an agreement of all ranks. The
device holds at most the larger of training state and inference weights, plus a few buckets, and
with `incremental` up to `incremental_mb` of inference weights. A failed switch restores the state
before it, or IDLE if inference weights were lost on the way; training weights are never written.
While state is moved the manager is INTERRUPTED, and stays so if restoring fails, or an exception
like KeyboardInterrupt escapes: the next switch recovers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import compress

import torch

from hybrid_engine.compute_check.logprob_check import ConfigModel, LogprobCheck
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import HybridEngineError, LostRankError, ReshardError, StateError
from hybrid_engine.layouts.memory import fitting_kinds, gib
from hybrid_engine.memory.offload_items import KINDS, Kind
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.planning.plan import DEVICE_GBPS, Link
from hybrid_engine.ports import InferenceCaches, InferenceWeights, Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.communicators import IdleCommunicators, require_suspension
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.signals_and_forks import Ends
from hybrid_engine.ranks.torch_internals import torch_defaults
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.incremental import Selection
from hybrid_engine.switch.release_fence import ReleaseFence, parts_of
from hybrid_engine.switch.report import SLOWEST_RADIX, ReshardReport, costs_of_all
from hybrid_engine.switch.setup import connect
from hybrid_engine.switch.states import State, Switch
from hybrid_engine.tracing import timeline_of
from hybrid_engine.transports.copies import FlatBuffers

logger = logging.getLogger("hybrid_engine")


class ShardingManager(Switch):
    """Switch of one set of devices between training and inference. All methods are collective.

        manager = ShardingManager(trainer, weights, ...)   layouts and plan; nothing moves
        manager.start()                                    TRAIN; implied by the first switch
        for step in range(num_steps):
            with manager.entered(State.INFER): ...
            with manager.entered(State.TRAIN): ...
        manager.close()

    Args:
        trainer: its weights are read, and its state is offloaded.
        inference: inference weights, which are written.
        caches: caches of the inference engine.
        offloader: offloads and onloads the trainer's state.
        config: kinds to offload, transport, bucket size.
        job: job of all ranks; outlives this object.
        training_side: training layouts of all ranks, if known (`setup.gather_side`).
        within: see `Switch`.
        reference: compared with the trainer if the inference engine cannot be.

    The plan is made once, here; a later switch that finds the training weights elsewhere raises.
    Until `start` both sides keep their memory, and the state is INTERRUPTED.

    If the sides are separate processes and `release_weights` is false, the inference weights stay
    usable during training, except during a fill; a switch to INFER ends in TRAIN.

    Attributes:
        plan: this rank's plan.
        router: transports, connected for the plan.
        container: inference weights, as filled by the switch.
        has_written: the last `enter` has overwritten or released inference weights; otherwise they
            are unchanged.
    """

    def __init__(
        self,
        trainer: Trainer,
        inference: InferenceWeights,
        *,
        caches: InferenceCaches,
        offloader: Offloader,
        config: GenerateConfig,
        job: Job,
        training_side: Side | None = None,
        within: Switch | None = None,
        reference: ConfigModel | None = None,
    ) -> None:
        super().__init__(trainer, offloader, config, job, within)
        self.training = trainer.weights
        self.inference = inference
        self.caches = caches
        self._shares_memory = False
        self.has_written = False
        self._communicators = IdleCommunicators(lambda: trainer.process_groups)
        if config.suspend_communicators and job.device.type == "cuda" and trainer.process_groups:
            require_suspension("generate_config.suspend_communicators")
        self._timeline = timeline_of(config.trace, job)
        with Ends() as undo, self._traced("set-up"):
            connection = connect(job, trainer, inference, config, undo, self._tally, training_side)
            self._check: LogprobCheck = LogprobCheck(
                trainer, caches, job, config.check_compute, reference
            )
            self._ends = undo.pop_all()
            # The state stays, and its user may do without the guard.
            self._ends.callback(offloader.wait)
        self._of_rank = connection.of_rank
        self.plan = connection.of_rank.plan
        self.router = connection.router
        self.container = connection.container
        self._fence_group = connection.fence_group
        self._is_closed = False
        self._setup_seconds: Mapping[str, float] = {}

    def start(self) -> None:
        """Release the inference weights as well; else as the base class.

        After a failure the manager is still not started; it can be started again, or closed.
        """
        if self._is_closed:
            raise StateError("the switch was closed; build a new engine", code="switch-is-closed")
        if self._is_started:
            return
        with self._traced("start"), torch_defaults():
            if not self._keeps_serving:
                with self._phase("release"):
                    self.has_written = True
                    self.inference.release()
            self._bring_back()
        self._setup_seconds = dict(self._tally.seconds)

    def enter(self, target: State) -> ReshardReport | None:
        """See the base class. No switch can follow a LostRankError."""
        self.has_written = False
        if self._of_rank.is_apart and not self._is_closed:
            # A rank whose process refused the switch takes part in no collective, so meet through
            # the store first.
            self.job.meet()
        return super().enter(target)

    def _enter(self, before: State, target: State) -> ReshardReport:
        direction = f"{before}->{target}"
        with self._traced(direction), torch_defaults():
            started = time.perf_counter()
            self._begin(before, target)
            # The first report includes the seconds of set-up.
            self._tally.seconds.update(self._setup_seconds if self.last_report is None else {})
            try:
                with self.offloader.owner_rests():
                    self._switch(before, target)
            except LostRankError:
                raise
            except Exception as error:
                with self.offloader.owner_rests():
                    self._restore(before, direction, error)
                raise
            report = self._report(direction, started)
            logger.log(logging.INFO if self.job.rank == 0 else logging.DEBUG, "%s", report)
            return self._end(State.TRAIN if self._keeps_serving else target, report)

    def _switch(self, before: State, target: State) -> None:
        # IDLE may follow a release that failed, so inference weights may be left there too.
        if before not in (State.TRAIN, State.FORWARD) and not self._keeps_serving:
            self._release_inference()
        self._resume_communicators()
        selection = self._fill_inference() if target is State.INFER else None
        # A fill has done it in `prepare`, unless no parameters had to come back.
        if selection is None and before is State.TRAIN:
            self._finish_pending()
        self._move_state(target)
        if selection is not None:
            self._of_rank.incremental.note_departure(self.offloader.departure("param"))
            self._settle_late_kinds()
            with self._phase("resume"):
                self.caches.wake_kv_cache()
                self.caches.reset_caches()
            if self._check.is_pending:
                with self._tally.timed("compute"):
                    self._check.compare()

    def _move_state(self, target: State) -> None:
        if target is State.IDLE:
            self._late_kinds = frozenset()
        super()._move_state(target)
        if target is State.IDLE:
            # Others may use the device: a critic trains.
            with self._phase("give back"):
                self._shares_memory = False
                self.inference.give_back()
            with self._phase("give back"):
                self.router.trim()

    def _fill_inference(self) -> Selection:
        """Fill inference weights; offload gradients, optimizer state and, by bucket, parameters."""
        of_rank = self._of_rank
        if self._check.is_due:
            self._probe_trainer()
        self._fit_beside_inference()
        self._offload(self._leaving - {"param"})
        selection = self._next_selection()
        if not self.offloader.is_offloaded("param"):
            with self._phase("check"):
                if self.config.check_nan:
                    self.training.check_values(selection.unread)
                    of_rank.ranges.require(self.training)
                digests = of_rank.replicas.digests(self.training)
            with self._tally.timed("check"):
                of_rank.replicas.require_equal(digests, self.job)
        of_rank.incremental.forget()
        if self.config.suspend_communicators and not self._keeps_serving:
            with self._phase("suspend"):
                self._tally.counts["bytes_suspended"] = self._communicators.suspend()
        if self._keeps_serving or self.config.incremental != "off":
            # As late as possible: servers answer requests with these weights until now.
            with self._phase("release"):
                self.has_written = True
                self.container.release(self.container.groups_of(selection.skipped))

        with ExitStack() as observing:
            with self._phase("begin"):
                verification = None
                if of_rank.verifier is not None:
                    verification = of_rank.verifier.begin(self.job)
                    verification.skipped(self.plan.buckets[index] for index in selection.skipped)
                    proof = self.inference.proving(verification.tensors, verification.unproven)
                    observing.enter_context(proof)
                self._share_memory()
                buffers = self.training.buffers()
                fence = self._fence(buffers, selection)
                container = self.container
                container.begin(selection.skipped, whole=selection.whole)
            with self._phase("fill") as ballot:
                fill = container.fill(buffers, fence, verification)
                observing.close()
                if fence is not None:
                    self._tally.counts["bytes_offloaded"] += fence.released_nbytes
                self._note_peak()
                work = int(sum(fill.seconds.values()) * 1e6)
                # The end of the phase replaces it by the largest number of all ranks.
                ballot.number = work * SLOWEST_RADIX + self.job.rank

        gbps: Mapping[Link, float] = {}
        if of_rank.is_apart:
            # A trainer without inference weights receives nothing: its report shows the sums of all
            # ranks.
            fill = costs_of_all(fill, self.job.agreement)
        elif torch.cuda.is_available():
            gbps = DEVICE_GBPS.get(torch.cuda.get_device_name(), {})
        self._tally.add_fill(fill, gbps, ballot.number)
        if verification is not None:
            verification.conclude()
            self._tally.add(verification.costs)
        of_rank.incremental.note(selection)
        return selection

    @property
    def _leaving(self) -> frozenset[Kind]:
        return frozenset(KINDS) - self._resident(State.INFER)

    def _undecided(self) -> list[Kind]:
        """Return the kinds set to `auto`, until `_fit_beside_inference` has decided."""
        if self._fitting is not None:
            return []
        return [kind for kind, choice in self.config.offloads.items() if choice == "auto"]

    def _fit_beside_inference(self) -> None:
        """Decide, once there is optimizer state, which kinds set to `auto` stay on the device.

        They stay if each rank has room for them beside vLLM's share of its GPU; on the CPU, always.
        With sides in separate processes they leave, because this one may not see vLLM's device.
        """
        automatic = self._undecided()
        if not automatic or self._of_rank.is_apart or not self.trainer.version:
            return
        with self._phase("fit"):
            away = self.offloader.away_nbytes()
            resident = self.offloader.resident_nbytes()
            nbytes = {kind: away[kind] + resident[kind] for kind in automatic}
            room = math.inf
            if self.job.device.type == "cuda":
                torch.cuda.empty_cache()
                free, total = torch.cuda.mem_get_info()
                # What will be free: this much now, what leaves, and what
                # vLLM's share counts already.
                free += sum(resident[kind] for kind in self._leaving)
                free += self.inference.resident_nbytes()
                room = free - self.config.share_of_device * total
            fitting = fitting_kinds(nbytes, room)
        leave = self.job.agreement.any_of([kind not in fitting for kind in automatic], "fit")
        self._fitting = frozenset(automatic).difference(compress(automatic, leave))
        sizes = ", ".join(f"{kind} ({gib(nbytes[kind])})" for kind in sorted(self._fitting))
        logger.log(
            logging.INFO if self.job.rank == 0 else logging.DEBUG,
            "[Reshard] on the device while vLLM generates: %s",
            sizes or "no training state",
        )

    @property
    def _may_share_memory(self) -> bool:
        """True if inference may use the memory that training leaves.

        Not with weights that stay (`incremental`), nor if the sides are separate processes.
        """
        is_alone = self._of_rank.is_apart or self.config.incremental != "off"
        # A kind that stays must keep its memory.
        return not is_alone and not self._undecided()

    def _share_memory(self) -> None:
        """Let inference use the memory that training leaves, once all of its state exists."""
        if not self._shares_memory and self._may_share_memory:
            chunks = self.offloader.chunks(self._leaving)
            if chunks.keys() == self._leaving:
                self._shares_memory = self.inference.share_memory(chunks, self._leave)

    def _settle_late_kinds(self) -> None:
        """Let what is saved leave behind generation from now on, if all ranks share memory.

        Parameters only if all of theirs is shared: else they leave bucket by bucket.
        """
        if self.job.device.type != "cuda" or not self._may_share_memory or self._late_kinds:
            return
        params = self.offloader.chunks({"param"}).get("param", ())
        is_whole = self._shares_memory and all(memory.is_late for memory in params)
        waits, in_buckets = self.job.agreement.any_of(
            [not self._shares_memory, not is_whole], "late kinds"
        )
        if not waits:
            # Gradients are dropped, so they have no copies that could go on behind generation.
            self._late_kinds = self._leaving - ({"grad", "param"} if in_buckets else {"grad"})

    def _leave(self) -> None:
        # Refused from here on, also after a failure and another attempt.
        with self.offloader.owner_rests():
            self.offloader.offload(self._late_kinds)

    def _resume_communicators(self) -> None:
        # On all ranks, including those that have suspended none: the phases are collective.
        if self.config.suspend_communicators:
            with self._phase("room for communicators"):
                self._communicators.require_room()
            with self._phase("resume communicators"):
                self._communicators.resume()

    def _next_selection(self) -> Selection:
        """Agree on the buckets that all ranks send, and onload parameters to send."""
        incremental = self._of_rank.incremental
        if self.config.incremental == "off":
            self._bring_parameters()
            return incremental.everything
        # Parameters that were off the device since the last switch have not changed, and need not
        # be read.
        digests = incremental.digests_since(self.offloader.departure("param"))
        (must_read,) = self.job.agreement.any_of([digests is None], "compare")
        if must_read:
            self._bring_parameters()
        with self._phase("compare"):
            if must_read or digests is None:
                digests = incremental.digests(self.training.buffers())
            reasons = incremental.reasons(digests, self.container)
        flags = self.job.agreement.any_of(reasons, "compare")
        selection = incremental.next(digests, flags)
        if not must_read and len(selection.skipped) < len(self.plan.buckets):
            self._bring_parameters()
        return selection

    def _bring_parameters(self) -> None:
        self._onload({"param"}, read_only=True)
        # Short patience: with overlapping gathers, other ranks block in a gather if one rank fails
        # here.
        with self._phase("prepare", SHORT_PATIENCE):
            self.training.prepare()
            # Peers read without waiting for this rank's stream. On the way to INFER the other
            # streams hold no training work since the first offload.
            if self.job.device.type == "cuda":
                torch.cuda.current_stream(self.job.device).synchronize()

    def _fence(self, buffers: FlatBuffers, selection: Selection) -> ReleaseFence | None:
        """Return a fence that offloads parameters by bucket; None if they stay on the device.

        They also stay, for now, in memory that they share: no weight gets it.
        """
        if "param" in self._resident(State.INFER) | self._late_kinds:
            return None
        if selection.unread:
            # Memory of what is not read leaves before the first bucket is allocated.
            unread = parts_of(buffers, selection.unread)
            self._tally.counts["bytes_offloaded"] += self.offloader.offload_parts("param", unread)
        training = self._training_nbytes()
        return ReleaseFence(
            self.job.rank,
            self._fence_group,
            self.job.agreement.pace(),
            self.offloader,
            buffers,
            selection.releases,
            lambda released: self._note_peak(training - released),
        )

    @property
    def _keeps_serving(self) -> bool:
        return self._of_rank.is_apart and not self.config.release_weights

    def _release_inference(self) -> None:
        with self._phase("release"):
            self.has_written = True
            if self.config.incremental == "off":
                self.container.release()
            else:
                kept = self._of_rank.incremental.release(self.container)
                self._tally.counts["bytes_kept"] = kept

    def _restore(self, before: State, direction: str, error: Exception) -> None:
        """Recover from a failed switch: release inference weights, onload the state of `before`."""
        # INFER needs weights that are released below, so it becomes IDLE.
        restored = before if before in (State.TRAIN, State.FORWARD) else State.IDLE
        self.has_written |= not self._keeps_serving
        try:
            with self.job.agreement.phase("restore"):
                if self.has_written:
                    self.container.release()
            self._resume_communicators()
            self._move_state(restored)
        except LostRankError as lost:
            raise LostRankError(
                f"{error}\nThe state before could not be restored: {lost}",
                code="rank-lost-while-restoring",
            ) from error
        except Exception as restore_error:
            away = [kind for kind, nbytes in self.offloader.away_nbytes().items() if nbytes]
            raise ReshardError(
                f"switch {direction} failed ({error}) and so did "
                f"the way back ({restore_error}); in host memory: {', '.join(away) or 'nothing'}; "
                f"the state is {self.state.value}, and the next switch starts from it",
                code="restore-failed",
            ) from error
        self.state = restored
        logger.error("[Reshard] %s failed; state is %s: %s", direction, restored.value, error)

    def _traced(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self._timeline is None else self._timeline.switch(name)

    def close(self) -> None:
        """Close the transports with their mappings and memory, and end the process groups.

        Idempotent.
        """
        try:
            self._resume_before_close()
        finally:
            self._is_closed = True
            self._is_started = False
            self._ends.close()

    def _resume_before_close(self) -> None:
        """Resume the trainer's communicators, if all ranks close together: alone it would hang."""
        agreement = self.job.agreement
        is_alone = agreement.lost is not None or agreement.has_left
        if self._is_closed or not self.config.suspend_communicators or is_alone:
            return
        try:
            self._resume_communicators()
        except HybridEngineError as error:
            logger.warning("the communicators of training stay suspended: %s", error)
