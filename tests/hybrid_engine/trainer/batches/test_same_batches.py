"""Ranks that compute a batch together and pass others: all of them hear of it, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import BatchError, StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.same_batches import agreed_share
from hybrid_engine.trainer.batches.token_outputs import Outputs
from tests.harness.launch import Ranks

TOGETHER, APART = "two ranks of one model", "two data parallel ranks"
BATCH = {
    "tokens": torch.arange(8).reshape(2, 4),
    "labels": torch.arange(8).reshape(2, 4),
    "rewards": torch.tensor([0.5, -1.0]),
    "is_done": torch.tensor([True, False]),
}
TWICE = {name: torch.cat([tensor, tensor]) for name, tensor in BATCH.items()}


def other(name: str) -> dict[str, Any]:
    """What rank 1 passes in place of BATCH."""
    changed = BATCH[name].clone()
    changed[1] = changed[0]
    return {**BATCH, name: changed}


# who -> what both pass -> what rank 1 passes, with data, outputs -> what all ranks hear, or nothing
CASES: dict[str, tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any], dict[str, Any], str]] = {
    "the same": (TOGETHER, BATCH, BATCH, {}, {}, ""),
    "another reward": (
        *(TOGETHER, BATCH, other("rewards"), {}, {}),
        "rewards: has other values on rank 1 than on rank 0; both must pass the same. Compute it on one rank and",
    ),
    "another flag": (TOGETHER, BATCH, other("is_done"), {}, {}, "is_done: has other values on rank 1"),
    "other tokens of a part": (TOGETHER, BATCH, other("tokens"), {"data": "local"}, {"data": "local"}, "tokens: has"),
    "another type": (
        *(TOGETHER, BATCH, {**BATCH, "rewards": BATCH["rewards"].double()}, {}, {}),
        "rewards: has shape [2] and type float32 on rank 0, shape [2] and type float64 on rank 1",
    ),
    "one more": (
        TOGETHER,
        BATCH,
        {**BATCH, "more": BATCH["rewards"]},
        {},
        {},
        "more: is missing on rank 0, and not on",
    ),
    "one less": (
        *(TOGETHER, BATCH, {name: BATCH[name] for name in ("tokens", "labels", "rewards")}, {}, {}),
        "is_done: is missing on rank 1, and not on rank 0",
    ),
    "more rows": (TOGETHER, BATCH, TWICE, {}, {}, "tokens: shape [2, 4] on rank 0, shape [4, 4] on rank 1"),
    "another kind of data": (
        TOGETHER,
        BATCH,
        BATCH,
        {},
        {"data": "local"},
        "data: 'global' on rank 0, 'local' on rank 1",
    ),
    "entropy on one": (
        TOGETHER,
        BATCH,
        BATCH,
        {},
        {"outputs": Outputs(entropy=True)},
        "entropy: False on rank 0, True",
    ),
    "another learning rate": (
        *(APART, BATCH, BATCH, {"learning_rate": 0.01}, {"learning_rate": 0.02}),
        "learning_rate: 0.01 on rank 0, 0.02 on rank 1. Call set_learning_rate with the same on every rank",
    ),
    "nothing to train on one": (*(TOGETHER, BATCH, BATCH, {"learning_rate": 0.01}, {"learning_rate": math.nan}), ""),
    "another call": (
        *(TOGETHER, BATCH, BATCH, {}, {"call": "scoring"}),
        "ranks make different calls: checking the batch for: training step on rank 0; checking the batch for: scoring",
    ),
    "own parts": (APART, BATCH, other("tokens"), {"data": "local"}, {"data": "local"}, ""),
    "other rewards of its own rows": (APART, BATCH, other("rewards"), {}, {}, ""),
    "all rows, other rows": (
        APART,
        BATCH,
        other("tokens"),
        {},
        {},
        "tokens: has other values on rank 1 than on rank 0",
    ),
}


def compare() -> dict[str, tuple[list[int], str]]:
    """By case: the tokens of the share, and what was raised."""
    dist.init_process_group("gloo")
    rank, agreement = dist.get_rank(), Job.join(60).agreement
    found = {}
    for name, (who, first, second, here, there, _) in CASES.items():
        together = BatchLimits(vocab_size=8, micro_batch_size=1, dp_rank=0, dp_size=1)
        apart = BatchLimits(vocab_size=8, micro_batch_size=1, dp_rank=rank, dp_size=2)
        try:
            share = agreed_share(
                *(second if rank else first, together if who == TOGETHER else apart, agreement),
                **{"call": "training step", **(there if rank else here)},
            )
            found[name] = share["tokens"].flatten().tolist(), ""
        except (BatchError, StateError) as error:
            found[name] = [], str(error)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> list[dict[str, tuple[list[int], str]]]:
    return ranks.launch(compare, 2, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hear_what_differs(found: list[dict[str, tuple[list[int], str]]], name: str) -> None:
    expected = CASES[name][-1]
    first, second = (by_case[name] for by_case in found)
    assert first[1] == second[1]
    assert expected in first[1]
    assert bool(first[1]) == bool(expected)
    assert bool(first[0]) == (not expected)


def test_each_gets_its_share(found: list[dict[str, tuple[list[int], str]]]) -> None:
    assert [by_case["the same"][0] for by_case in found] == [list(range(8))] * 2
    assert [by_case["own parts"][0] for by_case in found] == [list(range(8)), [0, 1, 2, 3] * 2]
