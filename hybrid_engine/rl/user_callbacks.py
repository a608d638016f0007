"""Calls of the user's callbacks (rewards and environments): functions and coroutine functions."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import math
import numbers
import os
import queue
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

from hybrid_engine.errors import (
    ArgumentError,
    HybridEngineError,
    Violation,
    clipped,
    first_of,
    is_of_user,
    shortened,
)
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.background import in_background
from hybrid_engine.ranks.torch_internals import torch_modes_kept

logger = logging.getLogger("hybrid_engine")

# Rank 0 gives up before the other ranks' timeout, so that its error, which has the cause, comes
# first. A coroutine that blocks the event loop also blocks the loop's own timeout, so the waiting
# thread checks, too.
_SHARE_OF_TIMEOUT = 0.9
_SHARE_OF_TIMEOUT_WHEN_BLOCKED = 0.95
_SECONDS_OF_A_STEP = 1.0
_BUT_CTRL_C = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that a user's function raises itself. Ctrl-C, raised in the function that the main
thread is in, is not among them."""
_MAX_CHARACTERS = 2000
"""Length at which the text of a user's exception is cut."""

MAX_REWARD = 1e18
"""Largest absolute value of a reward.

Advantages and the critic's loss are computed in float32, in which the square of this number, and
the sum of hundreds of such squares, are finite.
"""


def number_of(value: Any) -> float:
    """Convert a number that a user's callback returned.

    Accepts int, float, bool, scalars of NumPy, real numbers of other libraries, and tensors and
    arrays with one element.

    Raises:
        TypeError: `value` is anything else, for example a string.
        OverflowError: `value` is an int beyond the range of float64.
    """
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        value = value.item()  # raises if there are several elements
    if not isinstance(value, numbers.Real):
        raise TypeError("not a real number")
    return float(value)


def rewards_of(
    values: Sequence[Any],
    places: Sequence[str],
    argument: str = "reward",
) -> list[float]:
    """Convert rewards to floats; `places` names the completion of each for messages.

    Raises ArgumentError with the first value that is not a number, is not finite, or is beyond
    `MAX_REWARD`, and the number of such values.
    """
    rewards = []
    wrong = []
    for value, place in zip(values, places, strict=True):
        try:
            reward = number_of(value)
        except Exception:  # the value's own conversion can raise anything
            reward = math.nan
        rewards.append(reward)
        # True for nan as well.
        if not abs(reward) <= MAX_REWARD:
            wrong.append(f"{shortened(value)} for {place}")
    if wrong:
        raise ArgumentError.of(
            argument,
            f"is {wrong[0]}; {len(wrong):,} of {len(rewards):,} values are not valid",
            f"Return a finite number of at most {MAX_REWARD:g}, or a tensor of one element",
            code="invalid-reward",
        )
    return rewards


@torch_modes_kept()
def run_callbacks(
    argument: str,
    calls: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]],
    timeout_seconds: float,
) -> list[Any]:
    """Make the calls one after the other, then await all awaitable results together.

    There is one event loop for the life of the process, so a connection that was opened in one
    turn can be used in the next.

    Args:
        argument: name under which the user passed the callback, for messages.
        calls: (place for messages, function, its arguments) of each call.
        timeout_seconds: time for which other ranks wait for the results.

    Returns the results in the order of `calls`.

    Torch's default dtype, default device and gradient mode are those of before at the end.

    Raises ArgumentError if a callback raises, or if awaitables are not done after 90 % of the
    timeout. Unfinished awaitables are cancelled. If one of them blocks the event loop, it is
    abandoned together with the loop.
    """
    results: list[Any] = []
    try:
        for place, function, arguments in calls:
            with naming_failure(argument, place, _BUT_CTRL_C):
                results.append(function(*arguments))
    except BaseException:
        # Python warns about coroutines that are neither awaited nor closed.
        for result in filter(inspect.iscoroutine, results):
            result.close()
        raise
    pending = {index: result for index, result in enumerate(results) if inspect.isawaitable(result)}
    if pending:
        places = [place for place, *_ in calls]
        coroutine = _await_all(argument, places, pending, _SHARE_OF_TIMEOUT * timeout_seconds)
        task = start_task(coroutine)
        try:
            for _ in steps_of(task, argument, timeout_seconds):
                pass
            for index, result in task.result().items():
                results[index] = result
        finally:
            task.cancel()  # matters if this thread was interrupted while it waited
    return results


