"""Checks of a batch before any rank computes, also between ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from hybrid_engine.errors import BatchError, StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, agreed_share, own_share
from hybrid_engine.trainer.batches.token_outputs import Outputs
from tests.harness.errors import has_violations, violated, violations_of
from tests.harness.launch import on_ranks
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
    with violated(BatchError, ("tokens", "not-divisible")):
        own_share(whole, replace(LIMITS, micro_batch_multiple=2))
    with violated(BatchError, ("data", "unknown-value")):
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
    "one row": (
        lambda: {"tokens": torch.arange(6), "labels": torch.arange(6)},
        [("tokens", "wrong-shape")],
    ),
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
    "a cold row": (
        lambda: batch(temperature=torch.tensor([1.0, 0.7, 0.0, 1.0])),
        [("temperature", "out-of-range")],
    ),
    "temperatures of other tokens": (
        lambda: batch(temperature=torch.ones(4, 5)),
        [("temperature", "wrong-shape")],
    ),
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
    with violated(BatchError, *expected):
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
    with violated(BatchError, ("top_k", "out-of-range")):
        own_share(batch(), LIMITS, outputs=Outputs(top_k=11))
    with violated(BatchError, ("entropy", "key-in-use")):
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
        share: tokens of each rank's share, if all are compared.
    """

    together: bool
    second: TensorDict
    here: Values = field(default_factory=dict)
    there: Values = field(default_factory=dict)
    key: str = ""
    code: str = ""
    share: tuple[list[int], list[int]] | None = None


LOCAL = {"data": "local"}
CASES = {
    "the same": Case(True, BATCH, share=(list(range(8)), list(range(8)))),
    "another reward": Case(True, changed_batch("rewards"), key="rewards", code=DIFFERS),
    "another flag": Case(True, changed_batch("is_done"), key="is_done", code=DIFFERS),
    "other tokens of a part": Case(True, changed_batch("tokens"), LOCAL, LOCAL, "tokens", DIFFERS),
    "another type": Case(
        True, {**BATCH, "rewards": BATCH["rewards"].double()}, key="rewards", code=DIFFERS
    ),
    "one more": Case(True, {**BATCH, "more": BATCH["rewards"]}, key="more", code=DIFFERS),
    "one less": Case(
        True,
        {name: BATCH[name] for name in ("tokens", "labels", "rewards")},
        key="is_done",
        code=DIFFERS,
    ),
    "more rows": Case(True, TWICE, key="tokens", code=DIFFERS),
    "another kind of data": Case(True, BATCH, {}, LOCAL, "data", DIFFERS),
    "entropy on one": Case(True, BATCH, {}, {"outputs": Outputs(entropy=True)}, "entropy", DIFFERS),
    "another learning rate": Case(
        False, BATCH, {"learning_rate": 0.01}, {"learning_rate": 0.02}, "learning_rate", DIFFERS
    ),
    "nothing to train on one": Case(
        True, BATCH, {"learning_rate": 0.01}, {"learning_rate": math.nan}
    ),
    "another call": Case(True, BATCH, {}, {"call": "scoring"}, code="different-calls"),
    "own parts": Case(
        False, changed_batch("tokens"), LOCAL, LOCAL, share=(list(range(8)), [0, 1, 2, 3] * 2)
    ),
    "other rewards of its own rows": Case(False, changed_batch("rewards")),
    "all rows, other rows": Case(False, changed_batch("tokens"), key="tokens", code=DIFFERS),
}


@functools.cache
def job() -> Job:
    """Return the job of all cases. Collective at the first call."""
    return Job.join(60)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_get_their_share_or_report_the_same_difference(name: str) -> None:
    case = CASES[name]
    rank = job().rank
    agreement = job().agreement
    limits = BatchLimits(
        8, micro_batch_size=1, dp_rank=0 if case.together else rank, dp_size=2 - case.together
    )
    rows, arguments = (case.second, case.there) if rank else (BATCH, case.here)
    call = {"call": "training step", **arguments}
    if not case.code:
        tokens = agreed_share(rows, limits, agreement, **call)["tokens"].flatten().tolist()
        assert tokens == case.share[rank] if case.share else tokens
        return
    with pytest.raises(BatchError if case.key else StateError) as caught:
        agreed_share(rows, limits, agreement, **call)
    assert case.key or caught.value.code == case.code
    # More violations may follow: with another number of rows, all tensors differ.
    assert not case.key or (case.key, case.code) in violations_of(caught.value)
    assert len({*agreement.gather(str(caught.value), str, "comparing")}) == 1
