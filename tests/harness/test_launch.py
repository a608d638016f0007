"""The launcher of ranks returns their output, and a failed call affects no other call."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.launch import Ranks, on_ranks


def read_pickles() -> list[str]:
    refusals = []
    for module in (
        "hybrid_engine.switch.probe",
        "hybrid_engine.trainer.checkpoint_directory",
        "torch.probe",
    ):
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
def test_a_failed_call_does_not_affect_other_calls(
    ranks: Ranks, function: Callable[[], None], message: str
) -> None:
    calls = {"before": (get_rank, ()), "broken": (function, ()), "after": (get_rank, ())}
    outcomes = ranks.launch_in_turn(2, calls, timeout=60)
    assert outcomes["before"] == outcomes["after"] == [0, 1]
    with pytest.raises(AssertionError, match=message):
        outcomes["broken"]


@pytest.mark.xfail(strict=True, raises=AssertionError)
@on_ranks(2)
def test_a_body_fails_if_it_fails_on_one_rank() -> None:
    assert get_rank() == 0


@on_ranks(2)
@pytest.mark.parametrize("size", [2])
def test_a_body_gets_parameters_and_a_directory_of_all_ranks(tmp_path: Path, size: int) -> None:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == size
    (tmp_path / str(get_rank())).touch()
    dist.barrier()
    assert len([*tmp_path.iterdir()]) == size
    dist.destroy_process_group()
