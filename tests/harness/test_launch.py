"""The launcher of ranks returns their output, and a failed call affects no other call."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.harness.launch import Ranks


def read_pickles() -> list[str]:
    refusals = []
    for module in ("hybrid_engine.switch.probe", "hybrid_engine.trainer.checkpoint_directory", "torch.probe"):
        for call in ("__import__('pickle').loads(b'N.')", "dist.all_gather_object([None], 1)"):
            try:
                exec(call, {"__name__": module, "dist": dist})
            except Exception as error:
                refusals.append(f"{module.rpartition('.')[2]}: {error}")
    return refusals


def test_our_modules_read_no_pickles_in_a_rank(ranks: Ranks) -> None:
    (refusals,) = ranks.launch(read_pickles, 1, timeout=60)
    assert refusals[:2] == [
        f"probe: hybrid_engine.switch.probe calls {name}" for name in ("loads", "all_gather_object")
    ]
    # The module that may read pickles and torch itself pass the guard and fail for lack of a group.
    assert all("Default process group" in message for message in refusals[2:])


def get_rank() -> int:
    return int(os.environ["RANK"])


def fail_on_the_last_rank() -> None:
    assert get_rank() == 0, "broken on purpose"


def exit_silently() -> None:
    os._exit(0)


@pytest.mark.parametrize(
    ("function", "message"),
    [(fail_on_the_last_rank, "broken on purpose"), (exit_silently, "exit_silently on 2")],
)
def test_a_failed_call_does_not_affect_other_calls(ranks: Ranks, function: Callable[[], None], message: str) -> None:
    calls = {"before": (get_rank, ()), "broken": (function, ()), "after": (get_rank, ())}
    outcomes = ranks.launch_in_turn(2, calls, timeout=60)
    assert outcomes["before"] == outcomes["after"] == [0, 1]
    with pytest.raises(AssertionError, match=message):
        outcomes["broken"]
