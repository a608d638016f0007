"""Random walks with random seeds, and Ctrl-C at random moments of a loop with saves: ten minutes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.harness.launch import Ranks
from tests.walk import interrupted_saves
from tests.walk.runs import TRAINERS, launched, plans, report, story, walks

pytestmark = [pytest.mark.faults, pytest.mark.engines]

SECONDS = 50.0  # for each of the ten walks
NUM_TRIALS = 50  # for each of the four scripts


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_call(engines: Ranks, trainer: str, record: Callable[..., None]) -> None:
    found = launched(engines, 1, plans, trainer, timeout=300)
    record(fault=f"every call once, {trainer}", message=report(found))
    assert [story(each) for each in found if each.wrong] == []


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_random_walks(engines: Ranks, trainer: str, num_ranks: int, record: Callable[..., None]) -> None:
    seed, ends, found = random.randrange(10**6), time.monotonic() + SECONDS, []
    while (left := ends - time.monotonic()) > 0:  # again where the ranks have lost each other after a fault
        found += launched(engines, num_ranks, walks, trainer, range(seed, 10**9), 40, 0.3, left, timeout=left + 100)
        seed = found[-1].seed + 1
    record(fault=f"random walks, {trainer}, {num_ranks} ranks", message=report(found))
    assert [story(each) for each in found if each.wrong] == []


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("trainer", ["megatron-bf16", "fsdp2"])
def test_no_interrupted_script_leaves_a_wrong_checkpoint(
    engines: Ranks, trainer: str, num_ranks: int, record: Callable[..., None]
) -> None:
    trials = interrupted_saves.run(engines, trainer, num_ranks, NUM_TRIALS, random.randrange(10**6))
    message = f"{len(trials.wrong)} wrong, slowest {max(trials.seconds, default=0.0):.1f} s, {dict(trials.counts)}"
    record(fault=f"{trials.num} times Ctrl-C, {trainer}, {num_ranks} ranks", message=message)
    assert trials.wrong == []
    assert trials.num == NUM_TRIALS
    assert trials.counts["next run right"] == NUM_TRIALS
