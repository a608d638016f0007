"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from examples.gpt_rl.output import Output

# One that comes sooner is the first one again: schedulers signal the ranks and the launcher, which passes it on.
_SECONDS_OF_AN_ECHO = 2.0


class StopRequest:
    """Takes note of SIGINT and SIGTERM inside `with`, for the run to ask between its steps; a second one ends the rank.

    Attributes:
        is_made: a signal has come.
        may_be_the_launchers: one was SIGTERM, which torchrun also sends when another rank has ended. So no line
            promises a checkpoint for it: there is one if all ranks reach the end of the iteration.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._first: float | None = None
        self.may_be_the_launchers = False

    @property
    def is_made(self) -> bool:
        return self._first is not None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.may_be_the_launchers |= number == signal.SIGTERM
        if self._first is None:
            self._first = now
            if number == signal.SIGINT:  # torchrun sends it only if it got it
                self._output.say("Stopping after this iteration, with a checkpoint; once more to end at once ...")
        elif now - self._first > _SECONDS_OF_AN_ECHO:
            self._output.say("Ended at once; the same command goes on from the last checkpoint.")
            self._output.console.show_cursor()  # the bar hides it
            os._exit(128 + number)
