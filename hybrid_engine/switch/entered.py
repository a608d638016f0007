"""The contexts of states, and which of them runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType

from hybrid_engine.errors import StateError
from hybrid_engine.switch.states import State

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
