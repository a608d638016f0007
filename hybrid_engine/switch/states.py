"""States of the devices, training state that they need, and steps of a switch with its hooks."""

from __future__ import annotations

import inspect
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS, LATE_KINDS, Kind
from hybrid_engine.ports import InferenceWeights, Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE, Ballot
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.report import ReshardReport, SwitchTally
from hybrid_engine.tracing import count, span

if TYPE_CHECKING:
    from hybrid_engine.compute_check.logprob_check import TrainerCheck
    from hybrid_engine.memory.offloader import Offloader


class State(StrEnum):
    """States of the devices."""

    TRAIN = "train"
    FORWARD = "forward"
    INFER = "infer"
    IDLE = "idle"
    INTERRUPTED = "interrupted"
    """A switch is running, or did not complete.

    Only the next switch determines where the tensors are.
    """

    @property
    def context(self) -> str:
        """Name of the user's context for this state."""
        if self is State.INFER:
            return "rollout_context"
        if self is State.IDLE:
            return "the context of a model beside the actor"
        return f"{self.value}_context"


NEEDED_KINDS: Mapping[State, frozenset[Kind]] = {
    State.TRAIN: frozenset(KINDS),
    State.FORWARD: frozenset({"param"}),
    State.INFER: frozenset(),
    State.IDLE: frozenset(),
    State.INTERRUPTED: frozenset(),
}
"""State -> kinds of training state needed on the device, whatever the configuration offloads."""


def resident_kinds(
    state: State, config: GenerateConfig, fitting: Collection[Kind] = ()
) -> set[Kind]:
    """Return the kinds of training state on the device in `state`.

    These are the needed kinds, kinds that are never offloaded, and `fitting`, which have room
    beside vLLM, unless another model takes the device.
    """
    stays = {kind for kind, choice in config.offloads.items() if not choice}
    if state is not State.IDLE:
        stays.update(fitting)
    return stays | NEEDED_KINDS[state]


def require(present: State, wanted: Collection[State]) -> None:
    """Raise StateError unless the present state is in `wanted`."""
    if present not in wanted:
        contexts = " or ".join(state.context for state in wanted)
        # These two states also follow a failure, outside any context.
        here = "" if present in (State.IDLE, State.INTERRUPTED) else f" ({present.context})"
        raise StateError(
            f"the engine is in state {present.value}{here}; call this in {contexts}",
            code="wrong-state",
        )


