"""Interruption of the engine at any line, by a signal whose handler raises, as for Ctrl-C."""

from __future__ import annotations

import ctypes
import functools
import signal
from pathlib import Path
from types import FrameType
from typing import Self

import hybrid_engine
from tests.harness.compiled import load_compiled

ENGINE = f"{Path(hybrid_engine.__file__).parent}/".encode()


class Stop(BaseException):
    """An interruption; like KeyboardInterrupt it is not an Exception."""


@functools.cache
def _counter() -> ctypes.PyDLL:
    load_compiled("signals_at_lines.so", Path(__file__).with_suffix(".c"))
    return ctypes.PyDLL("signals_at_lines.so")


class Interrupter:
    """Context that raises `Stop` at line number `at` that runs in the engine; -1 only counts the
    lines.

    Attributes:
        num_lines: lines that ran.
        is_done: whether it has raised.
    """

    def __init__(self, at: int = -1) -> None:
        self._at = at
        self.num_lines = 0
        self.is_done = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._raise)
        _counter().count_lines(ctypes.c_long(self._at), ENGINE)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.num_lines = _counter().stop_counting()
        finally:
            signal.signal(signal.SIGUSR1, self._before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.is_done = True
        raise Stop
