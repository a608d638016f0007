"""Calls that run in a thread while their rank keeps taking part in collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

from hybrid_engine.ranks.agreement import Agreement

POLL_INTERVAL = 1.0
"""Interval at which a rank looks whether its call has ended, and whether a round has."""

_T = TypeVar("_T")


def in_background(call: Callable[[], _T], name: str) -> Future[_T]:
    """Start `call` in a daemon thread called `name` and return its future.

    An exception of the call becomes the exception of the future.
    """
    result: Future[_T] = Future()
    # A running future cannot be cancelled: a waiter may give up, but the call continues.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # raised in the thread that waits for the result
            result.set_exception(error)

    # An executor's threads are joined at exit: a failing rank would wait for unfinished calls,
    # and the other ranks would learn of the failure only afterwards.
    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def call_in_rounds(agreement: Agreement, phase: str, call: Callable[[], _T]) -> _T:
    """Run `call` on every rank, and return this rank's result. Collective; all raise its errors.

    A call may take longer than ranks wait for each other: they meet in rounds meanwhile, so that
    they notice an interrupt and a lost rank.
    """
    result = in_background(call, phase)

    def steps() -> Iterator[None]:
        while not wait([result], POLL_INTERVAL).done:
            yield
        result.result()

    agreement.rounds(phase, steps())
    return result.result()
