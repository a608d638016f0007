"""Calls of what a user has given to be called for each completion: a function, or a coroutine function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import math
import numbers
import selectors
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_engine.errors import ArgumentError, Violation, clipped, first_of, shortened

logger = logging.getLogger("hybrid_engine")

_SHARE = 0.9
"""Part of the other ranks' timeout after which this one gives up, so that its error, with the cause, comes first."""
_SHARE_OF_A_BLOCKED_LOOP = 0.95
"""The same where a coroutine does not let the event loop look at the time."""
_SECONDS_BETWEEN_LOOKS = 0.05
_MOST_CHARACTERS = 2000
"""Of the text of an error that a user's code raises."""

MOST_REWARD = 1e18
"""Largest absolute value of a reward. Its square, and the sum of hundreds of squares, are finite in float32, in which
advantages and the critic's loss are computed."""


def number_of(value: Any) -> float:
    """Return the number that a user's code gave: an int, a float or a bool, a scalar of NumPy or another library's real
    number, or a tensor or an array with one element.

    Raises TypeError for anything else, texts among it, and OverflowError for an int beyond float64.
    """
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        value = value.item()  # raises where there are several elements
    if not isinstance(value, numbers.Real):
        raise TypeError("not a real number")
    return float(value)


def rewards_of(values: Sequence[Any], places: Sequence[str]) -> list[float]:
    """Return rewards as floats; `places` says which completion each is of.

    Raises ArgumentError, with a violation for each that is not a number, not finite, or beyond `MOST_REWARD`.
    """
    rewards, violations = list[float](), list[Violation]()
    for value, place in zip(values, places, strict=True):
        try:
            reward = number_of(value)
        except Exception:  # of the value's own conversion, too
            reward = math.nan
        if abs(reward) <= MOST_REWARD:
            rewards.append(reward)
        else:
            remedy = f"Return a finite number of at most {MOST_REWARD:g}, or a tensor of one element"
            violations.append(Violation("reward", f"is {shortened(value)} for {place}", remedy))
    if violations:
        raise ArgumentError(violations)
    return rewards


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
    cancelled; where one blocks the event loop, it is left behind with its loop.
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
        running = asyncio.run_coroutine_threadsafe(together, _event_loop().loop)
        try:
            for index, answer in _result(running, argument, _SHARE_OF_A_BLOCKED_LOOP * timeout_seconds).items():
                answers[index] = answer
        finally:
            running.cancel()  # where whoever waits is interrupted
    return answers


async def _together(
    argument: str, places: Sequence[str], waiting: Mapping[int, Awaitable[Any]], seconds: float
) -> dict[int, Any]:
    async def answer_of(index: int) -> Any:
        # No signal's handler runs in this thread: the coroutine itself wants the process to end.
        with named(argument, places[index], (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt)):
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


def _result(running: Future[dict[int, Any]], argument: str, seconds: float) -> dict[int, Any]:
    """Raises ArgumentError, naming the line, where a coroutine keeps the event loop from ending in time."""
    wait([running], seconds)
    where = None
    while not running.done() and (where := _event_loop().line()) is None:
        wait([running], _SECONDS_BETWEEN_LOOKS)  # a busy host: the loop is about to see that the time is over
    if where is None:
        return running.result()
    _event_loop.cache_clear()  # what is asked next does not wait for this one
    problem = f"a coroutine has blocked the event loop for {seconds:g} s, in {where}"
    remedy = "Await what it waits for, or call it by asyncio.to_thread"
    raise ArgumentError([Violation(argument, problem, remedy)])


@contextmanager
def named(
    argument: str, place: str, kinds: tuple[type[BaseException], ...] = (Exception, asyncio.CancelledError)
) -> Iterator[None]:
    """Raise ArgumentError naming argument, place and line for whatever a user's code raises of these `kinds`."""
    try:
        yield
    except kinds as error:
        if _is_being_cancelled():
            raise
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        text = clipped(str(traceback.TracebackException(type(error), error, None)), _MOST_CHARACTERS)
        problem = f"{type(error).__name__} for {place}" + (f": {text}" if text else "")
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


class _LoopInThread(NamedTuple):
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def line(self) -> str | None:
        """Where the coroutine under way is, its outermost line; None where the loop waits, or does its own work."""
        frames = traceback.extract_stack(sys._current_frames()[self.thread.ident or 0])
        machinery = {__file__, *map(str, Path(asyncio.__file__).parent.glob("*.py"))}
        theirs = list(itertools.takewhile(lambda frame: frame.filename not in machinery, reversed(frames)))
        if all(frame.filename == selectors.__file__ for frame in theirs):
            return None
        return f"{theirs[-1].filename}:{theirs[-1].lineno}"


@functools.cache
def _event_loop() -> _LoopInThread:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop,), name="environments and rewards", daemon=True)
    thread.start()
    return _LoopInThread(loop, thread)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while not loop.is_closed():
        try:
            loop.run_forever()
        except BaseException as error:  # asyncio lets SystemExit end a loop; the task that raised it has it as well
            logger.debug("a coroutine ended the event loop: %r", error)
