"""User callbacks: functions run in turn, coroutines together; errors name the callback."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_engine.errors import ArgumentError
from hybrid_engine.rl.losses import group_advantages
from hybrid_engine.rl.user_callbacks import rewards_of, run_callbacks
from tests.harness.errors import has_violation, has_violations


class Judge:
    """Waits until `number` calls run; its barrier belongs to the first call's event loop."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._barrier: asyncio.Barrier | None = None

    async def __call__(self, value: int) -> int:
        self._barrier = self._barrier or asyncio.Barrier(self._number)
        async with asyncio.timeout(60):
            await self._barrier.wait()
        return value * 10


def test_coroutines_run_together_and_results_keep_their_order() -> None:
    order: list[int] = []

    def plain(value: int) -> int:
        order.append(value)
        return -value

    judge = Judge(3)
    for _ in range(2):
        calls: list[Any] = [(str(value), plain if value in (1, 4) else judge, (value,)) for value in range(5)]
        assert run_callbacks("reward", calls, 60) == [0, -1, 20, 30, -4]
    assert order == [1, 4, 1, 4]
    assert run_callbacks("reward", [("", partial(Judge(1).__call__, 7), ())], 60) == [70]
    assert run_callbacks("reward", [], 60) == []


def test_a_failed_coroutine_is_named_and_the_others_are_cancelled() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("no such tool")

    failed = has_violation("environment", "callback-failed", "LookupError for prompt 1: no such tool", f"{__file__}:")
    with pytest.raises(ArgumentError, check=failed):
        run_callbacks("environment", [("prompt 0", waits, ()), ("prompt 1", fails, ())], 60)
    # The event loop is still running and has cancelled the other coroutine.
    run_callbacks("environment", [("", partial(asyncio.sleep, 0), ())], 60)
    assert ended == ["cancelled"]


def test_timeouts_are_named() -> None:
    async def waits() -> None:
        await asyncio.sleep(600)

    calls: list[Any] = [(f"prompt {number}", waits if number else partial(asyncio.sleep, 0), ()) for number in range(6)]
    late = has_violation("environment", "callback-timeout", "0.09 s", "prompt 1; prompt 2; prompt 3 and 2 more")
    with pytest.raises(ArgumentError, check=late):
        run_callbacks("environment", calls, 0.1)


def test_a_function_may_return_a_coroutine_and_all_are_awaited(recwarn: pytest.WarningsRecorder) -> None:
    judge = Judge(2)
    calls: list[Any] = [("prompt 0", lambda value: judge(value), (1,)), ("prompt 0", judge, (2,))]
    assert run_callbacks("reward", calls, 60) == [10, 20]
    with pytest.raises(ArgumentError, check=has_violation("reward", "callback-failed", "TypeError for prompt 1: ")):
        run_callbacks("reward", [*calls, ("prompt 1", judge, ())], 60)
    gc.collect()  # Python warns of a coroutine when it is collected
    assert not recwarn.list


async def call_exit() -> None:
    sys.exit(3)


async def call_exit_in_a_task() -> None:
    await asyncio.create_task(call_exit())


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


def raising(error: BaseException) -> None:
    raise error


async def raising_later(error: BaseException) -> None:
    raise error


# The first is Ctrl-C in the main thread.
EXITS = (KeyboardInterrupt(), SystemExit(0), GeneratorExit(), asyncio.CancelledError())


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (call_exit, "SystemExit for prompt 0: 3"),
        (call_exit_in_a_task, "SystemExit for prompt 0: 3"),
        (cancel_itself, "CancelledError for prompt 0"),
        *((partial(raising, error), f"{type(error).__name__} for prompt 0") for error in EXITS[1:]),
        *((partial(raising_later, error), f"{type(error).__name__} for prompt 0") for error in EXITS),
    ],
)
def test_an_exit_is_an_error_of_the_callback_and_the_event_loop_survives(
    callback: Callable[[], Any], text: str
) -> None:
    with pytest.raises(ArgumentError, check=has_violation("reward", "callback-failed", text, f"{__file__}:")):
        run_callbacks("reward", [("prompt 0", callback, ())], 60)
    assert run_callbacks("reward", [("prompt 0", partial(asyncio.sleep, 0, 7), ())], 60) == [7]


