"""User callbacks: functions run in turn, coroutines together; errors name the callback."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_engine.errors import ArgumentError, shortened
from hybrid_engine.rl.losses import group_advantages
from hybrid_engine.rl.user_callbacks import printing_once, rewards_of, run_callbacks
from tests.harness.errors import has_violation


def call(*functions: Callable[[], Any], argument: str = "reward", seconds: float = 60) -> list[Any]:
    """Call functions without arguments, for prompts 0, 1 and so on."""
    calls = [(f"prompt {number}", function, ()) for number, function in enumerate(functions)]
    return run_callbacks(argument, calls, seconds)


def sleeping(seconds: float, result: Any = None) -> Callable[[], Any]:
    return partial(asyncio.sleep, seconds, result)


@contextmanager
def refused(code: str, *texts: str, argument: str = "reward") -> Iterator[None]:
    """Require an error; the event loop then awaits coroutines as ever."""
    with pytest.raises(ArgumentError, check=has_violation(argument, code, *texts)) as caught:
        yield
    assert len(str(caught.value)) < 2500
    assert call(sleeping(0, 7)) == [7]


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


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_prints(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    with printing_once(rank):
        print("once")
    assert capsys.readouterr().out == "once\n" * (rank == 0)


def test_coroutines_run_together_and_results_keep_their_order(
    recwarn: pytest.WarningsRecorder,
) -> None:
    order: list[int] = []

    def plain(value: int) -> int:
        order.append(value)
        return -value

    judge = Judge(4)
    functions = [*(partial(plain if value in (1, 4) else judge, value) for value in range(5))]
    # A function may return a coroutine.
    functions.append(lambda: judge(5))
    for _ in range(2):
        assert call(*functions) == [0, -1, 20, 30, -4, 50]
    assert order == [1, 4, 1, 4]
    assert call() == []
    with refused("callback-failed", "TypeError for prompt 6: "):
        call(*functions, judge)  # type: ignore[arg-type]
    gc.collect()  # Python warns of a coroutine when it is collected
    assert not recwarn.list


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

    texts = ("LookupError for prompt 1: no such tool", f"{__file__}:")
    with refused("callback-failed", *texts, argument="environment"):
        call(waits, fails, argument="environment")
    assert ended == ["cancelled"]


def test_timeouts_are_named() -> None:
    with refused("callback-timeout", "0.09 s", "prompt 1; prompt 2; prompt 3 and 2 more"):
        call(sleeping(0), *[sleeping(600)] * 5, seconds=0.1)


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
        *(
            (partial(raising_later, error), f"{type(error).__name__} for prompt 0")
            for error in EXITS
        ),
    ],
)
def test_an_exit_is_an_error_of_the_callback(callback: Callable[[], Any], text: str) -> None:
    with refused("callback-failed", text, f"{__file__}:"):
        call(callback)


def test_ctrl_c_in_a_callback_is_no_error_of_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        call(partial(signal.raise_signal, signal.SIGINT))


def test_modes_that_a_callback_sets_end_with_it() -> None:
    filters = [*warnings.filters]

    def change() -> None:
        warnings.simplefilter("error")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)

    call(change)
    assert filters == warnings.filters
    ones = torch.tensor([1.0], requires_grad=True) * 2
    assert (ones.dtype, ones.device.type, ones.requires_grad) == (torch.float32, "cpu", True)


def test_a_coroutine_that_blocks_the_event_loop_is_named_and_abandoned() -> None:
    seconds = 5.0

    async def block() -> None:
        time.sleep(seconds)  # blocks the event loop, unlike asyncio.sleep

    line = block.__code__.co_firstlineno + 1
    started = time.monotonic()
    with refused("event-loop-blocked", "0.095 s", f"{__file__}:{line}."):
        call(block, seconds=0.1)
    assert time.monotonic() - started < seconds


class Unprintable(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("x" * 100_000), "x" * 1999 + "…"), (Unprintable(), "<exception str() failed>")],
)
def test_long_or_missing_error_texts_are_handled(error: Exception, text: str) -> None:
    with refused("callback-failed", f"for prompt 0: {text}. "):
        call(partial(raising, error))


class FailingNumber:
    def __float__(self) -> float:
        raise KeyError("no number")


NUMBERS = (
    1,
    0.5,
    True,
    -1e18,
    Fraction(1, 2),
    np.float16(0.5),
    np.int8(-3),
    np.bool_(True),
    np.ones(1),
)
NUMBERS += (
    torch.tensor(0.5),
    torch.ones(1, dtype=torch.bfloat16),
    torch.ones(1, 1, dtype=torch.int64),
)
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
NOT_NUMBERS += (
    float("nan"),
    float("-inf"),
    1e39,
    -2e18,
    10**400,
    np.float64("nan"),
    torch.tensor(float("inf")),
)


def test_a_reward_is_a_number_whose_square_is_finite_in_float32() -> None:
    rewards = rewards_of(NUMBERS, [str(place) for place in range(len(NUMBERS))])
    assert rewards == [1, 0.5, 1, -1e18, 0.5, 0.5, -3, 1, 1, 0.5, 1, 1]
    assert {type(reward) for reward in rewards} == {float}
    for scaled in (True, False):
        advantages = group_advantages(torch.tensor([[1e18] * 63 + [-1e18]]), scaled=scaled)
        assert torch.isfinite(advantages).all()
        assert torch.isfinite(advantages.square().sum())


def test_the_first_invalid_reward_is_named_and_all_are_counted() -> None:
    for value in NOT_NUMBERS:
        text = f"{shortened(value)} for prompt 1; 2 of 3"
        counted = has_violation("reward", "invalid-reward", text, "1e+18")
        with pytest.raises(ArgumentError, check=counted):
            rewards_of([0.5, value, value], ["prompt 0", "prompt 1", "prompt 2"])
