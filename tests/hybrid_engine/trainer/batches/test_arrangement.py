"""Rows that a model computes in place of the user's."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.errors import BatchError
from hybrid_engine.trainer.batches.arrangement import MicroBatch, micro_batches, positions_in, sequence_ids_of
from tests.harness.errors import has_violations

CPU = torch.device("cpu")


def batch_of(*rows: str, **further: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each character is a token, `_` is padding, and labels are the tokens that follow."""
    tokens = torch.tensor([[0 if each == "_" else ord(each) - ord("a") + 1 for each in row] for row in rows])
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), **further}


def masked(*rows: str) -> dict[str, torch.Tensor]:
    batch = batch_of(*rows)
    return {**batch, "attention_mask": (batch["tokens"] > 0).long()}


def only(batch: dict[str, torch.Tensor], **settings: int) -> MicroBatch:
    (found,) = micro_batches(batch, len(batch["tokens"]), CPU, **settings)
    return found


def text(tokens: torch.Tensor) -> list[str]:
    return ["".join("_" if each == 0 else chr(each + ord("a") - 1) for each in row) for row in tokens.tolist()]


def test_without_a_key_rows_are_the_users_own() -> None:
    batch = batch_of("abc__", "de___")
    rows = only(batch).rows
    assert torch.equal(rows.tokens, batch["tokens"])
    assert rows.sequence_ids is None
    values = torch.randn(2, 5)
    assert rows.restore_log_probs(values) is values


def test_left_padding_becomes_right_padding() -> None:
    left, right = only(masked("__abc", "____d", "efghi")).rows, only(masked("abc__", "d____", "efghi")).rows
    assert text(left.tokens) == text(right.tokens) == ["abc__", "d____", "efghi"]
    assert torch.equal(left.labels[0, :3], right.labels[0, :3])
    assert left.sequence_ids is None
    assert text(left.restore(left.tokens)) == ["__abc", "____d", "efghi"]


def test_columns_that_no_row_needs_are_cut_off() -> None:
    rows = only(masked("___abc____________", "defgh_____________")).rows
    assert rows.tokens.shape == (2, 8)
    assert text(rows.restore(rows.tokens)) == ["___abc____________", "defgh_____________"]
    assert only(masked("_____abc__________"), multiple=12).rows.tokens.shape == (1, 18)
    assert only(masked("_________")).rows.tokens.shape == (1, 8)


def test_rows_of_a_pipeline_have_one_length() -> None:
    batch = masked("ab________________", "abcdefghi_________")
    assert [each.rows.tokens.shape[1] for each in micro_batches(batch, 1, CPU)] == [8, 16]
    assert [each.rows.tokens.shape[1] for each in micro_batches(batch, 1, CPU, same_length=True)] == [16, 16]


def test_values_of_padding_are_zero() -> None:
    rows = only(masked("__ab", "cd__")).rows
    values = torch.arange(1.0, 17.0).view(2, 4, 2)
    assert rows.restore(values)[..., 0].tolist() == [[0, 0, 1, 3], [9, 11, 0, 0]]


def test_gradients_come_back_to_their_tokens() -> None:
    values = torch.zeros(1, 4, requires_grad=True)
    (only(masked("_abc")).rows.restore(values) * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[2, 3, 4, 0]]


@pytest.mark.parametrize("key", ["sequence_ids", "position_ids", "both"])
def test_all_ways_to_say_which_tokens_are_one_sequence(key: str) -> None:
    ids = torch.tensor([[0, 7, 7, 3, 0, 5, 5, 5], [1, 1, 1, 1, 1, 2, 0, 0]])
    batch = batch_of("_abc_def", "ghijkl__")
    if key == "sequence_ids":
        batch["sequence_ids"] = ids
    else:
        batch["position_ids"] = positions_in(ids)
    if key == "both":
        batch["attention_mask"] = (ids > 0).long()
    rows = only(batch).rows
    assert rows.sequence_ids is not None
    start = 1 if key != "position_ids" else 0  # without a mask padding is a sequence of its own
    assert rows.position_ids[0].tolist()[: 8 - start] == positions_in(ids)[0].tolist()[start:]
    assert text(rows.restore(rows.tokens)) == ["_abc_def", "ghijkl__"]