async def run_callback(
    argument: str,
    place: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_seconds: float,
) -> Any:
    """Make one call from the event loop, and await its result if it is awaitable.

    All such calls are made in one thread, one after the other; awaitable results are awaited
    together, as in `run_callbacks`.

    Raises ArgumentError as `run_callbacks`; 90 % of the timeout bound the call and its result each.
    While a call that takes longer, or was cancelled, goes on, others are made in a new thread.
    """
    seconds = _SHARE_OF_TIMEOUT * timeout_seconds

    def call() -> Any:
        # Here, because asyncio's futures refuse StopIteration.
        with torch_modes_kept(), naming_failure(argument, place):
            return function(*arguments)

    async with _event_loop().calls:
        future = _caller().submit(call)
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError as error:
            raise ArgumentError([_timeout_violation(argument, seconds, place)]) from error
        finally:
            # It takes too long, or nobody needs it any more; others must not wait for it.
            if not future.done():
                _caller.cache_clear()
    if inspect.isawaitable(result):
        result = (await _await_all(argument, [place], {0: result}, seconds))[0]
    return result


def start_task(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Start a coroutine in the event loop of callbacks."""
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop().loop)


def steps_of(future: Future[Any], argument: str, timeout_seconds: float) -> Iterator[None]:
    """Yield every second or more often until a future is done: the steps of `Agreement.rounds`.

    Raises ArgumentError that names the line, if a coroutine blocks the event loop for 95 % of the
    timeout.
    """
    # Short enough to raise before the timeout.
    seconds = min(_SECONDS_OF_A_STEP, timeout_seconds / 40)
    limit_seconds = _SHARE_OF_TIMEOUT_WHEN_BLOCKED * timeout_seconds
    heartbeat: Future[None] | None = None
    begin = 0.0
    while not wait([future], seconds).done:
        if heartbeat is None or heartbeat.done():
            begin = time.monotonic()
            # It ends at once, unless a coroutine blocks the event loop.
            heartbeat = start_task(asyncio.sleep(0))
        elif time.monotonic() - begin > limit_seconds:
            blocked_at = _event_loop().line()
            if blocked_at is not None:
                raise _blocked(argument, limit_seconds, blocked_at)
        yield


async def _await_all(
    argument: str,
    places: Sequence[str],
    pending: Mapping[int, Awaitable[Any]],
    seconds: float,
) -> dict[int, Any]:
    """Await all of `pending` together, for at most `seconds`; cancel the rest on failure."""

    async def result_of(index: int) -> Any:
        with naming_failure(argument, places[index]):
            return await pending[index]

    tasks = {index: asyncio.ensure_future(result_of(index)) for index in pending}
    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*tasks.values())
    except (TimeoutError, asyncio.CancelledError) as error:
        # All tasks have ended; these by a cancellation.
        ended = [places[index] for index, task in tasks.items() if task.cancelled()]
        if isinstance(error, TimeoutError):
            violation = _timeout_violation(argument, seconds, first_of(ended, 3, "; "))
            raise ArgumentError([violation]) from error
        with naming_failure(argument, first_of(ended, 1)):  # it has cancelled itself
            raise
    finally:
        for task in tasks.values():
            task.cancel()
    return {index: task.result() for index, task in tasks.items()}


def _timeout_violation(argument: str, seconds: float, places: str) -> Violation:
    return Violation(
        argument,
        f"not done after {seconds:g} s: {places}",
        "Bound the time that each of them takes, or raise generate_config.timeout_seconds",
        code="callback-timeout",
    )


def _blocked(argument: str, seconds: float, line: str) -> ArgumentError:
    """Abandon the event loop, and return the error that names the line which blocks it."""
    _event_loop.cache_clear()  # later calls get a new loop instead of waiting for the blocked one
    return ArgumentError.of(
        argument,
        f"a coroutine has blocked the event loop for {seconds:g} s, in {line}",
        "Use an awaitable call there, or run the blocking call by asyncio.to_thread",
        code="event-loop-blocked",
    )


@contextmanager
def naming_failure(
    argument: str,
    place: str,
    kind: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
) -> Iterator[None]:
    """Turn exceptions of `kind` into ArgumentError that names argument, place and line.

    By default all, also `SystemExit`: a function that calls `exit()` must not end the process as if
    the run were finished.
    """
    try:
        yield
    except kind as error:
        stack = traceback.extract_tb(error.__traceback__)
        user_frames = list(filter(is_of_user, stack))
        # From outside: the task is cancelled, or its coroutine is closed with its event loop.
        is_closed = isinstance(error, GeneratorExit) and not user_frames
        if is_closed or _is_being_cancelled():
            raise
        # TracebackException also copes with exceptions whose __str__ raises.
        text = str(traceback.TracebackException(type(error), error, None))
        text = clipped(text, _MAX_CHARACTERS)
        problem = f"{type(error).__name__} for {place}"
        if text:
            problem = f"{problem}: {text}"
        remedy = "It cannot be called with these arguments"
        if user_frames:
            remedy = f"It was raised by {user_frames[0].filename}:{user_frames[0].lineno}"
        raise ArgumentError.of(argument, problem, remedy, code="callback-failed") from error


@contextmanager
def calling(agreement: Agreement, argument: str, place: str) -> Iterator[None]:
    """Call a function of the user on every rank; all raise if it fails on one of them.

    Raises ArgumentError as `run_callbacks`, also for SystemExit. Errors of this package, from calls
    that the function makes, pass unchanged.
    """
    with agreement.phase(f"calling {argument}"):
        try:
            yield
        except HybridEngineError:
            raise
        except (Exception, SystemExit):
            with naming_failure(argument, place):
                raise


@contextmanager
def printing_once(rank: int) -> Iterator[None]:
    """Discard what ranks but 0 print to stdout: each makes the same call of the user's function."""
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing if rank else sys.stdout):
        yield


