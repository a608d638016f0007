"""Collectives that belong together are made together: a signal that comes in between is handled after the last.

Python runs a signal's handler once a call into a library returns, so while ranks wait for each other: between the first
of an agreement's collectives and the second. What it raises there leaves the others in the second, and the next
agreement of this rank meets them with other sizes, for which gloo aborts both.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_SIGNALS = range(1, 32)
"""Those of POSIX; the real-time ones beyond are nobody's way to end a call."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Handlers of signals, Python's own for Ctrl-C among them, run at the end of the block; in the main thread, where
    else they would run in it. Waits of libraries are not made longer: handlers never interrupt those."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    came: list[int] = []
    is_held = True

    def note(number: int, frame: FrameType | None) -> None:
        if is_held:
            came.append(number)
        else:  # while they are put back
            before[number](number, frame)

    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, note)
        yield
    finally:
        is_held = False
        for number, handler in before.items():
            signal.signal(number, handler)
        with ExitStack() as handlers:  # each even if another raises; sent again, a signal would count twice (wakeup fd)
            for number in reversed(came):
                handlers.callback(before[number], number, None)
