"""The switch between training and inference.

                 params   grads, optimizer   inference weights
    TRAIN        device   device             released
    FORWARD      device   host *             released
    INFER        host *   host *             device
    IDLE         host *   host *             released          (* where the configuration asks to offload them)

The phases of a switch are in the package's docstring; each ends with an agreement of all ranks. The device holds at
most the larger of training state and inference weights, and a few buckets. (With `incremental`, up to `incremental_mb`
of inference weights stay: deliveries.py.) A failure restores the state before; the training weights are only ever
read, and those that left come back. From the first thing that leaves to the last that is there the state is
INTERRUPTED: so it is what an exception leaves that nobody may hold up (Ctrl-C), and the next switch starts from that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import LostRankError, ReshardError, StateError
from hybrid_engine.memory.offload_items import KINDS, Kind
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.planning.plan import ReshardPlan
from hybrid_engine.ports import BucketFollower, InferenceCaches, InferenceWeights, Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.forks import Ends
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_defaults import torch_defaults
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch.computation import Computation
from hybrid_engine.switch.deliveries import Delivery, Digests, parts_of
from hybrid_engine.switch.entered import Contexts, Entered
from hybrid_engine.switch.hooks import SwitchHooks
from hybrid_engine.switch.prefetch import Prefetcher, resident_nbytes, total
from hybrid_engine.switch.release_fence import ReleaseFence
from hybrid_engine.switch.rendezvous import Connection, connect
from hybrid_engine.switch.report import ReshardReport, SwitchTally
from hybrid_engine.switch.states import NEEDED_KINDS, State, require, resident_kinds
from hybrid_engine.switch.verifier import Verifier
from hybrid_engine.switch.weight_container import WeightContainer
from hybrid_engine.tracing.recording import count, span
from hybrid_engine.tracing.timeline import timeline_of
from hybrid_engine.transports.router import TransportSet

logger = logging.getLogger("hybrid_engine")

_ALL_KINDS = frozenset(KINDS)


class ShardingManager(SwitchHooks):
    """Moves one set of devices between training and inference. All methods are collective.

    Args:
        trainer: whose weights are read, and whose state leaves the device.
        inference: the weights that are written.
        caches: the inference engine's caches.
        offloader: takes the trainer's state off the device and back.
        config: which kinds to offload, transport, bucket size.
        job: of all ranks; outlives this object.
        training_layouts: of all ranks, where they are known (`rendezvous.gather_layouts`).

    The plan is made once, here; a later switch that finds the training weights elsewhere raises.
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
        training_layouts: Sequence[Layout] | None = None,
    ) -> None:
        super().__init__()
        self.trainer, self.training, self.inference, self.caches = trainer, trainer.weights, inference, caches
        self.offloader, self.config, self.job = offloader, config, job
        self.state = State.TRAIN
        self.last_report: ReshardReport | None = None
        self._contexts: Contexts = []
        self._digested: tuple[object | None, Digests] = None, ()  # what was read of parameters before a departure
        self._tally = SwitchTally()
        self._prefetcher = Prefetcher(offloader, inference, config, job.device, caches.taken_before)
        self._connection: Connection | None = None
        self._timeline = timeline_of(config.trace, job)
        with Ends() as undo, self._traced("set-up"):
            connection = connect(
                job,
                self.training,
                inference,
                config,
                undo,
                may_stay_unread=trainer.unserved,
                frozen=lambda: trainer.frozen,
                source_layouts=training_layouts,
                timed=self._tally.timed,
            )
            self._computation = Computation(trainer, caches, job, config.check_compute)
            with self._phase("release"):
                inference.release()
            with self._phase("onload"):
                offloader.onload(KINDS)
            self._connection, self._ends = connection, undo.pop_all()
            regions, mode = connection.regions, config.verify
            self._verifier = None if regions is None or mode == "off" else Verifier(regions, job, mode)
        self._setup_seconds = dict(self._tally.seconds)
        planned = connection.plan.bytes_by_rank.get(job.rank)
        self._filled_nbytes = planned.own + planned.received if planned else 0  # of inference weights; measured later

    @property
    def plan(self) -> ReshardPlan:
        """Of this rank. Raises StateError when closed, as do `router` and `container`."""
        return self._require_open().plan

    @property
    def router(self) -> TransportSet:
        """The transports."""
        return self._require_open().router

    @property
    def container(self) -> WeightContainer:
        """The inference weights, as the switch fills them."""
        return self._require_open().container

    def entered(self, state: State) -> AbstractContextManager[None]:
        """Be in `state` inside the context. The state is kept at the end: the next context switches if it must.

        Raises StateError inside another state's context. IDLE frees the device for a model beside the actor, inside any
        context: then that one's state is back at the end, but for errors.
        """
        return Entered(state, self.enter, self._contexts)

    def enter(self, target: State) -> ReshardReport | None:
        """Switch to `target`; None when it is the present state already.

        Raises on all ranks when any rank fails. Then the state before is restored (IDLE if inference weights were lost
        on the way; INTERRUPTED if restoring failed too, and after Ctrl-C); every later switch starts from what is
        really there. When only an end hook failed, the switch stands. After a LostRankError no switch can follow.
        StateError where ranks ask for different states.
        """
        self._require_open()
        if not self.job.agreement.is_same([list(State).index(self.state)], f"entering {target.context}"):
            self.state = State.INTERRUPTED  # for some ranks Ctrl-C came before the end of a switch, for others after
        if target is self.state:
            return None
        with self._traced(f"{self.state.value}->{target.value}"), torch_defaults():
            return self._enter(target)

    def _enter(self, target: State) -> ReshardReport:
        before, started = self.state, time.perf_counter()
        setup = self._setup_seconds if self.last_report is None else {}  # the first report tells what planning took
        came = self._prefetcher.nbytes
        self._tally = SwitchTally(seconds=dict(setup), onloaded=came, prefetched=came, peak=self._prefetcher.peak)
        self._prefetcher.reset()
        with self._phase("start hooks"):
            self._call_start_hooks(before, target)
        self.state, self._computation.is_asking = State.INTERRUPTED, False
        try:
            self._switch(before, target)
        except Exception as error:
            if not isinstance(error, LostRankError):
                self._restore(before, target, error)
            raise
        self.state = target
        self._tally.seconds_hidden = self.offloader.take_hidden_seconds()
        self._prefetcher.switched(before, target, self._tally.peak)
        direction, seconds = f"{before.value}->{target.value}", time.perf_counter() - started
        self.last_report = report = self._tally.report(direction, self.trainer.version, seconds)
        logger.log(logging.INFO if self.job.rank == 0 else logging.DEBUG, "%s", report)
        with self._phase("end hooks"):
            self._call_end_hooks(report)
        return report

    def prefetch(self, kinds: Iterable[Kind] = KINDS) -> None:
        """Begin to bring training state back while the last completions are generated, in state INFER.

        Memory: theirs beside the inference weights', so name what fits. The copies run on a side stream on CUDA, in a
        thread on the CPU. Raises StateError in any other state, OffloadError when memory runs out; both lose nothing.
        """
        self.require(State.INFER)
        with self.job.agreement.phase("prefetch"):
            self._prefetcher.bring(kinds)

    def near_end(self) -> None:
        """A rollout is nearly drawn: in INFER, bring what fits of training state. No collective; logs what fails."""
        if self._connection is not None and self.state is State.INFER:
            self._prefetcher.begin()

    def require(self, *states: State) -> None:
        """Raise StateError unless the present state is one of these; closed, there is no state."""
        self._require_open()
        require(self.state, states)

    def require_kinds(self, kinds: Iterable[str]) -> None:
        """Raise StateError unless the present state needs these kinds of training state on the device."""
        if self._computation.is_asking and {*kinds} == {"param"}:  # before anything leaves
            return
        require(self.state, [state for state, needed in NEEDED_KINDS.items() if needed.issuperset(kinds)])

    def _switch(self, before: State, target: State) -> None:
        with self._phase("survey"):
            self._note_peak()
        if before not in (State.TRAIN, State.FORWARD):  # IDLE may follow a release that failed
            self._release_inference()
        delivery = self._fill_inference() if target is State.INFER else None
        if delivery is None and before is State.TRAIN:  # what is pending would write what leaves, or is only read
            self._prepare()
        wanted = resident_kinds(target, self.config)
        self._offload(_ALL_KINDS - wanted)
        if delivery is not None:
            self._digested = self.offloader.departure("param"), delivery.digests
        self._onload(wanted, read_only=target is not State.TRAIN)
        if delivery is not None:
            with self._phase("resume"):
                self.caches.wake_kv_cache()
                self.caches.reset_caches()
            self._computation.compare(self._tally)

    def _fill_inference(self) -> Delivery:
        if self._computation.is_due:
            self._onload({"param"}, read_only=True)
            self._computation.ask_trainer(self._tally)
        leaving = _ALL_KINDS - resident_kinds(State.INFER, self.config) - {"param"}
        (self._begin_offload if self.config.prefetch == "auto" else self._offload)(leaving)
        delivery = self._next_delivery()
        if not self.offloader.is_offloaded("param"):
            with self._phase("check"):
                if self.config.check_nan:
                    self._require_open().check_values(self.training, delivery)
        if self.config.prefetch == "auto":
            self._make_room(leaving)
        if delivery.skipped and self.config.offload_train_param:
            with self._phase("offload"):
                unread = parts_of(self.training.buffers(), delivery.unread)
                self._tally.offloaded += self.offloader.offload_parts("param", unread)
        self._forget_deliveries()
        with self._phase("fill"):
            verification = None if self._verifier is None else self._verifier.begin()
            buffers = self.training.buffers()
            follower = self._follower(buffers, delivery)
            with ExitStack() as observing:
                if verification is not None:
                    verification.skipped(self.plan.buckets[index] for index in delivery.skipped)
                    observing.enter_context(self.inference.proving(verification.tensors, verification.unproven))
                self._tally.add_fill(self.container.fill(buffers, follower, verification, delivery.skipped))
            self._note_peak()
            self._filled_nbytes = self.inference.resident_nbytes()
        if verification is not None:
            self._tally.add_verified(verification.conclude())
        if (deliveries := self._require_open().deliveries) is not None:
            deliveries.note(delivery)
        return delivery

    def _forget_deliveries(self) -> None:
        if (deliveries := self._require_open().deliveries) is not None:
            deliveries.forget()

    def _begin_offload(self, kinds: frozenset[Kind]) -> None:
        # gradients leave now; the rest leaves when `_make_room` needs its memory, or after the fill
        with self._phase("offload"):
            self.offloader.begin_offload(kinds)
            self._tally.offloaded += total(self.offloader.offload(kinds & {"grad"}))

    def _make_room(self, kinds: frozenset[Kind]) -> None:
        """What began to leave goes, unless it and the inference weights fit into what was taken before the switch."""
        with self._phase("offload"):
            if resident_nbytes(self.offloader) + self._filled_nbytes > self._tally.peak:
                self._tally.offloaded += total(self.offloader.offload(kinds))

    def _next_delivery(self) -> Delivery:
        """Agree on what all ranks send, bring parameters unless that is nothing, and release what it renews."""
        connection = self._require_open()
        if (deliveries := connection.deliveries) is None:
            self._bring_parameters()
            return Delivery((), frozenset(), {}, connection.releases)
        departure, digests = self._digested
        is_known = departure is not None and departure is self.offloader.departure("param")
        (must_read,) = self.job.agreement.any_of([not is_known], "compare")
        if must_read:
            self._bring_parameters()
        with self._phase("compare"):
            if must_read:
                digests = deliveries.digests(self.training.buffers())
            reasons = deliveries.reasons(digests, self.container.kept())
        flags = self.job.agreement.any_of(reasons, "compare")
        with self._phase("release"):
            delivery = deliveries.next(digests, flags, connection.releases)
            self.container.release(deliveries.groups_of(delivery.skipped))
        if not must_read and len(delivery.skipped) < len(self.plan.buckets):
            self._bring_parameters()
        return delivery

    def _bring_parameters(self) -> None:
        self._onload({"param"}, read_only=True)
        self._prepare()

    def _prepare(self) -> None:
        # where gathers overlap, the others wait in one for a rank that fails here
        with self._phase("prepare", SHORT_PATIENCE):
            self.training.prepare()
            if self.job.device.type == "cuda":  # peers read without waiting for what is queued on this device
                torch.cuda.synchronize(self.job.device)

    def _follower(self, buffers: Mapping[str, torch.Tensor], delivery: Delivery) -> BucketFollower | None:
        """Lets parameters go bucket by bucket during a fill, and notes the peak; None where they are to stay."""
        if not self.config.offload_train_param:
            return None
        training = resident_nbytes(self.offloader) + self._tally.offloaded

        def save_bucket(number: int) -> None:
            self.offloader.save_parts("param", parts_of(buffers, delivery.releases[number]))

        def free_bucket(number: int) -> None:
            self._note_peak(training - self._tally.offloaded)
            parts = parts_of(buffers, delivery.releases[number])
            self._tally.offloaded += self.offloader.offload_parts("param", parts)

        return ReleaseFence(
            self.job.rank,
            self._require_open().fence_group,
            self.job.agreement.pace(self.job.hosts),
            [bucket.index for bucket in self.plan.buckets if bucket.index not in delivery.skipped],
            save_bucket,
            free_bucket,
            self.job.timeout_seconds,
        )

    def _release_inference(self) -> None:
        deliveries = self._require_open().deliveries
        with self._phase("release"):
            if deliveries is None:
                self.container.release()
            else:
                self._tally.kept = deliveries.release(self.container)

    def _offload(self, kinds: Collection[Kind]) -> None:
        with self._phase("offload"):
            self._tally.offloaded += total(self.offloader.offload(kinds))

    def _onload(self, kinds: Collection[Kind], *, read_only: bool) -> None:
        with self._phase("onload"):
            self._tally.onloaded += total(self.offloader.onload(kinds, read_only=read_only))
            self._note_peak()

    def _restore(self, before: State, target: State, error: Exception) -> None:
        """After a failed switch: drop what was filled and bring back what `before` needs, but for inference weights."""
        self.offloader.take_hidden_seconds()
        restored = before if before in (State.TRAIN, State.FORWARD) else State.IDLE
        self._forget_deliveries()
        try:
            with self.job.agreement.phase("restore"):
                self.container.release()
                wanted = resident_kinds(restored, self.config)
                self.offloader.offload(_ALL_KINDS - wanted)
                self.offloader.onload(wanted)
        except LostRankError as lost:
            raise LostRankError(f"{error}\nThe state before could not be restored: {lost}") from error
        except Exception as restore_error:
            away = [kind for kind, nbytes in self.offloader.away_nbytes().items() if nbytes]
            raise ReshardError(
                f"switch {before.value}->{target.value} failed ({error}) and so did the way back ({restore_error}); "
                f"in host memory: {', '.join(away) or 'nothing'}; the state is {self.state.value}, and the next switch "
                "starts from it"
            ) from error
        self.state = restored
        logger.error("[Reshard] %s->%s failed; state is %s: %s", before.value, target.value, restored.value, error)

    @contextmanager
    def _phase(self, name: str, patience: float | None = None) -> Iterator[None]:
        """Time a phase and end it with all ranks agreeing that it succeeded; see `Agreement.phase`."""
        with self._tally.timed(name), ExitStack() as arriving, self.job.agreement.phase(name, patience):
            yield
            arriving.enter_context(span("wait"))  # left when all ranks have arrived

    def _traced(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self._timeline is None else self._timeline.switch(name)

    def _note_peak(self, training: int | None = None) -> None:
        """Look at what is on the device; `training`: bytes of training state there, if they are known."""
        training = resident_nbytes(self.offloader) if training is None else training
        inference = self.inference.resident_nbytes()
        count("device bytes", training=training, inference=inference)
        self._tally.peak = max(self._tally.peak, training + inference)

    def _require_open(self) -> Connection:
        if self._connection is None:
            raise StateError("the switch was closed; build the engine anew")
        return self._connection

    def close(self) -> None:
        """No switch any more: give back the transports' mappings and memory, and end the process groups. Idempotent."""
        self._connection = None
        self._ends.close()