def _is_being_cancelled() -> bool:
    """Return whether the current task was cancelled from outside, as `_await_all` does."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # there is no running event loop in this thread
        return False
    return task is not None and task.cancelling() > 0


def is_coroutine_function(function: object) -> bool:
    """Return whether `function` is a coroutine function, or an object with such a `__call__`."""
    method = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


class _LoopThread(NamedTuple):
    """Event loop, the thread that runs it, and the lock of calls that its tasks make."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    calls: asyncio.Lock

    def line(self) -> str | None:
        """Return the outermost line of the running coroutine as "file:line".

        Returns None while the loop waits for events or does its own work.
        """
        innermost = sys._current_frames()[self.thread.ident or 0]
        stack = traceback.extract_stack(innermost)
        # From the innermost frame outwards, up to the first frame of the event loop.
        frames = itertools.takewhile(is_of_user, reversed(stack))
        user_frames = list(frames)
        if all(frame.filename == selectors.__file__ for frame in user_frames):
            return None
        return f"{user_frames[-1].filename}:{user_frames[-1].lineno}"


@functools.cache
def _event_loop() -> _LoopThread:
    """Start the process's event loop in a daemon thread; later calls return the same one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=_run_forever,
        args=(loop,),
        name="environments and rewards",
        daemon=True,
    )
    thread.start()
    return _LoopThread(loop, thread, asyncio.Lock())


class CallThread:
    """A daemon thread that makes calls, one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        in_background(self._run, name)

    @property
    def num_waiting(self) -> int:
        """Number of calls that have not begun."""
        return self._calls.qsize()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Return the future of a call."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        """End the thread after the calls so far."""
        self._calls.put(None)

    def _run(self) -> None:
        for call, future in iter(self._calls.get, None):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # raised where the future is awaited
                    future.set_exception(error)
            # The wait for the next call must not keep what this one refers to.
            del call, future


@functools.cache
def _caller() -> CallThread:
    """Return the process's thread for functions of environments with servers."""
    return CallThread("environments")


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop, and again after each exception that ended it."""
    while not loop.is_closed():
        try:
            loop.run_forever()
        except BaseException as error:
            # asyncio ends a loop on SystemExit and KeyboardInterrupt. The task that raised the
            # exception has it as well, so it reaches the caller by `_await_all`.
            logger.debug("a coroutine ended the event loop: %r", error)
