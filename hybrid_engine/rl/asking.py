"""Calls of what a user has given to be called for each completion: a function, or a coroutine function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hybrid_engine.errors import ArgumentError, Violation, first_of

_SHARE = 0.9
"""Part of the other ranks' timeout after which this one gives up, so that its error, with the cause, comes first."""


def ask_each(
    argument: str, calls: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]], timeout_seconds: float
) -> list[Any]:
    """Make the calls one after the other and return their results. Awaitables among these are awaited together, in one
    event loop for the life of the process, so that a connection opened in one turn can be used in the next.

    Args:
        argument: as which the user gave them.
        calls: of each, its place in messages, the function, and what it is called with.
        timeout_seconds: for which other ranks wait for the answers.

    Raises ArgumentError as `named`, and when awaitables are not done after 90 % of the timeout. Those not done are
    cancelled.
    """
    answers: list[Any] = []
    try:
        for place, function, given in calls:
            with named(argument, place):
                answers.append(function(*given))
    except BaseException:
        for answer in filter(inspect.iscoroutine, answers):
            answer.close()
        raise
    waiting = {index: answer for index, answer in enumerate(answers) if inspect.isawaitable(answer)}
    if waiting:
        places = [place for place, *_ in calls]
        together = _together(argument, places, waiting, _SHARE * timeout_seconds)
        running = asyncio.run_coroutine_threadsafe(together, _event_loop())
        try:
            for index, answer in running.result().items():
                answers[index] = answer
        finally:
            running.cancel()  # where whoever waits is interrupted
    return answers


async def _together(
    argument: str, places: Sequence[str], waiting: Mapping[int, Awaitable[Any]], seconds: float
) -> dict[int, Any]:
    async def answer_of(index: int) -> Any:
        with named(argument, places[index]):
            return await waiting[index]

    tasks = {index: asyncio.ensure_future(answer_of(index)) for index in waiting}
    try:
        done, _ = await asyncio.wait(tasks.values(), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises what it raised
        if late := [places[index] for index, task in tasks.items() if not task.done()]:
            remedy = "Have them end by themselves before, or raise generate_config.timeout_seconds"
            raise ArgumentError(
                [Violation(argument, f"not done after {seconds:g} s: {first_of(late, 3, '; ')}", remedy)]
            )
        return {index: task.result() for index, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()


@contextmanager
def named(argument: str, place: str) -> Iterator[None]:
    """Raise ArgumentError naming argument, place and line for whatever a user's code raises."""
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if _is_being_cancelled():
            raise
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        problem = f"{type(error).__name__} for {place}" + (f": {error}" if str(error) else "")
        remedy = f"It was raised by {theirs[0].filename}:{theirs[0].lineno}" if theirs else "It cannot be called so"
        raise ArgumentError([Violation(argument, problem, remedy)]) from error


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return False
    return task is not None and task.cancelling() > 0


def is_coroutine_function(function: object) -> bool:
    """Also an object that is called by one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments and rewards", daemon=True).start()
    return loop