def test_position_ids_of_one_sequence_need_no_mask() -> None:
    rows = only({**batch_of("abcd"), "position_ids": torch.arange(4)[None]}).rows
    assert rows.sequence_ids is None


def test_ignored_labels_have_no_log_probability() -> None:
    batch = batch_of("abcd")
    batch["labels"] = torch.tensor([[2, -100, 4, -100]])
    rows = only(batch).rows
    assert rows.labels is not None
    assert rows.labels.min() >= 0
    assert rows.restore_log_probs(torch.ones(1, 4)).tolist() == [[1, 0, 1, 0]]
    assert rows.restore(torch.ones(1, 4)).tolist() == [[1, 1, 1, 1]]
    assert rows.mask is not None
    assert rows.mask.tolist() == [[1, 0, 1, 0]]


def test_mtp_layers_learn_neither_padding_nor_the_first_token_of_a_sequence() -> None:
    """Megatron reads the mask one token later, so the first of a sequence is what comes after the one before."""
    rows = only({**batch_of("_abcde__"), "sequence_ids": torch.tensor([[0, 1, 1, 2, 2, 2, 0, 0]])}).rows
    assert rows.mask is not None
    assert rows.mask.tolist() == [[0, 1, 0, 1, 1, 0, 0, 0]]
    given = masked("_ab_") | {"mask": torch.tensor([[1, 1, 0, 1]])}
    found = only(given).rows.mask
    assert found is not None
    assert found.tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("key", "values", "code"),
    [
        ("attention_mask", [[1, 0, 1, 1]], "sequence-interrupted"),
        ("attention_mask", [[1, 2, 1, 1]], "not-a-mask"),
        ("sequence_ids", [[1, 2, 1, 2]], "sequence-interrupted"),
        ("sequence_ids", [[-1, 1, 1, 1]], "out-of-range"),
        ("position_ids", [[1, 2, 3, 4]], "positions-do-not-count"),
        ("position_ids", [[0, 1, 3, 4]], "positions-do-not-count"),
        ("position_ids beside a mask", [[0, 1, 2, 3]], "positions-do-not-count"),
        ("sequence_ids beside a mask", [[1, 1, 1, 1]], "keys-disagree"),
    ],
)
def test_inconsistent_keys_are_refused_by_name(key: str, values: list[list[int]], code: str) -> None:
    key, _, mask = key.partition(" ")
    batch = masked("_abc") if mask else batch_of("abcd")
    with pytest.raises(BatchError, check=has_violations((key, code))):
        only({**batch, key: torch.tensor(values)})


def test_sequences_are_found_in_any_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.zeros(3, 24, dtype=torch.int64)
        for row in ids:
            start = int(torch.randint(0, 4, (), generator=generator))
            for number in torch.randperm(5, generator=generator)[:3].tolist():
                length = int(torch.randint(1, 7, (), generator=generator))
                row[start : start + length] = number + 1
                start += length + int(torch.randint(0, 2, (), generator=generator))
        batch = {"tokens": torch.randint(1, 9, ids.shape, generator=generator), "sequence_ids": ids}
        rows = only({**batch, "temperature": batch["tokens"] + 0.5}).rows
        assert rows.temperature is not None
        assert torch.equal(rows.restore(rows.temperature), (batch["tokens"] + 0.5).where(ids > 0, 0))
        assert torch.equal(rows.restore(rows.tokens), batch["tokens"].where(ids > 0, 0))
        assert torch.equal(rows.restore(rows.position_ids), positions_in(ids).where(ids > 0, 0))
        counted = {"position_ids": positions_in(ids), "attention_mask": (ids > 0).long()}
        found = sequence_ids_of(counted)
        assert found is not None
        assert torch.equal(positions_in(found), positions_in(ids))
