"""Postponed signal handlers, and resources that a forked child must not release.

A signal that arrives between two collectives of one agreement is handled after the last
(`signals_held`). Python runs a signal handler when a call into a library returns, so also while
ranks wait for each other between the first and the second collective. An exception raised there
leaves the other ranks in the second collective. The next agreement of this rank then meets them
with different sizes, and gloo aborts both.

Only the process that created a resource may release it (`Ends`). A forked child has the memory and
connections of the rank but none of its threads. Destroying a process group in the child would wait
forever for those threads; so would interpreter exit, which drops the last reference to every group.
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
"""Numbers of the POSIX signals; real-time signals are not used to interrupt a call."""

_PR_SET_PDEATHSIG = 1

_are_held = False
"""True while the main thread is inside `signals_held`; nested blocks then do nothing."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Postpone Python signal handlers, including the one for Ctrl-C, to the end of the block.

    Does nothing outside the main thread, because handlers never run there. Waits inside libraries
    do not get longer, because handlers never interrupt them.
    """
    global _are_held
    if _are_held or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
    pending: list[int] = []
    is_held = True

    def note(number: int, frame: FrameType | None) -> None:
        if is_held:
            pending.append(number)
        else:  # not restored yet, because a restored handler raised first
            previous[number](number, frame)

    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                previous[number] = handler
                signal.signal(number, note)
        _are_held = True  # set only while every handler is replaced: none can raise in between
        yield
    finally:
        _are_held = False
        try:
            with ExitStack() as restore:  # all of them, even if a restored handler raises
                for number, handler in previous.items():
                    restore.callback(signal.signal, number, handler)
        finally:
            is_held = False
            with ExitStack() as handlers:  # not sent again: that would write to the wakeup fd twice
                # An ExitStack runs its callbacks last in, first out: reversed, signals are handled
                # in the order in which they came.
                for number in reversed(pending):
                    handlers.callback(previous[number], number, None)


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent `parent` ends for any reason. Linux only.

    A launcher that is itself killed (out of memory, a time limit) cannot end its ranks. Call this
    early, with a pid that was read before: if the parent ends before the call, no signal is sent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


own_groups: WeakSet[object] = WeakSet()
"""Process groups of this process that are not registered with torch."""


class Ends(ExitStack):
    """ExitStack that unwinds only in the process that created it, never in a forked child."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that created the stack."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Unwind the stack.

        An error keeps the exception being handled as its context, which ExitStack would drop.
        """
        handled = sys.exc_info()[1]
        try:
            super().close()
        except BaseException as error:
            first = error
            # The last link is the first error of the unwinding, raised while `handled` was being
            # handled.
            while first.__context__ is not None and first is not handled:
                first = first.__context__
            if first is not handled:
                first.__context__ = handled
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return None if self.is_inherited else super().__exit__(kind, error, traceback)


def _keep_groups() -> None:
    """Leak a reference to every group so that none is destroyed in this child."""
    kept = [groups_and_stores(), list(own_groups)]
    # One reference that is never given back.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_keep_groups)
