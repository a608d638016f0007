"""Random walks with random seeds: 6 minutes."""

from __future__ import annotations

import random
import time

import pytest

from tests.harness.launch import Ranks
from tests.walk.runs import TRAINERS, launched, plans, story, walks

pytestmark = [pytest.mark.faults, pytest.mark.engines]

SECONDS = 50.0  # Per walk.


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_call_is_right_or_refused(engines: Ranks, trainer: str) -> None:
    walks_done = launched(engines, 1, plans, trainer, timeout=300)
    assert [story(walk) for walk in walks_done if walk.wrong] == []


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_random_walks_are_right(engines: Ranks, trainer: str, num_ranks: int) -> None:
    seed = random.randrange(10**6)
    deadline = time.monotonic() + SECONDS
    walks_done = []
    # A launch ends early when the ranks have lost each other after a fault.
    while (left := deadline - time.monotonic()) > 0:
        walks_done += launched(
            engines,
            num_ranks,
            walks,
            trainer,
            range(seed, 10**9),
            40,
            0.3,
            left,
            timeout=left + 100,
        )
        seed = walks_done[-1].seed + 1
    assert [story(walk) for walk in walks_done if walk.wrong] == []
