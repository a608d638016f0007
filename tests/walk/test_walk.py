"""Random actions of users on an engine, with fixed seeds, are right or refused. See
tests/walk/__init__.py.

tests/faults/test_random_walk.py runs longer, with other seeds and trainers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.launch import Ranks
from tests.walk.runs import launched, plans, report, story, walks

pytestmark = pytest.mark.engines


def long(*values: object) -> Any:
    """Return a case that only `make test-faults` runs."""
    return pytest.param(*values, marks=pytest.mark.faults)


@pytest.mark.parametrize("trainer", ["megatron-bf16", long("fsdp2")])
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
