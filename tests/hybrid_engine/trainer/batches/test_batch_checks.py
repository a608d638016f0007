"""What is refused before any rank computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_engine.errors import BatchError
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, own_share
from hybrid_engine.trainer.batches.token_outputs import Outputs

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
