"""The launcher of ranks returns their output, and a failed call affects no other call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.harness.launch import Ranks


def print_and_die() -> None:
    print("last output of rank", os.environ["RANK"])
    time.sleep(0.5 * int(os.environ["RANK"]))
    os.kill(os.getpid(), signal.SIGKILL)


def import_a_backend() -> None:
    import hybrid_engine.backends.megatron  # noqa: F401


def test_a_rank_without_engines_builds_none(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"imports hybrid_engine\.backends\.megatron: take the fixture `engines`"):
        ranks.launch(import_a_backend, 1, timeout=60)


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


def test_the_output_of_a_killed_rank_is_reported(ranks: Ranks) -> None:
    with pytest.raises(AssertionError) as failure:
        ranks.launch(print_and_die, 2, timeout=60)
    assert all(f"last output of rank {rank}\n" in str(failure.value) for rank in range(2))


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
