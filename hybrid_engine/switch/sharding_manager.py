"""The switch between training and inference.

                 params   grads, optimizer   inference weights
    TRAIN        device   device             released
    FORWARD      device   host *             released
    INFER        host *   host *             device
    IDLE         host *   host *             released          (* where the configuration asks to offload them)

The phases of a switch are in the package's docstring; each ends with an agreement of all ranks. The device holds at
most the larger of training state and inference weights, and a few buckets. (With `incremental`, up to `incremental_mb`
of inference weights stay: incremental.py.) A failure restores the state before; the training weights are only ever
read, and those that left come back. From the first thing that leaves to the last that is there the state is
INTERRUPTED: so it is what an exception leaves that nobody may hold up (Ctrl-C), and the next switch starts from that.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Self

import torch

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import LostRankError, ReshardError, StateError
from hybrid_engine.memory.offload_items import KINDS, Kind
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.planning.plan import ReshardPlan
from hybrid_engine.ports import InferenceCaches, InferenceWeights, Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from hybrid_engine.ranks.torch_internals import torch_defaults
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.computation import Computation
from hybrid_engine.switch.incremental import Selection
from hybrid_engine.switch.prefetch import Prefetcher, resident_nbytes
from hybrid_engine.switch.release_fence import ReleaseFence, parts_of
from hybrid_engine.switch.rendezvous import Connection, connect
from hybrid_engine.switch.report import ReshardReport, SwitchTally
from hybrid_engine.switch.states import (
    NEEDED_KINDS,
    Hook,
    State,
    Switch,
    require,
    resident_kinds,
)
from hybrid_engine.switch.weight_container import WeightContainer
from hybrid_engine.tracing import count, span, timeline_of
from hybrid_engine.transports.router import TransportSet

logger = logging.getLogger("hybrid_engine")

_ALL_KINDS = frozenset(KINDS)


class ShardingManager(Switch):
    """Moves one set of devices between training and inference. All methods are collective.

        manager = ShardingManager(trainer, weights, ...)     layouts are exchanged, the plan is made; nothing moves
        manager.start()                                      TRAIN; the first switch does it, too
        for step in range(num_steps):
            with manager.entered(State.INFER): ...
            with manager.entered(State.TRAIN): ...
        manager.close()

    Args:
        trainer: whose weights are read, and whose state leaves the device.
        inference: the weights that are written.
        caches: the inference engine's caches.
        offloader: takes the trainer's state off the device and back.
        config: which kinds to offload, transport, bucket size.
        job: of all ranks; outlives this object.
        training_side: what all ranks hold for training, where that is known (`rendezvous.gather_side`).
        within: see `Switch`.

    The plan is made once, here; a later switch that finds the training weights elsewhere raises. Until `start` both
    sides have what they had before: the state is INTERRUPTED, since nobody has told where things are.

    Where the two sides are processes of their own and `release_weights` is false, inference weights serve on beside
    training: they are void from just before the first byte of a fill until its end, a switch to INFER ends in TRAIN,
    and trainers take their state back without the other side.

    Attributes:
        has_written: the last `enter` has overwritten or released inference weights; else they are as before.
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
    ) -> None:
        super().__init__(trainer, within)
        self.trainer, self.training, self.inference, self.caches = trainer, trainer.weights, inference, caches
        self.offloader, self.config, self.job = offloader, config, job
        self.state, self._is_started, self.has_written = State.INTERRUPTED, False, False
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
                source_side=training_side,
                timed=self._tally.timed,
            )
            self._computation = Computation(trainer, caches, job, config.check_compute)
            self._connection, self._ends = connection, undo.pop_all()
        self._setup_seconds: Mapping[str, float] = {}
        planned = connection.plan.bytes_by_rank.get(job.rank)
        self._filled_nbytes = planned.own + planned.received if planned else 0  # of inference weights; measured later

    @property
    def plan(self) -> ReshardPlan:
        """This rank's plan. Raises StateError when closed, as do `router` and `container`."""
        return self._require_open().plan

    @property
    def router(self) -> TransportSet:
        """The transports."""
        return self._require_open().router

    @property
    def container(self) -> WeightContainer:
        """The inference weights, as the switch fills them."""
        return self._require_open().container

    def start(self) -> None:
        """Bring training state to the device and release the inference weights: state TRAIN. Idempotent.

        After a failure the manager is as before the call: not started, and it can be started again, or closed.
        """
        self._require_open()
        if self._is_started:
            return
        with self._traced("start"), torch_defaults():
            if not self._serves_on:
                with self._phase("release"):
                    self.has_written = True
                    self.inference.release()
            with self._phase("onload"):
                self.offloader.onload(KINDS)
        self._setup_seconds = dict(self._tally.seconds)
        self.state, self._is_started = State.TRAIN, True

    def enter(self, target: State) -> ReshardReport | None:
        """Switch to `target`, from TRAIN where nothing was started; None when it is the present state already.

        Raises on all ranks when any rank fails. Then the state before is restored (IDLE if inference weights were lost
        on the way; INTERRUPTED if restoring failed too, and after Ctrl-C); every later switch starts from what is
        really there. When only an end hook failed, the switch stands. After a LostRankError no switch can follow.
        StateError where ranks ask for different states.
        """
        self.has_written = False
        if self._require_open().is_apart:  # one that was asked for it elsewhere, and refuses, is in no collective
            self.job.meet()
        self.start()
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
            with self.offloader.owner_rests():
                self._switch(before, target)
        except Exception as error:
            if not isinstance(error, LostRankError):
                self._restore(before, target, error)
            raise
        self.state = State.TRAIN if self._serves_on else target
        self._tally.seconds_hidden = self.offloader.take_hidden_seconds()
        self._prefetcher.switched(before, target, self._tally.peak)
        direction, seconds = f"{before.value}->{target.value}", time.perf_counter() - started
        self.last_report = report = self._tally.report(direction, self.trainer.version, seconds)
        logger.log(logging.INFO if self.job.rank == 0 else logging.DEBUG, "%s", report)
        with self._phase("end hooks"):
            self._call_end_hooks(report)
        return report

    def prefetch(self, kinds: Iterable[Kind] = KINDS) -> None:
        self.require(State.INFER)
        with self.job.agreement.phase("prefetch"):
            self._prefetcher.bring(kinds)

    def near_end(self) -> None:
        if self._connection is not None and self.state is State.INFER:
            self._prefetcher.begin()

    def require_kinds(self, kinds: Collection[str]) -> None:
        if not self._is_started or self._connection is None:
            return
        if self._computation.is_asking and {*kinds} == {"param"}:  # before anything leaves
            return
        require(self.state, [state for state, needed in NEEDED_KINDS.items() if needed.issuperset(kinds)])

    def _switch(self, before: State, target: State) -> None:
        with self._phase("survey"):
            self._note_peak()
        # IDLE may follow a release that failed
        if before not in (State.TRAIN, State.FORWARD) and not self._serves_on:
            self._release_inference()
        selection = self._fill_inference() if target is State.INFER else None
        if selection is None and before is State.TRAIN:  # what is pending would write what leaves, or is only read
            self._prepare()
        wanted = resident_kinds(target, self.config)
        self._offload(_ALL_KINDS - wanted)
        if selection is not None and (incremental := self._require_open().incremental) is not None:
            incremental.note_departure(self.offloader.departure("param"), selection)
        self._onload(wanted, read_only=target is not State.TRAIN)
        if selection is not None:
            with self._phase("resume"):
                self.caches.wake_kv_cache()
                self.caches.reset_caches()
            self._computation.compare(self._tally)

    def _fill_inference(self) -> Selection:
        if self._computation.is_due:
            self._onload({"param"}, read_only=True)
            self._computation.ask_trainer(self._tally)
        leaving = _ALL_KINDS - resident_kinds(State.INFER, self.config) - {"param"}
        (self._begin_offload if self.config.prefetch == "auto" else self._offload)(leaving)
        selection = self._next_selection()
        if not self.offloader.is_offloaded("param"):
            with self._phase("check"):
                if self.config.check_nan:
                    self._require_open().check_values(self.training, selection)
        if self.config.prefetch == "auto":
            self._make_room(leaving)
        if selection.skipped and self.config.offload_train_param:
            with self._phase("offload"):
                unread = parts_of(self.training.buffers(), selection.unread)
                self._tally.offloaded += self.offloader.offload_parts("param", unread)
        self._forget_sent()
        if self._serves_on:
            with self._phase("release"):
                self._release(selection)
        with ExitStack() as observing:
            with self._phase("begin"):
                verifier = self._require_open().verifier
                verification = None if verifier is None else verifier.begin()
                if verification is not None:
                    verification.skipped(self.plan.buckets[index] for index in selection.skipped)
                    observing.enter_context(self.inference.proving(verification.tensors, verification.unproven))
                buffers = self.training.buffers()
                fence = self._fence(buffers, selection)
                container = self.container
                container.begin(selection.skipped, whole=selection.whole)
            with self._phase("fill"):
                fill = container.fill(buffers, fence, verification)
                observing.close()
                self._tally.offloaded += fence.released_nbytes if fence is not None else 0
                self._note_peak()
                self._filled_nbytes = self.inference.resident_nbytes()
        # a trainer that receives nothing is to tell what the servers did
        self._tally.add_fill(fill.of_all(self.job.agreement) if self._require_open().is_apart else fill)
        if verification is not None:
            self._tally.add_verified(verification.conclude())
        if (incremental := self._require_open().incremental) is not None:
            incremental.note(selection)
        return selection

    def _forget_sent(self) -> None:
        if (incremental := self._require_open().incremental) is not None:
            incremental.forget()

    def _begin_offload(self, kinds: frozenset[Kind]) -> None:
        # gradients leave now; the rest leaves when `_make_room` needs its memory, or after the fill
        with self._phase("offload"):
            self.offloader.begin_offload(kinds)
            self._tally.offloaded += self.offloader.offload(kinds & {"grad"}).total_nbytes

    def _make_room(self, kinds: frozenset[Kind]) -> None:
        """Offload what began to leave, unless it and the inference weights fit into what was taken before."""
        with self._phase("offload"):
            if resident_nbytes(self.offloader) + self._filled_nbytes > self._tally.peak:
                self._tally.offloaded += self.offloader.offload(kinds).total_nbytes

    def _next_selection(self) -> Selection:
        """Agree on what all ranks send, bring parameters unless that is nothing, and release what it renews."""
        connection = self._require_open()
        if (incremental := connection.incremental) is None:
            self._bring_parameters()
            return Selection(True, (), frozenset(), {}, connection.releases)
        digests = incremental.digests_since(self.offloader.departure("param"))
        (must_read,) = self.job.agreement.any_of([digests is None], "compare")
        if must_read:
            self._bring_parameters()
        with self._phase("compare"):
            if must_read or digests is None:
                digests = incremental.digests(self.training.buffers())
            reasons = incremental.reasons(digests, self.container.kept())
        flags = self.job.agreement.any_of(reasons, "compare")
        with self._phase("release"):
            selection = incremental.next(digests, flags, connection.releases)
            if not self._serves_on:
                self._release(selection)
        if not must_read and len(selection.skipped) < len(self.plan.buckets):
            self._bring_parameters()
        return selection

    def _bring_parameters(self) -> None:
        self._onload({"param"}, read_only=True)
        self._prepare()

    def _prepare(self) -> None:
        # where gathers overlap, the others wait in one for a rank that fails here
        with self._phase("prepare", SHORT_PATIENCE):
            self.training.prepare()
            if self.job.device.type == "cuda":  # peers read without waiting for what is queued on this device
                torch.cuda.synchronize(self.job.device)

    def _fence(self, buffers: Mapping[str, torch.Tensor], selection: Selection) -> ReleaseFence | None:
        """Lets parameters go bucket by bucket during a fill, and notes the peak; None where they are to stay."""
        if not self.config.offload_train_param:
            return None
        training = resident_nbytes(self.offloader)
        sent = [bucket.index for bucket in self.plan.buckets if bucket.index not in selection.skipped]
        return ReleaseFence(
            self.job.rank,
            self._require_open().fence_group,
            self.job.agreement.pace(),
            self.offloader,
            buffers,
            dict(zip(sent, selection.releases, strict=True)),
            lambda released: self._note_peak(training - released),
            is_apart=self._require_open().is_apart,
        )

    @property
    def _serves_on(self) -> bool:
        return self._require_open().is_apart and not self.config.release_weights

    def _release(self, selection: Selection) -> None:
        """Release what this selection renews."""
        self.has_written, incremental = True, self._require_open().incremental
        self.container.release(() if incremental is None else incremental.groups_of(selection.skipped))

    def _release_inference(self) -> None:
        incremental = self._require_open().incremental
        with self._phase("release"):
            self.has_written = True
            if incremental is None:
                self.container.release()
            else:
                self._tally.kept = incremental.release(self.container)

    def _offload(self, kinds: Collection[Kind]) -> None:
        with self._phase("offload"):
            self._tally.offloaded += self.offloader.offload(kinds).total_nbytes

    def _onload(self, kinds: Collection[Kind], *, read_only: bool) -> None:
        with self._phase("onload"):
            self._tally.onloaded += self.offloader.onload(kinds, read_only=read_only).total_nbytes
            self._note_peak()

    def _restore(self, before: State, target: State, error: Exception) -> None:
        """After a failed switch: drop what was filled and bring back what `before` needs, but for inference weights.

        Those that serve on are dropped where they were written alone.
        """
        self.offloader.take_hidden_seconds()
        restored = before if before in (State.TRAIN, State.FORWARD) else State.IDLE
        if not self._serves_on:
            self.has_written = True
        if self.has_written:
            self._forget_sent()
        try:
            with self.job.agreement.phase("restore"):
                if self.has_written:
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


