"""What each phase is planned to take, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_engine.layouts.memory import MemoryPlan, Stays, TrainingMemory, plan_memory


def memory(params: int, grads: int, optimizer: int) -> TrainingMemory:
    """Of two ranks, the second of which has ten times as much."""
    each = [np.array([nbytes, 10 * nbytes]) for nbytes in (params, grads, optimizer)]
    return TrainingMemory(*each, copied=each[0] + each[2])


ACTOR, CRITIC, WEIGHTS = memory(100, 200, 300), memory(10, 20, 30), np.array([150, 50])
BUCKET = 5


def totals(**stays: object) -> dict[str, list[int]]:
    plan = plan_memory(ACTOR, WEIGHTS, BUCKET, CRITIC, stays=Stays(**stays))  # type: ignore[arg-type]
    return {name: phase.total.tolist() for name, phase in plan.phases.items()}


ALONE = {
    "train": [600, 6000],
    "forward": [100, 1000],
    "switch": [160, 1010],  # the larger of parameters and inference weights, and two buckets
    "generate": [150, 50],
    "reference": [100, 1000],
    "critic train": [60, 600],
    "critic forward": [10, 100],
}


@pytest.mark.parametrize(
    ("stays", "changed"),
    [
        ({}, {}),
        (
            {"kinds": frozenset({"grad"})},
            {
                "forward": [300, 3000],
                "switch": [360, 3010],
                "generate": [350, 2050],
                "reference": [300, 3000],
                "critic train": [260, 2600],
                "critic forward": [210, 2100],
            },
        ),
        (
            {"inference_nbytes": None},
            {
                "train": [750, 6050],
                "forward": [250, 1050],
                "switch": [255, 1055],  # all at once, and a bucket
                "reference": [250, 1050],
                "critic train": [210, 650],
                "critic forward": [160, 150],
            },
        ),
        (
            {"inference_nbytes": 60},
            {
                "train": [660, 6050],
                "forward": [160, 1050],
                "switch": [220, 1060],
                "reference": [160, 1050],
                "critic train": [120, 650],
                "critic forward": [70, 150],
            },
        ),
        (
            {"critic": True},
            {
                "train": [660, 6600],
                "forward": [160, 1600],
                "switch": [220, 1610],
                "generate": [210, 650],
                "reference": [160, 1600],
                "critic forward": [60, 600],
            },
        ),
        ({"prefetches": True}, {"switch": [600, 6000], "generate": [600, 6000]}),
    ],
    ids=["nothing", "gradients", "all weights", "some weights", "the critic", "prefetched"],
)
def test_a_phase_takes_what_it_needs_and_what_stays(stays: dict[str, object], changed: dict[str, list[int]]) -> None:
    assert totals(**stays) == {**ALONE, **changed}


def test_phases_over_the_budget_are_found_on_any_rank() -> None:
    def over(budget: int | None) -> list[str]:
        plan = plan_memory(ACTOR, WEIGHTS, BUCKET, CRITIC, budget=budget)
        return [phase.name for phase in plan.over_budget()]

    assert over(None) == over(6000) == []
    assert over(5999) == ["train"]
    assert over(599) == ["train", "forward", "switch", "reference", "critic train"]


def test_without_a_critic_there_are_no_phases_of_one() -> None:
    assert list(plan_memory(ACTOR, WEIGHTS, BUCKET).phases) == list(ALONE)[:5]


@pytest.fixture
def plan() -> MemoryPlan:
    mib = 2**20
    return plan_memory(memory(mib, 2 * mib, 3 * mib), mib * np.array([4, 5]), 1, budget=100 * mib)


def test_the_table_shows_the_rank_with_most_or_one_with_what_was_measured(plan: MemoryPlan) -> None:
    title, heads, train, *_ = str(plan).splitlines()
    assert "MiB on the rank with most, of a budget of 100.00" in title
    assert heads.split() == ["phase", "actor", "vLLM", "reference", "critic", "all"]
    assert train.split() == ["train", "60.00", "-", "-", "-", "60.00"]
    of_first = [line.split() for line in plan.lines(0, {"generate": 2**20})]
    assert of_first[2] == ["train", "6.00", "-", "-", "-", "6.00", "-"]
    assert of_first[5] == ["generate", "-", "4.00", "-", "-", "4.00", "1.00"]
