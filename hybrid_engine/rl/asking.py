"""Calls of what a user has given to be called for each completion: a function, or a coroutine function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hybrid_engine.errors import ArgumentError, Violation


def ask_each(argument: str, calls: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """What each call returns. Functions are called one after the other, here; coroutine functions all together, in an
    event loop that stays for as long as the process, so that a connection of one turn serves in the next.

    Args:
        argument: as which the user gave them.
        calls: of each, its place in messages, the function, and what it is called with.

    Raises ArgumentError as `named`; coroutines that are not done then are cancelled.
    """
    answers: dict[int, Any] = {}
    coroutines = {index: call for index, call in enumerate(calls) if _is_coroutine_function(call[1])}
    for index, (place, function, given) in enumerate(calls):
        if index not in coroutines:
            with named(argument, place):
                answers[index] = function(*given)

    async def together() -> None:
        async def ask(index: int, place: str, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
            with named(argument, place):
                answers[index] = await function(*given)

        tasks = [asyncio.ensure_future(ask(index, *call)) for index, call in coroutines.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    if coroutines:
        running = asyncio.run_coroutine_threadsafe(together(), _event_loop())
        try:
            running.result()
        finally:
            running.cancel()  # where whoever waits is interrupted
    return [answers[index] for index in range(len(calls))]


@contextmanager
def named(argument: str, place: str) -> Iterator[None]:
    """Raise ArgumentError naming argument, place and line for whatever a user's code raises."""
    try:
        yield
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        problem = f"{type(error).__name__} for {place}: {error}"
        remedy = f"It was raised by {last.filename}:{last.lineno}"
        raise ArgumentError([Violation(argument, problem, remedy)]) from error


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments and rewards", daemon=True).start()
    return loop