class SwitchContexts(ABC):
    """Base of what has a switch, `_sharding`. All methods are collective, but for the hooks'.

    As a context manager it is started, and shut down at the end of the block, whatever ends it.
    """

    job: Job
    _sharding: Switch | None = None

    @property
    def sharding(self) -> Switch:
        """The switch. Raises StateError where it is gone, after `shutdown`."""
        if self._sharding is None:
            raise StateError(f"this {type(self).__name__} was shut down: build a new one")
        return self._sharding

    @abstractmethod
    def shutdown(self) -> None:
        """End what was made here; idempotent."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException as error:  # of a context that was not entered Python does not call the end
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self.job.is_inherited:
            self.shutdown()
            return
        self.job.agreement.leave(error)
        try:
            self.shutdown()
        except Exception as failure:  # the error that ends the block is the one to be seen
            error.add_note(f"then the shutdown failed: {type(failure).__name__}: {failure}")

    def rollout_context(self) -> AbstractContextManager[None]:
        """Generate inside: weights are resharded into vLLM, training state is off the device as configured."""
        return self.sharding.entered(State.INFER)

    def train_context(self) -> AbstractContextManager[None]:
        """Train inside: parameters, gradients and optimizer state are on the device, vLLM's weights are released."""
        return self.sharding.entered(State.TRAIN)

    def forward_context(self) -> AbstractContextManager[None]:
        """Score inside: only parameters need to be on the device."""
        return self.sharding.entered(State.FORWARD)

    def start(self) -> None:
        """Bring the devices to training: what `with` and the first context do. Idempotent."""
        self.sharding.start()

    def prefetch(self, kinds: Iterable[Kind] = KINDS) -> None:
        """In a rollout: begin to bring training state back; see `ShardingManager.prefetch`."""
        self.sharding.prefetch(kinds)

    def on_reshard_start(self, hook: Hook) -> Hook:
        """Decorator: call `hook(from_state, to_state)` before every switch, or `hook()` if it takes no argument."""
        return self.sharding.on_reshard_start(hook)

    def on_reshard_end(self, hook: Hook) -> Hook:
        """Decorator: call `hook(report)` after every successful switch, or `hook()` if it takes no argument."""
        return self.sharding.on_reshard_end(hook)
