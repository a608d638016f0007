"""Calls that run in a thread while their rank keeps taking part in collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import TypeVar

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


def steps_until(result: Future[_T], seconds: float) -> Generator[None, None, _T]:
    """Yield every `seconds` until `result` is done, then return its value or raise its exception.

    The generator drives `Agreement.rounds`.
    """
    while not wait([result], seconds).done:
        yield
    return result.result()
