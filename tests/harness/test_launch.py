"""Ranks of tests: what they say comes back, and a call that fails is its own failure only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.harness.launch import Ranks


def speak_and_die() -> None:
    print("the last words of rank", os.environ["RANK"])
    time.sleep(0.5 * int(os.environ["RANK"]))
    os.kill(os.getpid(), signal.SIGKILL)


def import_a_backend() -> None:
    import hybrid_engine.backends.megatron  # noqa: F401


def test_a_rank_without_engines_builds_none(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"imports hybrid_engine\.backends\.megatron: take the fixture `engines`"):
        ranks.launch(import_a_backend, 1, timeout=60)


def read_pickles() -> list[str]:
    said = []
    for module in ("hybrid_engine.switch.probe", "hybrid_engine.trainer.checkpoint_directory", "torch.probe"):
        for call in ("__import__('pickle').loads(b'N.')", "dist.all_gather_object([None], 1)"):
            try:
                exec(call, {"__name__": module, "dist": dist})
            except Exception as error:
                said.append(f"{module.rpartition('.')[2]}: {error}")
    return said


def test_our_modules_read_no_pickles_in_a_rank(ranks: Ranks) -> None:
    (said,) = ranks.launch(read_pickles, 1, timeout=60)
    assert said[:2] == [f"probe: hybrid_engine.switch.probe calls {name}" for name in ("loads", "all_gather_object")]
    assert all("Default process group" in each for each in said[2:])


def test_the_last_words_of_a_killed_rank_come_back(ranks: Ranks) -> None:
    with pytest.raises(AssertionError) as failure:
        ranks.launch(speak_and_die, 2, timeout=60)
    assert all(f"the last words of rank {rank}\n" in str(failure.value) for rank in range(2))


def own_rank() -> int:
    return int(os.environ["RANK"])


def fail_on_the_last() -> None:
    assert own_rank() == 0, "broken on purpose"


def leave_without_a_word() -> None:
    os._exit(0)


@pytest.mark.parametrize(
    ("function", "words"),
    [(fail_on_the_last, "broken on purpose"), (leave_without_a_word, "leave_without_a_word on 2")],
)
def test_a_call_that_fails_leaves_those_around_it(ranks: Ranks, function: Callable[[], None], words: str) -> None:
    calls = {"before": (own_rank, ()), "broken": (function, ()), "after": (own_rank, ())}
    outcomes = ranks.launch_in_turn(2, calls, timeout=60)
    assert outcomes["before"] == outcomes["after"] == [0, 1]
    with pytest.raises(AssertionError, match=words):
        outcomes["broken"]
