"""Exceptions at any call of a switch: where CPython lets a signal handler run, and where memory or threads run out.

    points = Points()
    points.record("train->infer", switch)            # once or more: what is called on the way
    interruption = points.interruption("train->infer", chance, KeyboardInterrupt)
    interruption.run(switch)                         # raises it at one of these calls, anywhere below
    interruption.where                               # "memory/arena.py:Arena.reserve", None if it did not come to it

CPython looks for signals when a Python function begins or goes on (a generator), and when a function of C has returned.
These are the events of `sys.setprofile`, and what a profile function raises is raised at that very place.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_HARNESS = str(Path(__file__).parent)
_ROOT = Path(__file__).parents[2]
_OURS = ("hybrid_engine", "megatron_patches")


class Cancelled(BaseException):
    """What ends a task from outside, and is no Exception."""


class Interruption:
    """One exception that is to come. It is not kept: its traceback would keep what it went through alive.

    Attributes:
        name: of its class.
        where: it came; None so far.
    """

    def __init__(self, make: Callable[[], BaseException], at: str, call: int) -> None:
        self.name, self._make, self._at, self._call = type(make()).__name__, make, at, call
        self.where: str | None = None

    def run(self, function: Callable[[], object]) -> None:
        """Call it, and raise at that place."""
        sys.setprofile(self._look)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.where is None and _place(frame, event, argument) == self._at:
            self._call -= 1
            if self._call == 0:
                self.where = self._at
                raise self._make()


class Points:
    """The calls that were seen, by what was done."""

    def __init__(self) -> None:
        self._seen: dict[str, Counter[str]] = {}

    def known(self, what: str) -> int:
        return len(self._seen.get(what, ()))

    def record(self, what: str, function: Callable[[], object]) -> None:
        """Call it, and note every call below, of this thread."""
        once: Counter[str] = Counter()

        def note(frame: FrameType, event: str, argument: Any) -> None:
            if (place := _place(frame, event, argument)) is not None:
                once[place] += 1

        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
            self._seen[what] = self._seen.get(what, Counter()) | once

    def interruption(self, what: str, chance: random.Random, make: Callable[[], BaseException]) -> Interruption:
        """Raise what `make` makes at one of the calls seen: each place is as likely, then each of its calls."""
        seen = self._seen[what]
        ours = [place for place in seen if place.startswith(_OURS)]
        at = chance.choice(sorted(ours if ours and chance.random() < 0.6 else seen))
        return Interruption(make, at, chance.randint(1, seen[at]))


@contextmanager
def no_new_threads() -> Iterator[None]:
    """A limit on the number of processes is reached."""
    start: Any = threading._start_new_thread  # below `Thread.start`, which undoes its own

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    threading._start_new_thread = refuse
    try:
        yield
    finally:
        threading._start_new_thread = start


def _place(frame: FrameType, event: str, argument: Any) -> str | None:
    """Name of what is called, or has returned; None for what signals do not interrupt, and for the harness."""
    if event not in ("call", "c_return"):
        return None
    code = frame.f_code
    if code.co_filename.startswith(_HARNESS):
        return None
    path = Path(code.co_filename)
    file = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else "/".join(path.parts[-3:])
    called = "" if event == "call" else f" after {getattr(argument, '__qualname__', argument)}"
    return f"{file}:{code.co_qualname}{called}"