def test_ctrl_c_in_a_callback_is_no_error_of_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_callbacks("reward", [("prompt 0", partial(signal.raise_signal, signal.SIGINT), ())], 60)


def test_modes_that_a_callback_sets_end_with_it() -> None:
    filters = [*warnings.filters]

    def change() -> None:
        warnings.simplefilter("error")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)

    run_callbacks("reward", [("prompt 0", change, ())], 60)
    assert filters == warnings.filters
    ones = torch.tensor([1.0], requires_grad=True) * 2
    assert (ones.dtype, ones.device.type, ones.requires_grad) == (torch.float32, "cpu", True)


def test_a_coroutine_that_blocks_the_event_loop_is_named_and_abandoned() -> None:
    seconds = 5.0

    async def block() -> None:
        time.sleep(seconds)  # blocks the event loop, unlike asyncio.sleep

    line = block.__code__.co_firstlineno + 1
    started = time.monotonic()
    with pytest.raises(
        ArgumentError, check=has_violation("reward", "event-loop-blocked", "0.095 s", f"{__file__}:{line}.")
    ):
        run_callbacks("reward", [("prompt 0", block, ())], 0.1)
    assert run_callbacks("reward", [("prompt 0", partial(asyncio.sleep, 0, 7), ())], 60) == [7]
    assert time.monotonic() - started < seconds


def test_long_or_missing_error_texts_are_handled() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    def raise_error(error: Exception) -> None:
        raise error

    for error, text in ((ValueError("x" * 100_000), "x" * 1999 + "…"), (Unprintable(), "<exception str() failed>")):
        failed = has_violation("reward", "callback-failed", f"for prompt 0: {text}. ")
        with pytest.raises(ArgumentError, check=failed) as caught:
            run_callbacks("reward", [("prompt 0", raise_error, (error,))], 60)
        assert len(str(caught.value)) < 2500


class FailingNumber:
    def __float__(self) -> float:
        raise KeyError("no number")


NUMBERS = (1, 0.5, True, -1e18, Fraction(1, 2), np.float16(0.5), np.int8(-3), np.bool_(True), np.ones(1))
NUMBERS += (torch.tensor(0.5), torch.ones(1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.int64))
NOT_NUMBERS = (
    None,
    "0.5",
    b"1",
    [1.0],
    {},
    1j,
    FailingNumber(),
    np.ones(2),
    torch.ones(2),
    np.str_("1"),
    torch.ones(0),
)
NOT_NUMBERS += (float("nan"), float("-inf"), 1e39, -2e18, 10**400, np.float64("nan"), torch.tensor(float("inf")))


def test_a_reward_is_a_number_whose_square_is_finite_in_float32() -> None:
    rewards = rewards_of(NUMBERS, [str(place) for place in range(len(NUMBERS))])
    assert rewards == [1, 0.5, 1, -1e18, 0.5, 0.5, -3, 1, 1, 0.5, 1, 1]
    assert {type(reward) for reward in rewards} == {float}
    for scaled in (True, False):
        advantages = group_advantages(torch.tensor([[1e18] * 63 + [-1e18]]), scaled=scaled)
        assert torch.isfinite(advantages).all()
        assert torch.isfinite(advantages.square().sum())


def test_every_invalid_reward_is_named() -> None:
    values = [0.5, *NOT_NUMBERS]
    expected = [("reward", "invalid-reward")] * len(NOT_NUMBERS)
    with pytest.raises(ArgumentError, check=has_violations(*expected)) as caught:
        rewards_of(values, [f"prompt {place}, completion 0" for place in range(len(values))])
    assert "'0.5' for prompt 2, completion 0" in str(caught.value.findings[1])
    assert "1e+18" in caught.value.findings[1].remedy
