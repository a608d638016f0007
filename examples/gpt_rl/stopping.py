"""Signals that ask a run to stop.

torchrun sends each rank what it gets itself: SIGINT (Ctrl-C), or SIGTERM from a scheduler. It also sends SIGTERM to
all other ranks when one has ended.
"""

from __future__ import annotations

import signal
import socket
import threading
import time

from examples.gpt_rl.output import Output

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# One that comes sooner is the first one again: schedulers signal the ranks and the launcher, which passes it on.
_SECONDS_OF_AN_ECHO = 2.0


class StopRequest:
    """Takes note of SIGINT and SIGTERM inside `with`, for the run to ask between its steps; a second one ends the rank.
    So does the first, as long as the run does not ask.

    A thread listens, for the main thread may be inside a library that waits for a peer for minutes.

    Attributes:
        is_made: a signal has come.
        may_be_the_launchers: one was SIGTERM. No line promises a checkpoint for it: there is one if all ranks reach the
            end of the iteration.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._first: float | None = None
        self._is_asked_for = False
        self.may_be_the_launchers = False

    @property
    def is_made(self) -> bool:
        return self._first is not None

    def begin_to_wait(self) -> None:
        """From now on the run asks: a signal waits for that."""
        self._is_asked_for = True

    def __enter__(self) -> StopRequest:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # the interpreter writes the signal's number there as it comes, whatever the main thread is doing
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._listener = threading.Thread(target=self._listen, name="stop request", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()
        self._listener.join()
        self._reader.close()

    def _listen(self) -> None:
        """Until the other end is closed."""
        while received := self._reader.recv(1):
            if received[0] in _SIGNALS:
                self._note(signal.Signals(received[0]))

    def _note(self, number: signal.Signals) -> None:
        if not self._is_asked_for:
            reason = "interrupted while it starts; the same command starts it again"
            self._output.end(reason if number == signal.SIGINT and self._output.rank == 0 else None, number)
        now = time.monotonic()
        self.may_be_the_launchers |= number == signal.SIGTERM
        if self._first is None:
            self._first = now
            if number == signal.SIGINT:  # torchrun sends it only if it got it
                self._output.say("Stopping after this iteration, with a checkpoint; once more to end at once ...")
        elif now - self._first > _SECONDS_OF_AN_ECHO:
            self._output.end(f"{number.name} came again; the same command goes on from the last checkpoint", number)
