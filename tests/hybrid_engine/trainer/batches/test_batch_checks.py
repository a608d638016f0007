"""What is refused before any rank computes; ranks that compute a batch together and pass others hear of it by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import BatchError, StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, agreed_share, own_share
from hybrid_engine.trainer.batches.token_outputs import Outputs
from tests.harness.launch import Ranks

LIMITS = BatchLimits(vocab_size=10, micro_batch_size=2, dp_rank=1, dp_size=2, seq_length=6)


def batch(**changes: Any) -> dict[str, Any]:
    tokens = torch.arange(24).view(4, 6) % 10
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), **changes}


def test_a_rank_gets_its_part_of_a_global_batch_and_all_of_a_local_one() -> None:
    given = batch(advantages=torch.arange(4.0), text=torch.zeros(4, 3, 2))
    assert own_share(given, LIMITS)["advantages"].tolist() == [2, 3]
    assert own_share(given, LIMITS)["text"].shape == (2, 3, 2)
    assert own_share(given, LIMITS, "local") is given
    with pytest.raises(BatchError, match="data: 'shared' is unknown"):
        own_share(given, LIMITS, "shared")  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no dict": (lambda: [1, 2], ["batch: is list"]),
    "no labels": (lambda: {"tokens": torch.zeros(4, 6).long()}, ["labels: is missing among ['tokens']"]),
    "names of transformers": (
        lambda: {"input_ids": torch.zeros(4, 7).long(), "labels": torch.zeros(4, 6).long()},
        ["tokens: is missing among ['input_ids', 'labels']. Tokens are input_ids[:, :-1], labels input_ids[:, 1:]"],
    ),
    "a mask that was not cut": (
        lambda: batch(attention_mask=torch.ones(4, 7).long(), mask=torch.ones(4, 7)),
        [
            "Pass one value for each token: if tokens are shifted, attention_mask[:, :-1]",
            "Pass one value for each token: if tokens are shifted, mask[:, 1:]",
        ],
    ),
    "a number": (lambda: batch(beta=0.1), ["beta: is float. A batch has tensors only; the loss function can"]),
    "no tensor": (lambda: batch(rewards=[1.0] * 4), ["rewards: is list"]),
    "one row": (lambda: {"tokens": torch.arange(6), "labels": torch.arange(6)}, ["tokens: has shape [6]"]),
    "shapes and types": (
        lambda: batch(
            labels=torch.zeros(4, 5),
            attention_mask=torch.zeros(3, 6).long(),
            position_ids=torch.zeros(4, 6),
            advantages=torch.zeros(3),
            temperature=torch.tensor(1.0),
        ),
        [
            "labels: has shape [4, 5], tokens [4, 6]",
            "labels: has type float32",
            "attention_mask: has shape [3, 6], tokens [4, 6]",
            "position_ids: has type float32",
            "advantages: has shape [3], and the batch has 4 rows",
            "temperature: has shape [], and the batch has 4 rows",
        ],
    ),
    "a cold row": (
        lambda: batch(temperature=torch.tensor([1.0, 0.7, 0.0, 1.0])),
        ["temperature: has 0.0, and logits are divided by it. Pass what was sampled with, and 1 for what is greedy"],
    ),
    "temperatures of other tokens": (
        lambda: batch(temperature=torch.ones(4, 5)),
        ["temperature: has shape [4, 5]. Pass one for each row, [4], or for each token, [4, 6]"],
    ),
    "sizes and ids": (
        lambda: {
            "tokens": torch.full((3, 7), 10),
            "labels": torch.full((3, 7), -1),
            "attention_mask": torch.tensor([[1, 0, 1, 0, 0, 0, 0]] * 3),
        },
        [
            "tokens: 3 rows do not split over 2 data parallel ranks in micro batches of 2. Add rows, up to 4",
            "tokens: rows of 7 tokens are longer than actor_config.seq_length 6",
            "tokens: 10 at [0, 0] is no token of a vocabulary of 10, nor are 20 others",
            "labels: -1 at [0, 0] is no token of a vocabulary of 10, nor are 20 others",
            "attention_mask: the tokens of a sequence are not next to each other in rows 0, 1, 2",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_violations_are_named_at_once(name: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(BatchError) as caught:
        own_share(make(), LIMITS)
    assert len(caught.value.findings) == len(expected), str(caught.value)
    for text in expected:
        assert text in str(caught.value)


def test_ignored_labels_are_allowed_and_other_trainers_limits_are_told() -> None:
    given = batch()
    given["labels"][0, 0] = -100
    own_share(given, LIMITS)
    limits = BatchLimits(10, 2, 0, 2, row_multiple=4, no_packing="a window ignores masks")
    given["sequence_ids"] = torch.tensor([[1, 1, 2, 2, 2, 0]] * 4)
    with pytest.raises(BatchError) as caught:
        own_share(given, limits)
    assert "rows of 6 tokens do not split over 4 tensor parallel ranks. Pad them to 8" in str(caught.value)
    assert "sequence_ids: rows have several sequences, but a window ignores masks" in str(caught.value)


def test_outputs_are_checked() -> None:
    with pytest.raises(BatchError, match=r"top_k: 11 is not a number of tokens out of 10"):
        own_share(batch(), LIMITS, outputs=Outputs(top_k=11))
    with pytest.raises(BatchError, match=r"entropy: is in the batch and was asked for"):
        own_share(batch(entropy=torch.zeros(4, 6)), LIMITS, outputs=Outputs(entropy=True))
    own_share(batch(entropy=torch.zeros(4, 6)), LIMITS)


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
