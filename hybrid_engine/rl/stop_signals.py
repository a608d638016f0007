"""Signals that end a run after its present step."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any, Self

logger = logging.getLogger("hybrid_engine")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Schedulers send them before they end a job, such as Slurm with `--signal=USR1@300`."""


class StopSignals:
    """Notes SIGTERM and SIGUSR1 within its context; a second SIGTERM has its former effect.

    Signals that the program handles itself are left alone, and so are all outside of the main
    thread.

    Attributes:
        came: True once a signal has come to this process.
    """

    def __init__(self) -> None:
        self.came = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        logger.warning("%s: the run ends after this step", signal.Signals(number).name)
        if number == signal.SIGTERM:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
