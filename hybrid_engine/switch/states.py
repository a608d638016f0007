"""The states of the devices, what each needs there, the contexts in which users are in one, and users' hooks."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS, Kind
from hybrid_engine.ports import InferenceWeights, Trainer

if TYPE_CHECKING:
    from hybrid_engine.switch.report import ReshardReport


class State(StrEnum):
    """States of the devices."""

    TRAIN = "train"
    FORWARD = "forward"
    INFER = "infer"
    IDLE = "idle"
    INTERRUPTED = "interrupted"
    """A switch is under way, or did not end: where things are is known to the next one alone."""

    @property
    def context(self) -> str:
        """Name of the context in which a user is in it."""
        return {"infer": "rollout_context", "idle": "the context of a model beside the actor"}.get(
            self, f"{self.value}_context"
        )


NEEDED_KINDS: Mapping[State, frozenset[Kind]] = {
    State.TRAIN: frozenset(KINDS),
    State.FORWARD: frozenset({"param"}),
    State.INFER: frozenset(),
    State.IDLE: frozenset(),
    State.INTERRUPTED: frozenset(),
}
"""State -> kinds of training state that are on the device in it, whatever the configuration offloads."""


def resident_kinds(state: State, config: GenerateConfig) -> set[Kind]:
    """Kinds of training state on the device in `state`: those it needs, and those never offloaded."""
    flags: dict[Kind, bool] = {
        "param": config.offload_train_param,
        "grad": config.offload_train_grad,
        "optimizer": config.offload_train_optimizer,
    }
    return {kind for kind, offloads in flags.items() if kind in NEEDED_KINDS[state] or not offloads}


def require(present: State, wanted: Collection[State]) -> None:
    """Raise StateError unless the present state is one of these."""
    if present not in wanted:
        contexts = " or ".join(state.context for state in wanted)
        # neither is only of a context: they are what a failure leaves, too
        here = "" if present in (State.IDLE, State.INTERRUPTED) else f" ({present.context})"
        raise StateError(f"the engine is in state {present.value}{here}; call this in {contexts}")


Contexts = list["weakref.ref[Entered]"]
"""Those that were entered, the innermost last. One whose block ended may still be listed: an exception from a signal
handler can come before the context hears of the end, so it is asked, or gone."""


class Entered:
    """A context in a state. See `ShardingManager.entered`.

    Args:
        state: of its block.
        enter: switches.
        contexts: of the same switch; this one is added.
    """

    def __init__(self, state: State, enter: Callable[[State], object], contexts: Contexts) -> None:
        self._state, self._enter, self._contexts = state, enter, contexts
        self._outer: State | None = None
        self._is_running = False

    def __enter__(self) -> None:
        running = [each for ref in self._contexts if (each := ref()) is not None and each._is_running]
        self._outer = running[-1]._state if running else None
        if self._outer not in (None, self._state) and self._state is not State.IDLE:
            raise StateError(f"{self._state.context} inside {self._outer.context}; leave the latter first")
        self._enter(self._state)
        self._is_running = True
        self._contexts[:] = map(weakref.ref, [*running, self])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_running = False
        if error is None and self._outer not in (None, self._state):
            self._enter(self._outer)


Hook = TypeVar("Hook", bound=Callable[..., object])


class SwitchHooks:
    """Base of what has a start and an end that users may hear of."""

    def __init__(self) -> None:
        self._start_hooks: list[Callable[..., object]] = []
        self._end_hooks: list[Callable[..., object]] = []

    def on_reshard_start(self, hook: Hook) -> Hook:
        """Call `hook(from_state, to_state)` before every switch, or `hook()`; usable as a decorator."""
        self._start_hooks.append(hook)
        return hook

    def on_reshard_end(self, hook: Hook) -> Hook:
        """Call `hook(report)` after every successful switch, or `hook()`; usable as a decorator."""
        self._end_hooks.append(hook)
        return hook

    def remove_hook(self, hook: Callable[..., object]) -> None:
        """Call `hook` no more, neither before a switch nor after it. Idempotent."""
        self._start_hooks = [each for each in self._start_hooks if each != hook]
        self._end_hooks = [each for each in self._end_hooks if each != hook]

    def _call_start_hooks(self, before: object, target: object) -> None:
        for hook in self._start_hooks:
            call_hook(hook, before, target)

    def _call_end_hooks(self, report: object) -> None:
        for hook in self._end_hooks:
            call_hook(hook, report)


class Switch(SwitchHooks, ABC):
    """What brings devices from one state into another. All methods are collective, but for hooks and `near_end`.

    Attributes:
        state: of the devices.
        last_report: of the last switch.
        inference: this process's part of the inference weights.
    """

    state: State = State.INTERRUPTED
    last_report: ReshardReport | None = None
    inference: InferenceWeights

    def __init__(self, trainer: Trainer, within: Switch | None = None) -> None:
        """
        Args:
            trainer: its `guard` asks this switch from now on.
            within: the switch that this one is a part of, whose state is the one that counts for the trainer.
        """
        super().__init__()
        self._contexts: Contexts = []
        if within is None:
            trainer.guard.add(self.require_kinds)

    @abstractmethod
    def start(self) -> None:
        """Bring training state to the device: state TRAIN. Idempotent."""

    @abstractmethod
    def enter(self, target: State) -> ReshardReport | None:
        """Switch to `target`; None when it is the present state already."""

    @abstractmethod
    def prefetch(self, kinds: Iterable[Kind] = KINDS) -> None:
        """Begin to bring training state back while the last completions are generated, in state INFER.

        Memory: theirs beside the inference weights', so name what fits. The copies run on a side stream on CUDA, in a
        thread on the CPU. Raises StateError in any other state, OffloadError when memory runs out; both lose nothing.
        """

    @abstractmethod
    def near_end(self) -> None:
        """A rollout is nearly drawn: in INFER, bring what fits of training state. No collective; logs what fails."""

    @abstractmethod
    def require_kinds(self, kinds: Collection[str]) -> None:
        """Raise StateError unless the present state needs these kinds of training state on the device.

        No collective. There is no state before the start, and none once it is closed. That nothing has left, the
        offloader sees to, in any state.
        """

    def require_drawing(self) -> None:
        """Raise StateError unless the inference side has weights to draw tokens with."""
        self.require(State.INFER)

    @abstractmethod
    def close(self) -> None:
        """No switch any more. Idempotent."""

    def entered(self, state: State) -> AbstractContextManager[None]:
        """Be in `state` inside the context. The state is kept at the end: the next context switches if it must.

        Raises StateError inside another state's context. IDLE frees the device for a model beside the actor, inside any
        context: then that one's state is back at the end, but for errors.
        """
        return Entered(state, self.enter, self._contexts)

    def require(self, *states: State) -> None:
        """Raise StateError unless the present state is one of these; closed, there is no state. Starts."""
        self.start()
        require(self.state, states)


def call_hook(hook: Callable[..., object], *arguments: Any) -> None:
    """Call with as many of the arguments as the hook takes: one that only logs a line needs none."""
    kinds = [parameter.kind for parameter in inspect.signature(hook).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = arguments[: sum(kind in positional for kind in kinds)]
    hook(*arguments)
