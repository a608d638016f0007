"""What users give to be called: functions in turn, coroutines together; what fails is named."""

from __future__ import annotations

import asyncio
import gc
import re
from functools import partial
from typing import Any

import pytest

from hybrid_engine.errors import ArgumentError
from hybrid_engine.rl.asking import ask_each


class Judge:
    """Answers when so many have asked; with a connection that belongs to the event loop of the first call."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._barrier: asyncio.Barrier | None = None

    async def __call__(self, value: int) -> int:
        self._barrier = self._barrier or asyncio.Barrier(self._number)
        async with asyncio.timeout(60):
            await self._barrier.wait()
        return value * 10


def test_coroutines_run_together_in_one_event_loop_and_answers_are_in_order() -> None:
    order: list[int] = []

    def plain(value: int) -> int:
        order.append(value)
        return -value

    judge = Judge(3)
    for _ in range(2):
        calls: list[Any] = [(str(value), plain if value in (1, 4) else judge, (value,)) for value in range(5)]
        assert ask_each("reward", calls, 60) == [0, -1, 20, 30, -4]
    assert order == [1, 4, 1, 4]
    assert ask_each("reward", [("", partial(Judge(1).__call__, 7), ())], 60) == [70]
    assert ask_each("reward", [], 60) == []


def test_a_coroutine_that_fails_is_named_and_the_others_are_cancelled() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("no such tool")

    with pytest.raises(ArgumentError) as caught:
        ask_each("environment", [("prompt 0", waits, ()), ("prompt 1", fails, ())], 60)
    said = f"environment: LookupError for prompt 1: no such tool. It was raised by {__file__}:"
    assert said in str(caught.value)
    ask_each("environment", [("", partial(asyncio.sleep, 0), ())], 60)  # the loop goes on, and has ended them by then
    assert ended == ["cancelled"]


def test_what_takes_too_long_or_is_cancelled_is_named() -> None:
    async def waits() -> None:
        await asyncio.sleep(600)

    async def cancelled() -> None:
        raise asyncio.CancelledError

    calls: list[Any] = [(f"prompt {number}", waits if number else partial(asyncio.sleep, 0), ()) for number in range(6)]
    late = r"not done after 0\.09 s: prompt 1; prompt 2; prompt 3 and 2 more\. Have them end by themselves before"
    with pytest.raises(ArgumentError, match=late):
        ask_each("environment", calls, 0.1)
    with pytest.raises(ArgumentError, match=re.escape(f"CancelledError for prompt 0. It was raised by {__file__}:")):
        ask_each("environment", [("prompt 0", cancelled, ())], 60)


def test_a_function_may_return_a_coroutine_and_none_is_left_unawaited(recwarn: pytest.WarningsRecorder) -> None:
    judge = Judge(2)
    calls: list[Any] = [("prompt 0", lambda value: judge(value), (1,)), ("prompt 0", judge, (2,))]
    assert ask_each("reward", calls, 60) == [10, 20]
    with pytest.raises(ArgumentError, match=r"TypeError for prompt 1: .* It cannot be called so"):
        ask_each("reward", [*calls, ("prompt 1", judge, ())], 60)
    gc.collect()
    assert not recwarn.list
