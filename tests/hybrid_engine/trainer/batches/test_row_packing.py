"""Rows of one sequence, packed for a call: no token is lost or changed, and results return to its
place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import BatchError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches import mean_weights, pack_rows
from hybrid_engine.trainer.batches.arrangement import sequence_ids_of
from tests.harness.errors import violated
from tests.harness.values import Values

WIDTH = 9


@st.composite
def batches(draw: st.DrawFn) -> TensorDict:
    """Rows with padding on either side, and columns of every kind."""
    lengths = draw(st.lists(st.integers(0, WIDTH), min_size=1, max_size=12))
    count = len(lengths)
    attention_mask = torch.zeros(count, WIDTH, dtype=torch.int64)
    for row, length in enumerate(lengths):
        start = draw(st.integers(0, WIDTH - length))
        attention_mask[row, start : start + length] = 1
    numbers = torch.arange(1.0, count * WIDTH + 1).reshape(count, WIDTH)
    batch = {
        "tokens": numbers.long(),
        "labels": numbers.long() + 1,
        "mask": attention_mask.float(),
        "temperature": torch.arange(1.0, count + 1),
        "advantages": -torch.arange(1.0, count + 1),
        "top": torch.stack([numbers, -numbers], dim=-1),
    }
    if draw(st.booleans()):
        batch["sequence_ids"] = attention_mask * torch.arange(1, count + 1)[:, None]
    else:
        batch["attention_mask"] = attention_mask
    if attention_mask.any():
        batch["weights"] = mean_weights(batch["mask"])
    return batch


@given(batches(), st.integers(1, 4))
def test_every_token_returns_to_its_row(batch: TensorDict, multiple_of: int) -> None:
    packed = pack_rows(batch, multiple_of=multiple_of)
    num_rows, width = packed.batch["tokens"].shape
    assert width == WIDTH
    assert num_rows % multiple_of == 0
    ids = sequence_ids_of(batch)
    is_real = ids > 0
    # Places of two sequences do not overlap, so no row has more tokens than columns.
    assert int((packed.batch["sequence_ids"] > 0).sum()) == int(is_real.sum())
    for name in ("tokens", "labels", "mask"):
        assert torch.equal(packed.restore(packed.batch[name]), batch[name].where(is_real, 0))
    assert torch.equal(
        packed.restore(packed.batch["top"]), batch["top"].where(is_real[..., None], 0)
    )
    for name in ("temperature", "advantages"):
        assert torch.equal(
            packed.restore(packed.batch[name]), batch[name][:, None].where(is_real, 0)
        )
    is_padding = packed.batch["sequence_ids"] == 0
    assert bool((packed.batch["temperature"][is_padding] == 1).all()), "logits are divided by it"
    if "weights" in batch:
        values = torch.rand(is_real.shape)
        column = pack_rows({**batch, "values": values}, multiple_of=multiple_of).batch["values"]
        mean = (values * batch["weights"]).sum(dim=1).mean()
        torch.testing.assert_close((column * packed.batch["weights"]).sum(dim=1).mean(), mean)


@given(batches())
def test_long_rows_come_first_and_few_are_needed(batch: TensorDict) -> None:
    packed = pack_rows(batch)
    by_row = {}
    for place in packed.places:
        by_row[place.row] = by_row.get(place.row, 0) + place.length
    assert max(by_row.values()) <= WIDTH
    # Two rows that together fit into one do not both exist.
    sums = sorted(total for total in by_row.values() if total)
    assert len(sums) < 2 or sums[0] + sums[1] > WIDTH


def test_added_rows_shorten_the_others() -> None:
    """All 16 rows of a micro batch are computed as long as the longest."""
    lengths = torch.arange(100, 116)
    batch = {
        "tokens": torch.ones(16, 1024, dtype=torch.int64),
        "attention_mask": (torch.arange(1024) < lengths[:, None]).long(),
    }
    counts = (pack_rows(batch, multiple_of=16).batch["sequence_ids"] > 0).sum(dim=1)
    assert counts.max() == 115
    assert (pack_rows(batch).batch["sequence_ids"] > 0).sum(dim=1).max() > 900


def refused() -> dict[str, tuple[Values, tuple[str, str]]]:
    tokens = torch.ones(2, 4, dtype=torch.int64)
    return {
        "two sequences": (
            {"tokens": tokens, "sequence_ids": torch.tensor([[1, 1, 2, 2], [1, 1, 1, 1]])},
            ("sequence_ids", "several-sequences"),
        ),
        "positions that do not count": (
            {"tokens": tokens, "position_ids": torch.tensor([[1, 2, 3, 4], [0, 1, 2, 3]])},
            ("position_ids", "positions-do-not-count"),
        ),
        "a mask of another width": (
            {"tokens": tokens, "attention_mask": torch.ones(2, 3, dtype=torch.int64)},
            ("attention_mask", "wrong-shape"),
        ),
        "no tokens": ({"labels": tokens}, ("tokens", "missing-key")),
        "a list": ({"tokens": tokens, "values": [1, 2]}, ("values", "wrong-shape")),
        "another width": (
            {"tokens": tokens, "values": torch.ones(2, 3)},
            ("values", "wrong-shape"),
        ),
        "other rows": (
            {"tokens": tokens, "advantages": torch.ones(3)},
            ("advantages", "wrong-shape"),
        ),
    }


@pytest.mark.parametrize("name", refused())
def test_other_batches_are_refused(name: str) -> None:
    batch, violation = refused()[name]
    with violated(BatchError, violation):
        pack_rows(batch)


def test_sequences_need_room_in_the_packed_rows() -> None:
    tokens = torch.ones(2, 4, dtype=torch.int64)
    with violated(BatchError, ("tokens", "sequence-too-long")):
        pack_rows({"tokens": tokens}, 3)
    packed = pack_rows({"tokens": tokens}, 9)
    assert packed.batch["tokens"].shape == (1, 9)
    assert torch.equal(packed.restore(packed.batch["tokens"]), tokens)