class Inside:
    """Mark of a block inside a context; only the context's frame refers to it.

    An exception from a signal handler can end a context before it could note its end. Such a mark
    is no longer alive.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.has_ended = False


Hook = TypeVar("Hook", bound=Callable[..., object])


class Switch(ABC):
    """Interface of a switch between states, with user hooks before and after each switch.

    All methods but those for hooks are collective.

    Attributes:
        state: present state of the devices.
        last_report: report of the last switch.
        inference: this process's part of the inference weights.
        offloader: offloads and onloads the trainer's state.
    """

    state: State = State.INTERRUPTED
    last_report: ReshardReport | None = None
    inference: InferenceWeights
    # Compares what both sides compute.
    _check: TrainerCheck
    # Kinds that leave behind generation, as far as weights do not need their memory.
    _late_kinds: frozenset[Kind] = frozenset()
    # Kinds set to `auto` that have room beside inference; None: not known before the first step.
    _fitting: frozenset[Kind] | None = None

    def __init__(
        self,
        trainer: Trainer,
        offloader: Offloader,
        config: GenerateConfig,
        job: Job,
        within: Switch | None = None,
    ) -> None:
        """
        Args:
            trainer: its state is moved; this switch is added to its `guard`.
            offloader: offloads and onloads the trainer's state.
            config: kinds to offload.
            job: job of all ranks.
            within: outer switch of which this one is a part; the outer one's state then counts for
                the trainer.
        """
        self.trainer = trainer
        self.offloader = offloader
        self.config = config
        self.job = job
        self._is_started = False
        self._tally = SwitchTally()
        self._blocks: list[weakref.ref[Inside]] = []  # innermost last
        self._start_hooks: list[Callable[..., object]] = []
        self._end_hooks: list[Callable[..., object]] = []
        if within is None:
            trainer.guard.add(self.require_kinds)

    def on_reshard_start(self, hook: Hook) -> Hook:
        """Decorator: call `hook(from_state, to_state)`, or `hook()`, before every switch."""
        self._start_hooks.append(hook)
        return hook

    def on_reshard_end(self, hook: Hook) -> Hook:
        """Decorator: call `hook(report)`, or `hook()`, after every successful switch."""
        self._end_hooks.append(hook)
        return hook

    def remove_hook(self, hook: Callable[..., object]) -> None:
        """Remove `hook`, whether it runs before or after switches. Idempotent."""
        # New lists: a hook may remove itself while it is called.
        self._start_hooks = [registered for registered in self._start_hooks if registered != hook]
        self._end_hooks = [registered for registered in self._end_hooks if registered != hook]

    def start(self) -> None:
        """Onload the training state: state TRAIN. Idempotent; the first switch implies it."""
        if not self._is_started:
            self._bring_back()

    def enter(self, target: State) -> ReshardReport | None:
        """Switch to `target`; return None if it is the present state.

        Raises on all ranks if any rank fails, and StateError if ranks request different states. If
        only an end hook failed, the switch stands.
        """
        self.start()
        phase = f"entering {target.context}"
        if not self.job.agreement.is_same(self._progress(), phase):
            # Ctrl-C reached some ranks before the end of a switch, and others after it.
            self._resync(phase)
        return None if target is self.state else self._enter(self.state, target)

    @abstractmethod
    def _enter(self, before: State, target: State) -> ReshardReport:
        """Switch from `before` to another state."""

    def _progress(self) -> list[int]:
        """Return numbers that are the same on all ranks between switches."""
        position = list(State).index(self.state)
        return [position, self._fitting is not None, bool(self._late_kinds)]

    def _resync(self, phase: str) -> None:
        """Forget the progress of ranks that differ: state INTERRUPTED. Collective."""
        self.state = State.INTERRUPTED
        self._fitting = None
        self._late_kinds = frozenset()

    def require_kinds(self, kinds: Collection[str]) -> None:
        """Raise StateError unless the state needs these kinds of training state on the device.

        No collective. Never raises before the start or after the close. The offloader's guard
        checks separately whether the kinds are on the device.
        """
        # The state is INTERRUPTED during the probe, but the parameters are on the device.
        is_probe = self._is_started and self._check.is_probing and set(kinds) == {"param"}
        if self._is_started and not is_probe:
            allowed = [state for state, needed in NEEDED_KINDS.items() if needed.issuperset(kinds)]
            require(self.state, allowed)

    def require_drawing(self) -> None:
        """Raise StateError unless the inference side has weights to generate with."""
        self.require(State.INFER)

    @abstractmethod
    def close(self) -> None:
        """Close the switch; no switch can follow. Idempotent."""

    @contextmanager
    def entered(self, state: State) -> Iterator[None]:
        """Enter `state` for the block.

        The state is kept at its end; the next context switches if necessary. Raises StateError
        inside another state's context, except for IDLE, which frees the device for another model:
        at its end the outer state is restored unless the block raised.
        """
        marks = [reference() for reference in self._blocks]
        running = [mark for mark in marks if mark is not None and not mark.has_ended]
        outer = running[-1].state if running else None
        if outer not in (None, state) and state is not State.IDLE:
            raise StateError(
                f"{state.context} inside {outer.context}; leave the latter first",
                code="nested-contexts",
            )
        self.enter(state)
        inside = Inside(state)
        try:
            self._blocks = [*map(weakref.ref, running), weakref.ref(inside)]
            yield
        finally:
            inside.has_ended = True
        if outer not in (None, state):
            self.enter(outer)

    def require(self, *states: State) -> None:
        """Raise StateError unless the present state is one of `states`.

        Starts the switch if needed.
        """
        self.start()
        require(self.state, states)

    # -- steps of a switch -------------------------------------------------------------------------

    def _begin(self, before: State, target: State) -> None:
        """Call the hooks, and look whether the model has changed.

        The state is INTERRUPTED then, until `_end`. After an error it is what it was.
        """
        self._tally = SwitchTally()
        with self._phase("start hooks") as ballot:
            call_hooks(self._start_hooks, before, target)
            self._note_peak()
            ballot.number = self._check.must_repeat(
                has_trained=before is State.TRAIN, will_fill=target is State.INFER
            )
        if ballot.number:
            self._check.repeat()
        self._check.is_probing = False
        self.state = State.INTERRUPTED

    def _report(self, direction: str, started: float) -> ReshardReport:
        """Return the report of a switch that started then, in `time.perf_counter()`."""
        behind = self.offloader.take_seconds_behind()
        seconds = time.perf_counter() - started
        return self._tally.report(direction, self.trainer.version, seconds, behind)

    def _end(self, state: State, report: ReshardReport) -> ReshardReport:
        """End a switch in `state`."""
        self.state = state
        self.last_report = report
        with self._phase("end hooks"):
            call_hooks(self._end_hooks, report)
        return report

    def _finish_pending(self) -> None:
        """Finish pending gathers of the weights.

        They would write to buffers that are offloaded, or that must only be read from here on.
        """
        with self._phase("prepare", SHORT_PATIENCE):
            self.trainer.weights.finish_pending()

    def _bring_back(self) -> None:
        """Onload all training state: state TRAIN."""
        with self._phase("onload"):
            self.offloader.onload(KINDS)
        self.state = State.TRAIN
        self._is_started = True

    def _resident(self, state: State) -> set[Kind]:
        return resident_kinds(state, self.config, self._fitting or ())

    def _move_state(self, target: State) -> None:
        """Move training state to where it is in `target`."""
        wanted = self._resident(target)
        self._offload(frozenset(KINDS) - wanted)
        self._onload(wanted, read_only=target is not State.TRAIN)

    def _probe_trainer(self) -> None:
        """Run the trainer's forward pass, with which the inference side will be compared."""
        self._onload({"param"}, read_only=True)
        with self._tally.timed("compute"):
            self._check.probe_trainer()

    def _offload(self, kinds: Collection[Kind]) -> None:
        with self._phase("offload"):
            nbytes = self.offloader.offload(kinds, late=self._late_kinds)
            self._tally.counts["bytes_offloaded"] += nbytes

    def _onload(self, kinds: Collection[Kind], *, read_only: bool) -> None:
        with self._phase("onload"):
            nbytes = self.offloader.onload(kinds, read_only=read_only, late=LATE_KINDS)
            self._tally.counts["bytes_onloaded"] += nbytes
            self._note_peak()

    @contextmanager
    def _phase(self, name: str, patience: float | None = None) -> Iterator[Ballot]:
        """Time a phase, and end it when all ranks agree on its success; see `Agreement.phase`."""
        with (
            self._tally.timed(name),
            ExitStack() as arriving,
            self.job.agreement.phase(name, patience) as ballot,
        ):
            yield ballot
            # Ends after the agreement's exit, that is, once all ranks have arrived.
            arriving.enter_context(span("wait"))

    def _training_nbytes(self) -> int:
        return sum(self.offloader.resident_nbytes().values())

    def _note_peak(self, training: int | None = None) -> None:
        """Update the peak from the bytes on the device; None: determine those of training."""
        if training is None:
            training = self._training_nbytes()
        inference = self.inference.resident_nbytes()
        count("device bytes", training=training, inference=inference)
        counts = self._tally.counts
        counts["peak_bytes"] = max(counts["peak_bytes"], training + inference)


def call_hooks(hooks: Iterable[Callable[..., object]], *arguments: Any) -> None:
    """Call each hook with as many of `arguments` as it takes; a logging hook needs none."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for hook in hooks:
        kinds = [parameter.kind for parameter in inspect.signature(hook).parameters.values()]
        num_accepted = sum(kind in positional for kind in kinds)
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            num_accepted = len(arguments)
        hook(*arguments[:num_accepted])
