"""Calls that go on in a thread while their rank takes part in what is collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import TypeVar

_T = TypeVar("_T")


def in_background(call: Callable[[], _T], name: str) -> Future[_T]:
    """Begin a call in a thread of this name; what it raises is the future's exception.

    The thread is a daemon. Python would join an executor's threads at exit, so a rank that fails would wait for calls
    that are under way, and the other ranks would hear of it only then.
    """
    answer: Future[_T] = Future()
    answer.set_running_or_notify_cancel()  # whoever waits may give up; the call goes on

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # raised where it is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def steps_until(answer: Future[_T], seconds: float) -> Generator[None, None, _T]:
    """A step every so many seconds until a call has ended: for `Agreement.rounds`. Returns, or raises, as the call."""
    while not wait([answer], seconds).done:
        yield
    return answer.result()
