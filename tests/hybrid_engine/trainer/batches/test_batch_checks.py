"""Checks of a batch before any rank computes, also between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import BatchError, StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, agreed_share, own_share
from hybrid_engine.trainer.batches.token_outputs import Outputs
from tests.harness.errors import has_violations, violations_of
from tests.harness.launch import Ranks
from tests.harness.values import Values

LIMITS = BatchLimits(vocab_size=10, micro_batch_size=2, dp_rank=1, dp_size=2, seq_length=6)


def batch(**changes: Any) -> Values:
    tokens = torch.arange(24).view(4, 6) % 10
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), **changes}


def test_a_global_batch_is_split_and_a_local_one_is_not() -> None:
    whole = batch(advantages=torch.arange(4.0), text=torch.zeros(4, 3, 2))
    assert own_share(whole, LIMITS)["advantages"].tolist() == [2, 3]
    assert own_share(whole, LIMITS)["text"].shape == (2, 3, 2)
    assert own_share(whole, LIMITS, "local") is whole
    with pytest.raises(BatchError, check=has_violations(("tokens", "not-divisible"))):
        own_share(whole, replace(LIMITS, micro_batch_multiple=2))
    with pytest.raises(BatchError, check=has_violations(("data", "unknown-value"))):
        own_share(whole, LIMITS, "shared")  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], Any], list[tuple[str, str]]]] = {
    "no dict": (lambda: [1, 2], [("batch", "not-a-dict")]),
    "no labels": (lambda: {"tokens": torch.zeros(4, 6).long()}, [("labels", "missing-key")]),
    "names of transformers": (
        lambda: {"input_ids": torch.zeros(4, 7).long(), "labels": torch.zeros(4, 6).long()},
        [("tokens", "missing-key")],
    ),
    "a mask that was not cut": (
        lambda: batch(attention_mask=torch.ones(4, 7).long(), mask=torch.ones(4, 7)),
        [("attention_mask", "wrong-shape"), ("mask", "wrong-shape")],
    ),
    "a number": (lambda: batch(beta=0.1), [("beta", "not-a-tensor")]),
    "no tensor": (lambda: batch(rewards=[1.0] * 4), [("rewards", "not-a-tensor")]),
    "one row": (lambda: {"tokens": torch.arange(6), "labels": torch.arange(6)}, [("tokens", "wrong-shape")]),
    "shapes and types": (
        lambda: batch(
            labels=torch.zeros(4, 5),
            attention_mask=torch.zeros(3, 6).long(),
            position_ids=torch.zeros(4, 6),
            advantages=torch.zeros(3),
            temperature=torch.tensor(1.0),
        ),
        [
            ("labels", "wrong-shape"),
            ("labels", "not-integers"),
            ("attention_mask", "wrong-shape"),
            ("position_ids", "not-integers"),
            ("advantages", "wrong-number-of-rows"),
            ("temperature", "wrong-number-of-rows"),
        ],
    ),
    "a cold row": (lambda: batch(temperature=torch.tensor([1.0, 0.7, 0.0, 1.0])), [("temperature", "out-of-range")]),
    "temperatures of other tokens": (lambda: batch(temperature=torch.ones(4, 5)), [("temperature", "wrong-shape")]),
    "sizes and ids": (
        lambda: {
            "tokens": torch.full((3, 7), 10),
            "labels": torch.full((3, 7), -1),
            "attention_mask": torch.tensor([[1, 0, 1, 0, 0, 0, 0]] * 3),
        },
        [
            ("tokens", "not-divisible"),
            ("tokens", "rows-too-long"),
            ("tokens", "not-a-token"),
            ("labels", "not-a-token"),
            ("attention_mask", "sequence-interrupted"),
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_violations_are_reported_at_once(name: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(BatchError, check=has_violations(*expected)):
        own_share(make(), LIMITS)


def test_ignored_labels_are_allowed_and_trainer_limits_checked() -> None:
    data = batch()
    data["labels"][0, 0] = -100
    own_share(data, LIMITS)
    limits = BatchLimits(10, 2, 0, 2, row_multiple=4, no_packing="a window ignores masks")
    data["sequence_ids"] = torch.tensor([[1, 1, 2, 2, 2, 0]] * 4)
    expected = has_violations(("tokens", "not-divisible"), ("sequence_ids", "packing-unsupported"))
    with pytest.raises(BatchError, check=expected) as caught:
        own_share(data, limits)
    assert "Pad them to 8" in str(caught.value)
    assert "a window ignores masks" in str(caught.value)


def test_outputs_are_checked() -> None:
    with pytest.raises(BatchError, check=has_violations(("top_k", "out-of-range"))):
        own_share(batch(), LIMITS, outputs=Outputs(top_k=11))
    with pytest.raises(BatchError, check=has_violations(("entropy", "key-in-use"))):
        own_share(batch(entropy=torch.zeros(4, 6)), LIMITS, outputs=Outputs(entropy=True))
    own_share(batch(entropy=torch.zeros(4, 6)), LIMITS)


BATCH = {
    "tokens": torch.arange(8).reshape(2, 4),
    "labels": torch.arange(8).reshape(2, 4),
    "rewards": torch.tensor([0.5, -1.0]),
    "is_done": torch.tensor([True, False]),
}
TWICE = {name: torch.cat([tensor, tensor]) for name, tensor in BATCH.items()}


def changed_batch(name: str) -> Values:
    """Return BATCH with the tensor `name` changed."""
    changed = BATCH[name].clone()
    changed[1] = changed[0]
    return {**BATCH, name: changed}


DIFFERS = "differs-between-ranks"


@dataclass(frozen=True)
class Case:
    """Calls of two ranks.

    Attributes:
        together: both ranks compute the same rows; otherwise they are data parallel.
        second: batch of rank 1; rank 0 passes BATCH.
        here, there: further arguments of rank 0 and rank 1.
        key, code: violation that both ranks report; empty if they agree. No key: code of the error.
    """

    together: bool
    second: TensorDict
    here: Values = field(default_factory=dict)
    there: Values = field(default_factory=dict)
    key: str = ""
    code: str = ""


LOCAL = {"data": "local"}
CASES = {
    "the same": Case(True, BATCH),
    "another reward": Case(True, changed_batch("rewards"), key="rewards", code=DIFFERS),
    "another flag": Case(True, changed_batch("is_done"), key="is_done", code=DIFFERS),
    "other tokens of a part": Case(True, changed_batch("tokens"), LOCAL, LOCAL, "tokens", DIFFERS),
    "another type": Case(True, {**BATCH, "rewards": BATCH["rewards"].double()}, key="rewards", code=DIFFERS),
    "one more": Case(True, {**BATCH, "more": BATCH["rewards"]}, key="more", code=DIFFERS),
    "one less": Case(
        True, {name: BATCH[name] for name in ("tokens", "labels", "rewards")}, key="is_done", code=DIFFERS
    ),
    "more rows": Case(True, TWICE, key="tokens", code=DIFFERS),
    "another kind of data": Case(True, BATCH, {}, LOCAL, "data", DIFFERS),
    "entropy on one": Case(True, BATCH, {}, {"outputs": Outputs(entropy=True)}, "entropy", DIFFERS),
    "another learning rate": Case(
        False, BATCH, {"learning_rate": 0.01}, {"learning_rate": 0.02}, "learning_rate", DIFFERS
    ),
    "nothing to train on one": Case(True, BATCH, {"learning_rate": 0.01}, {"learning_rate": math.nan}),
    "another call": Case(True, BATCH, {}, {"call": "scoring"}, code="different-calls"),
    "own parts": Case(False, changed_batch("tokens"), LOCAL, LOCAL),
    "other rewards of its own rows": Case(False, changed_batch("rewards")),
    "all rows, other rows": Case(False, changed_batch("tokens"), key="tokens", code=DIFFERS),
}


@dataclass(frozen=True)
class Outcome:
    """Tokens of a rank's share, or its error: message, code and (key, code) of the violations."""

    tokens: list[int]
    message: str = ""
    code: str = ""
    violations: tuple[tuple[str, str], ...] = ()


