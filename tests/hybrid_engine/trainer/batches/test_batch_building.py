"""Rows built from prompts and completions: one sequence per row, or several packed into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hybrid_engine import Completion, build_batch, pack
from hybrid_engine.backends.vllm.engine_settings import RoutedExperts
from hybrid_engine.errors import BatchError
from hybrid_engine.trainer.batches import mean_weights
from tests.harness.errors import violated
from tests.harness.values import Values

PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 8]]
COMPLETIONS = [[9], [1, 2, 3, 4], [5], [6, 7]]
S = 6  # seq_length


def test_labels_are_the_next_tokens() -> None:
    batch = build_batch(PROMPTS, COMPLETIONS, S, pad_token_id=77)
    assert batch["tokens"][1].tolist() == [3, 1, 2, 3, 4, 77]
    assert batch["labels"][1].tolist() == [1, 2, 3, 4, 77, 77]
    assert batch["mask"].sum(1).tolist() == [len(completion) for completion in COMPLETIONS]
    for row, labels, completion in zip(batch["mask"], batch["labels"], COMPLETIONS, strict=True):
        assert labels[row.bool()].tolist() == completion
    assert (batch["weights"].sum() / len(PROMPTS)).item() == pytest.approx(1.0)


def routed(num_tokens: int, first: int) -> RoutedExperts:
    """Return the experts `first`, `first` + 1, ... of successive tokens, in two layers."""
    numbers = torch.arange(first, first + num_tokens, dtype=torch.int16)
    return RoutedExperts(numbers.repeat_interleave(6).numpy().tobytes(), 2, 3)


def test_experts_stand_at_the_tokens_that_they_have_computed() -> None:
    """The last token, which is only a label, has none; nor have padding and completions without."""
    plain = Completion((9,), (), "stop")
    known = {1: replace(plain, token_ids=(1, 2, 3, 4), routed_experts=routed(4, 10))}
    # an engine may return fewer, or those of the last token as well
    known[2] = replace(plain, token_ids=(5,), routed_experts=routed(4, 20))
    known[3] = replace(plain, token_ids=(6, 7), routed_experts=routed(2, 30))
    completions = [known.get(number, plain) for number in range(4)]
    experts = build_batch(PROMPTS, completions, S)["routed_experts"]
    assert experts.shape == (4, S, 2, 3)
    assert experts.dtype == torch.int16
    assert experts[..., 1, 2].tolist() == [
        [-1] * 6,
        [10, 11, 12, 13, -1, -1],
        [20, 21, 22, -1, -1, -1],
        [30, 31, -1, -1, -1, -1],
    ]
    packed = pack(PROMPTS, completions, S, multiple_of=3)
    assert len(packed.batch["tokens"]) == 3
    assert (packed.batch["routed_experts"][packed.batch["sequence_ids"] == 0] == -1).all()
    for row, sequence in zip(experts, packed.unpack(packed.batch["routed_experts"]), strict=True):
        assert torch.equal(row[: len(sequence)], sequence)
    assert "routed_experts" not in build_batch(PROMPTS, [plain] * 4, S)
    other = replace(plain, routed_experts=replace(routed(2, 0), num_layers=3, top_k=2))
    with violated(BatchError, ("completions", "different-models")):
        build_batch(PROMPTS, [*completions[1:], other], S)


def test_parts_of_a_batch_are_weighted_by_the_whole() -> None:
    """Two ranks with two rows each, of 1 + 1 and 1 + 3 tokens."""
    mask = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]])
    whole = mean_weights(mask)
    parts = mask.chunk(2)
    weights = [mean_weights(part, count=6.0, rows=4) for part in parts]
    assert torch.equal(torch.cat(weights), whole)
    assert not torch.equal(torch.cat([mean_weights(part) for part in parts]), whole)
    assert mean_weights(torch.zeros(2, 3), count=6.0, rows=4).sum() == 0
    with violated(ValueError, ("mask", "mask-is-zero")):
        mean_weights(torch.zeros(2, 3))


def test_packed_rows_contain_the_same_sequences() -> None:
    plain = build_batch(PROMPTS, COMPLETIONS, S)
    packed = pack(PROMPTS, COMPLETIONS, S)
    assert packed.batch["tokens"].shape == (2, S)  # four sequences in two rows
    for name in ("tokens", "labels", "mask"):
        for row, values, place in zip(
            plain[name], packed.unpack(packed.batch[name]), packed.places, strict=True
        ):
            assert torch.equal(row[: place.length], values)
    # The mean is over all tokens and does not depend on the number of rows.
    means = [
        (batch["weights"] * batch["labels"]).sum(1).mean().item() for batch in (plain, packed.batch)
    ]
    assert means[0] == pytest.approx(means[1])
    ids = packed.batch["sequence_ids"]
    assert torch.equal(packed.spread(torch.arange(1, 5)), ids)
    assert (
        packed.spread(torch.tensor([0.5, 1, 2, 3])).sum().item() == 2 * 0.5 + 4 * 1 + 3 * 2 + 3 * 3
    )


def test_long_sequences_are_packed_first() -> None:
    packed = pack([[1]] * 6, [[1] * length for length in (3, 5, 2, 4, 1, 1)], 8)
    assert [place.row for place in packed.places] == [0, 0, 1, 1, 1, 1]


@dataclass(frozen=True)
class Sampled:
    """A completion of a rollout."""

    token_ids: tuple[int, ...] = (3, 4)
    prompt_token_ids: tuple[int, ...] = (1, 2)
    temperature: float = 0.5


REFUSED: dict[str, tuple[Values, list[tuple[str, str]]]] = {
    "sequences that do not fit": (
        {"prompts": [[1] * 7, []], "completions": [[1], [2]]},
        [("prompts[0]", "sequence-too-long"), ("prompts[1]", "empty-prompt")],
    ),
    "nothing to learn": ({"prompts": [[1, 2]], "completions": [[]]}, [("mask", "mask-is-zero")]),
    "groups": (
        {"prompts": [[1, 2], [3]], "completions": [[Sampled(), Sampled()], [Sampled()]]},
        [("completions[0]", "not-token-ids")],
    ),
    "completions as prompts": ({"prompts": [Sampled()] * 4}, [("prompts[0]", "not-token-ids")]),
    "texts": (
        {"prompts": ["one", "two"], "completions": "a text"},
        [("prompts[0]", "not-token-ids"), ("completions", "not-a-list")],
    ),
    "flags": ({"prompts": [[True]] * 4}, [("prompts[0]", "not-token-ids")]),
    "bytes": ({"completions": [b"ab"] * 4}, [("completions[0]", "not-token-ids")]),
    "one sequence": ({"prompts": [1, 2]}, [("prompts[0]", "not-token-ids")]),
    "fractions": ({"prompts": torch.ones(4, 2)}, [("prompts[0]", "not-token-ids")]),
    "no list": ({"prompts": None}, [("prompts", "not-a-list")]),
    "other numbers of them": ({"prompts": PROMPTS[:2]}, [("prompts", "different-lengths")]),
    "a tokenizer without a pad token": (
        {"pad_token_id": None},
        [("pad_token_id", "not-a-whole-number")],
    ),
    "a length of 0": ({"seq_length": 0}, [("seq_length", "out-of-range")]),
}


@pytest.mark.parametrize("make", [build_batch, pack])
@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused_by_name(name: str, make: Callable[..., object]) -> None:
    changed, expected = REFUSED[name]
    with violated(BatchError, *expected):
        make(**{"prompts": PROMPTS, "completions": COMPLETIONS, "seq_length": S, **changed})


def test_temperatures_of_completions_are_kept() -> None:
    prompts = [[1, 2], [3]]
    completions = [Sampled(), Sampled((5, 6), temperature=2.0)]
    assert build_batch(prompts, completions, S)["temperature"].tolist() == [0.5, 2.0]
    assert build_batch(prompts, [Sampled(), (5, 6)], S)["temperature"].tolist() == [0.5, 1.0]
    assert pack(prompts, completions, S).batch["temperature"].tolist() == [
        [0.5] * 3 + [2.0] * 2 + [1.0]
    ]
    for make in (build_batch, pack):
        built = make(
            prompts, [replace(completion, temperature=1.0) for completion in completions], S
        )
        assert "temperature" not in (built if isinstance(built, dict) else built.batch)


def test_token_ids_may_be_tensors_and_arrays() -> None:
    prompts = torch.tensor([[1, 2], [3, 4]])
    completions = [np.array([5]), torch.tensor([6, 7])]
    batch = build_batch(prompts, completions, S)
    assert torch.equal(batch["tokens"], build_batch([[1, 2], [3, 4]], [[5], [6, 7]], S)["tokens"])


def test_packed_rows_refuse_values_of_other_shapes() -> None:
    packed = pack(PROMPTS, COMPLETIONS, S)
    with violated(BatchError, ("values", "wrong-shape")):
        packed.spread(torch.ones(3))
    with violated(BatchError, ("values", "wrong-shape")):
        packed.unpack(torch.ones(4))
