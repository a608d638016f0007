"""Handles what the system does to a rank's process: signals, and forks (os.fork, multiprocessing).

Collectives that belong together are made together: a signal that comes in between is handled after the last
(`signals_held`). Python runs a signal's handler once a call into a library returns, so while ranks wait for each other:
between the first of an agreement's collectives and the second. What it raises there leaves the others in the second,
and the next agreement of this rank meets them with other sizes, for which gloo aborts both.

What the rank has built is the rank's to end (`Ends`). A forked child has the rank's memory and connections, but none of
its threads. Ending a process group there waits without end for threads that it does not have; so does Python's exit,
which drops the last reference to every group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakSet

from hybrid_engine.ranks.torch_internals import groups_and_stores

_SIGNALS = range(1, 32)
"""Those of POSIX; the real-time ones beyond are nobody's way to end a call."""

_are_held = False
"""Whether the main thread is inside `signals_held`: blocks within it have nothing to do."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Postpone signal handlers, Python's own for Ctrl-C among them, to the end of the block. Outside the main thread,
    where no handler runs, it does nothing. Waits inside libraries get no longer: handlers never interrupt those."""
    global _are_held
    if _are_held or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    came: list[int] = []
    is_held = True

    def note(number: int, frame: FrameType | None) -> None:
        if is_held:
            came.append(number)
        else:  # of one that is not back, since another raised in between
            before[number](number, frame)

    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, note)
        _are_held = True  # only now, and until the first handler is back: none can raise in between
        yield
    finally:
        _are_held = False
        try:
            with ExitStack() as put_back:  # each, though one that is back may raise before the next
                for number, handler in before.items():
                    put_back.callback(signal.signal, number, handler)
        finally:
            is_held = False
            with ExitStack() as handlers:  # each, too; sent again, a signal would count twice (wakeup fd)
                for number in reversed(came):
                    handlers.callback(before[number], number, None)


own_groups: WeakSet[object] = WeakSet()
"""Process groups of this process that torch does not know."""


class Ends(ExitStack):
    """An ExitStack of the process that made it; in a forked child its end does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """End everything. An error of that names the one in whose handling it was raised, which ExitStack forgets."""
        handled = sys.exc_info()[1]
        try:
            super().close()
        except BaseException as error:
            first = error
            while first.__context__ is not None and first is not handled:
                first = first.__context__
            if first is not handled:
                first.__context__ = handled
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return None if self.is_inherited else super().__exit__(kind, error, traceback)


def _keep_groups() -> None:
    """Refer to every group for good, so that nothing in this child ends one."""
    kept = [groups_and_stores(), list(own_groups)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_keep_groups)