def compare() -> dict[str, Outcome]:
    """Return the outcome of each case on this rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement = Job.join(60).agreement
    outcomes = {}
    for name, case in CASES.items():
        together = BatchLimits(vocab_size=8, micro_batch_size=1, dp_rank=0, dp_size=1)
        apart = BatchLimits(vocab_size=8, micro_batch_size=1, dp_rank=rank, dp_size=2)
        try:
            share = agreed_share(
                *(case.second if rank else BATCH, together if case.together else apart, agreement),
                **{"call": "training step", **(case.there if rank else case.here)},
            )
            outcomes[name] = Outcome(share["tokens"].flatten().tolist())
        except (BatchError, StateError) as error:
            outcomes[name] = Outcome([], str(error), error.code, tuple(violations_of(error)))
    dist.destroy_process_group()
    return outcomes


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks) -> list[dict[str, Outcome]]:
    return ranks.launch(compare, 2, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_report_the_same_difference(outcomes: list[dict[str, Outcome]], name: str) -> None:
    case = CASES[name]
    first, second = (by_case[name] for by_case in outcomes)
    assert first.message == second.message
    assert bool(first.message) == bool(case.code)
    assert bool(first.tokens) == (not case.code)
    assert first.code == second.code == ("" if case.key else case.code)
    # More violations may follow: with another number of rows, all tensors differ.
    assert not case.key or (case.key, case.code) in first.violations


def test_each_rank_gets_its_share(outcomes: list[dict[str, Outcome]]) -> None:
    assert [by_case["the same"].tokens for by_case in outcomes] == [list(range(8))] * 2
    assert [by_case["own parts"].tokens for by_case in outcomes] == [list(range(8)), [0, 1, 2, 3] * 2]
