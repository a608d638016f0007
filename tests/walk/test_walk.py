"""Random actions of users on an engine are right or refused. See tests/walk/__init__.py."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from tests.harness.launch import Ranks
from tests.walk.runs import TRAINERS, launched, plans, report, story, walks

pytestmark = pytest.mark.engines


def long(*values: object) -> Any:
    """Return a case that only `make test-faults` runs."""
    return pytest.param(*values, marks=pytest.mark.faults)


OTHERS = sorted({*TRAINERS} - {"megatron-bf16"})


@pytest.mark.parametrize("trainer", ["megatron-bf16", *map(long, OTHERS)])
def test_every_call_is_right_or_refused(engines: Ranks, trainer: str) -> None:
    walks_done = launched(engines, 1, plans, trainer, timeout=300)
    print(report(walks_done))
    assert [story(walk) for walk in walks_done if walk.wrong] == []
    assert walks_done[0].counts["plans"] > 40
    assert walks_done[0].counts["rollouts compared"] >= 3 * walks_done[0].counts["plans"]


@pytest.mark.parametrize(
    ("trainer", "num_ranks", "num_walks"),
    [("fsdp2", 1, 2), ("megatron-bf16", 2, 2), long("megatron-bf16", 1, 6), long("fsdp2", 2, 2)],
)
def test_a_random_walk(engines: Ranks, trainer: str, num_ranks: int, num_walks: int) -> None:
    walks_done = launched(
        engines, num_ranks, walks, trainer, range(num_walks), 25, 0.3, timeout=300
    )
    print(report(walks_done))
    assert [story(walk) for walk in walks_done if walk.wrong] == []
    assert sum(walk.counts["faults"] for walk in walks_done)
    assert sum(walk.counts["bytes skipped"] for walk in walks_done) or num_ranks > 1


@pytest.mark.parametrize("trainer", ["fsdp2-vllm", "megatron-vllm"])
def test_a_walk_with_vllm(engines: Ranks, trainer: str) -> None:
    """Compare log-probabilities of vLLM and the trainer for the current weights."""
    walks_done = launched(engines, 1, walks, trainer, range(1, 2), 20, 0.2, timeout=300)
    print(report(walks_done))
    assert [story(walk) for walk in walks_done if walk.wrong] == []
    assert walks_done[0].counts["rollouts compared"] > 3


SECONDS = 50.0
"""Time of the walks of a case."""


@pytest.mark.faults
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_random_walks_with_other_seeds(engines: Ranks, trainer: str, num_ranks: int) -> None:
    """The first seed is WALK_SEED in the environment, to repeat a walk, or else random."""
    seed = int(os.environ.get("WALK_SEED") or random.randrange(10**6))
    deadline = time.monotonic() + SECONDS
    walks_done = []
    # A launch ends early when the ranks have lost each other after a fault.
    while (left := deadline - time.monotonic()) > 0:
        seeds = range(seed, 10**9)
        walks_done += launched(
            engines, num_ranks, walks, trainer, seeds, 40, 0.3, left, timeout=left + 100
        )
        seed = walks_done[-1].seed + 1
    assert [story(walk) for walk in walks_done if walk.wrong] == []
