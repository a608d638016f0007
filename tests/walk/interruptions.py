"""Exceptions at any call of a switch, as raised by signal handlers or for lack of memory or
threads.

    points = Points()
    points.record("train->infer", switch)            # once or more: records all calls of the switch
    interruption = points.interruption("train->infer", chance, KeyboardInterrupt)
    interruption.run(switch)                         # raises the exception at one of these calls
    interruption.where             # "memory/arena.py:Arena.reserve"; None if not reached

CPython runs signal handlers when a Python function begins or a generator resumes, and when a C
function has returned. `sys.setprofile` reports the same events, and an exception of a profile
function is raised in place.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_HARNESS = str(Path(__file__).parent)
_ROOT = Path(__file__).parents[2]
_OURS = ("hybrid_engine", "megatron_patches")


class Cancelled(BaseException):
    """Cancellation of a task from outside; not an Exception."""


class Interruption:
    """An exception to raise at a call.

    Attributes:
        name: name of its class.
        where: the call at which it was raised; None before.
    """

    # Holds a factory: the traceback of an exception would keep all objects of its frames alive.
    def __init__(self, make: Callable[[], BaseException], at: str, call: int) -> None:
        self.name = type(make()).__name__
        self.where: str | None = None
        self._make = make
        self._at = at
        self._call = call

    def run(self, function: Callable[[], object]) -> None:
        """Call `function` and raise the exception at the chosen call."""
        sys.setprofile(self._profile)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.where is None and _place(frame, event, argument) == self._at:
            self._call -= 1
            if self._call == 0:
                self.where = self._at
                raise self._make()


class Points:
    """Recorded calls by action, such as "train->infer"."""

    def __init__(self) -> None:
        self._recorded: dict[str, Counter[str]] = {}

    def known(self, action: str) -> int:
        return len(self._recorded.get(action, ()))

    def record(self, action: str, function: Callable[[], object]) -> None:
        """Call `function` and record every call that it makes in this thread."""
        calls = Counter()

        def note(frame: FrameType, event: str, argument: Any) -> None:
            if (place := _place(frame, event, argument)) is not None:
                calls[place] += 1

        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
            self._recorded[action] = self._recorded.get(action, Counter()) | calls

    def interruption(
        self, action: str, chance: random.Random, make: Callable[[], BaseException]
    ) -> Interruption:
        """Choose a recorded place at random, then one of its calls, for an exception of `make`."""
        calls = self._recorded[action]
        ours = [place for place in calls if place.startswith(_OURS)]
        at = chance.choice(sorted(ours if ours and chance.random() < 0.6 else calls))
        return Interruption(make, at, chance.randint(1, calls[at]))


def _place(frame: FrameType, event: str, argument: Any) -> str | None:
    """Return the name of a call or return; None for the harness and for events without signals."""
    if event not in ("call", "c_return"):
        return None
    code = frame.f_code
    if code.co_filename.startswith(_HARNESS):
        return None
    path = Path(code.co_filename)
    file = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else "/".join(path.parts[-3:])
    called = "" if event == "call" else f" after {getattr(argument, '__qualname__', argument)}"
    return f"{file}:{code.co_qualname}{called}"
