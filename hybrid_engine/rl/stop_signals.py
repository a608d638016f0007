"""Signals that end a run after its present step, and the end of torchrun, which ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self
from weakref import WeakSet

from hybrid_engine.ranks.signals_and_forks import end_with_parent

logger = logging.getLogger("hybrid_engine")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Schedulers send the first two before they end a job, such as Slurm with `--signal=USR1@300`;
Ctrl-C sends the last, and torchrun passes it on to its ranks."""
_SECONDS_BETWEEN_LOOKS = 0.5


class StopSignals:
    """Notes SIGTERM, SIGUSR1 or Ctrl-C within its context; a second signal has its former effect.

    Signals that the program handles itself are left alone, and so are all outside of the main
    thread, and those of forked children, such as the processes of a reward.

    Args:
        is_broken: returns whether another rank has failed. torchrun then sends SIGTERM to the
            others, which end at once: no step can be finished.

    Attributes:
        came: True once a signal has come to this process.
    """

    def __init__(self, is_broken: Callable[[], bool] = lambda: False) -> None:
        self.came = False
        self._is_broken = is_broken
        self._has_left = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun holds the store by which ranks find each other, so none can go on without.
            end_with_parent(os.getppid())
        if threading.current_thread() is threading.main_thread():
            _ACTIVE.add(self)
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._has_left.set()
        self.restore()

    def restore(self) -> None:
        """Restore the handlers from before the context."""
        _ACTIVE.discard(self)
        # Not popped: a signal may come in between, which looks its handler up.
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        name = signal.Signals(number).name
        level = logging.INFO if os.environ.get("RANK", "0") != "0" else logging.WARNING
        logger.log(level, "%s: the run ends after this step; once more to end it now", name)
        # The second signal may be another: torchrun sends SIGTERM after a second Ctrl-C.
        self.restore()
        if number == signal.SIGTERM:
            threading.Thread(target=self._end_if_broken, name="stop signals", daemon=True).start()

    def _end_if_broken(self) -> None:
        """Send SIGTERM again, with its former effect, if another rank fails within the context."""
        while not self._is_broken():
            if self._has_left.wait(_SECONDS_BETWEEN_LOOKS):
                return
        if not self._has_left.is_set():  # the context may have ended meanwhile
            os.kill(os.getpid(), signal.SIGTERM)


_ACTIVE: WeakSet[StopSignals] = WeakSet()


_masks: list[set[int]] = []
"""Masks of the forking thread from before the fork; forks of one process follow each other."""


def _block() -> None:
    # Python drops signals that come to a child before its handlers are restored.
    _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _ACTIVE else ()))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _restore_in_child() -> None:
    for signals in list(_ACTIVE):
        signals.restore()
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)
