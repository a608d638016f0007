"""Rearranged rows that a model computes for the user's rows."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.errors import BatchError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.arrangement import (
    MicroBatch,
    micro_batches,
    positions_in,
    sequence_ids_of,
)
from hybrid_engine.trainer.batches.image_rows import IMAGES, ImageRows
from tests.harness.errors import violated

CPU = torch.device("cpu")


def letter_batch(*rows: str, **further: torch.Tensor) -> TensorDict:
    """Build a batch of letters; `_` is padding, and labels are the next tokens."""
    tokens = torch.tensor(
        [[0 if letter == "_" else ord(letter) - ord("a") + 1 for letter in row] for row in rows]
    )
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), **further}


def masked_batch(*rows: str) -> TensorDict:
    batch = letter_batch(*rows)
    return {**batch, "attention_mask": (batch["tokens"] > 0).long()}


def single_micro_batch(batch: TensorDict, **settings: int) -> MicroBatch:
    (micro_batch,) = micro_batches(batch, len(batch["tokens"]), CPU, **settings)
    return micro_batch


def text(tokens: torch.Tensor) -> list[str]:
    return [
        "".join("_" if token == 0 else chr(token + ord("a") - 1) for token in row)
        for row in tokens.tolist()
    ]


def test_images_stay_on_the_host_until_their_micro_batch_is_computed() -> None:
    pair = {"pixel_values": torch.arange(6.0).view(3, 2)}
    single = {"pixel_values": torch.arange(2.0).view(1, 2)}
    batch = {
        **letter_batch("abc", "def", "abc", "def"),
        IMAGES: ImageRows([pair, single, pair, pair]),
    }
    meta = torch.device("meta")
    parts = micro_batches(batch, 2, meta)
    for part in parts:
        assert part.rows.tokens.device == part.batch["tokens"].device == meta
        for images in (part.rows.images, part.batch[IMAGES]):
            assert all(tensor.device == CPU for row in images.rows for tensor in row.values())
        (joined,) = part.rows.images.joined(meta).values()
        assert joined.device == meta
    assert torch.equal(
        parts[0].rows.images.joined(CPU)["pixel_values"],
        torch.cat([pair["pixel_values"], single["pixel_values"]]),
    )


def test_rows_without_keys_are_unchanged() -> None:
    batch = letter_batch("abc__", "de___")
    rows = single_micro_batch(batch).rows
    assert torch.equal(rows.tokens, batch["tokens"])
    assert rows.sequence_ids is None
    values = torch.randn(2, 5)
    assert rows.restore_log_probs(values) is values


def test_left_padding_becomes_right_padding() -> None:
    left = single_micro_batch(masked_batch("__abc", "____d", "efghi")).rows
    right = single_micro_batch(masked_batch("abc__", "d____", "efghi")).rows
    assert text(left.tokens) == text(right.tokens) == ["abc__", "d____", "efghi"]
    assert torch.equal(left.labels[0, :3], right.labels[0, :3])
    assert left.sequence_ids is None
    assert text(left.restore(left.tokens)) == ["__abc", "____d", "efghi"]


def test_unused_columns_are_removed() -> None:
    rows = single_micro_batch(masked_batch("___abc____________", "defgh_____________")).rows
    assert rows.tokens.shape == (2, 8)
    assert text(rows.restore(rows.tokens)) == ["___abc____________", "defgh_____________"]
    assert single_micro_batch(
        masked_batch("_____abc__________"), multiple=12
    ).rows.tokens.shape == (1, 18)
    assert single_micro_batch(masked_batch("_________")).rows.tokens.shape == (1, 8)


def test_rows_of_a_pipeline_have_the_same_length() -> None:
    batch = masked_batch("ab________________", "abcdefghi_________")
    assert [part.rows.tokens.shape[1] for part in micro_batches(batch, 1, CPU)] == [8, 16]
    assert [
        part.rows.tokens.shape[1] for part in micro_batches(batch, 1, CPU, same_length=True)
    ] == [16, 16]


def test_sequences_may_be_given_by_positions_alone() -> None:
    """Padding counts as a sequence then."""
    positions = positions_in(torch.tensor([[0, 7, 7, 3, 0, 5, 5, 5], [1, 1, 1, 1, 1, 2, 0, 0]]))
    rows = single_micro_batch(
        {**letter_batch("_abc_def", "ghijkl__"), "position_ids": positions}
    ).rows
    assert rows.position_ids.equal(positions)
    assert text(rows.restore(rows.tokens)) == ["_abc_def", "ghijkl__"]


def test_ignored_labels_have_no_log_probability() -> None:
    batch = letter_batch("abcd")
    batch["labels"] = torch.tensor([[2, -100, 4, -100]])
    rows = single_micro_batch(batch).rows
    assert rows.labels.min() >= 0  # a model cannot look up label -100
    assert rows.restore_log_probs(torch.ones(1, 4)).tolist() == [[1, 0, 1, 0]]
    assert rows.restore(torch.ones(1, 4)).tolist() == [[1, 1, 1, 1]]
    assert rows.mask.tolist() == [[1, 0, 1, 0]]


def test_mtp_mask_excludes_padding_and_sequence_boundaries() -> None:
    """A position counts if the next token is in its sequence: Megatron shifts the mask by one."""
    sequence_ids = torch.tensor([[0, 1, 1, 2, 2, 2, 0, 0]])
    rows = single_micro_batch({**letter_batch("_abcde__"), "sequence_ids": sequence_ids}).rows
    assert rows.mask.tolist() == [[0, 1, 0, 1, 1, 0, 0, 0]]
    batch = masked_batch("_ab_") | {"mask": torch.tensor([[1, 1, 0, 1]])}
    mask = single_micro_batch(batch).rows.mask
    assert mask.tolist() == [[1, 0, 0, 0]]


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
def test_inconsistent_keys_are_refused_by_name(
    key: str, values: list[list[int]], code: str
) -> None:
    key, _, mask = key.partition(" ")
    batch = masked_batch("_abc") if mask else letter_batch("abcd")
    with violated(BatchError, (key, code)):
        single_micro_batch({**batch, key: torch.tensor(values)})


def test_random_rows_are_restored() -> None:
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
        rows = single_micro_batch({**batch, "temperature": batch["tokens"] + 0.5}).rows
        assert torch.equal(
            rows.restore(rows.temperature), (batch["tokens"] + 0.5).where(ids > 0, 0)
        )
        computed = torch.stack([rows.tokens, rows.position_ids], -1)
        expected = torch.stack([batch["tokens"], positions_in(ids)], -1)
        assert torch.equal(rows.restore(computed), expected.where(ids[..., None] > 0, 0))
        counted = {"position_ids": positions_in(ids), "attention_mask": (ids > 0).long()}
        restored = sequence_ids_of(counted)
        assert torch.equal(positions_in(restored), positions_in(ids))
