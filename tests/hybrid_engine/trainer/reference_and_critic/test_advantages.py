"""Advantages and the critic's loss, as loops over sequences would compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import BatchError
from hybrid_engine.rl.losses import align_log_probs, loss_weights
from hybrid_engine.trainer.batches import build_batch, pack
from hybrid_engine.trainer.batches.arrangement import positions_in
from hybrid_engine.trainer.reference_and_critic import explained_variance, generalized_advantages, value_loss
from hybrid_engine.trainer.reference_and_critic.advantages import whitened
from tests.harness.errors import has_violations

SHAPE = (5, 9)


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards and values of float64, and a mask that may have holes."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64)
    return rewards, values, (torch.rand(SHAPE, generator=generator) < 0.7).double()


def by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Of the steps of one sequence: every later error counts, each less by gamma * lambda than the one before."""
    next_values = [*values[1:], 0.0]
    errors = [reward + gamma * later - value for reward, value, later in zip(rewards, values, next_values, strict=True)]
    advantages = [
        sum((gamma * lam) ** (later - step) * errors[later] for later in range(step, len(errors)))
        for step in range(len(errors))
    ]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@given(seed=st.integers(0, 10**6), gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_advantages_are_discounted_sums_of_errors(seed: int, gamma: float, lam: float) -> None:
    rewards, values, mask = drawn(seed)
    found = generalized_advantages(rewards, values, {"mask": mask}, gamma, lam)
    for row in range(SHAPE[0]):
        steps = mask[row].bool()
        advantages, returns = by_definition(rewards[row, steps].tolist(), values[row, steps].tolist(), gamma, lam)
        assert found.advantages[row, steps].tolist() == pytest.approx(advantages)
        assert found.returns[row, steps].tolist() == pytest.approx(returns)
        assert not found.advantages[row, ~steps].any()
        assert not found.returns[row, ~steps].any()


def test_packed_sequences_know_nothing_of_each_other() -> None:
    prompts, completions = [[1], [2, 3], [4]], [[5, 6, 7], [8, 9], [5]]
    packed = pack(prompts, completions, seq_length=8)
    assert len(packed.batch["tokens"]) < len(prompts)  # a row has several
    alone, in_rows = build_batch(prompts, completions, seq_length=8), torch.zeros(2, *packed.batch["tokens"].shape)
    drawn_values = torch.randn(2, *alone["tokens"].shape, generator=torch.Generator().manual_seed(0))
    for number, place in enumerate(packed.places):
        in_rows[:, place.row, place.columns] = drawn_values[:, number, : place.length]
    ids, mask = packed.batch["sequence_ids"], packed.batch["mask"]
    expected = generalized_advantages(*drawn_values, alone, 0.9, 0.8)
    for batch in (packed.batch, {"mask": mask, "position_ids": positions_in(ids)}):
        found = generalized_advantages(*in_rows, batch, 0.9, 0.8)
        for of_packed, of_alone in zip(found, expected, strict=True):
            for number, unpacked in enumerate(packed.unpack(of_packed)):
                torch.testing.assert_close(unpacked, of_alone[number, : len(unpacked)])


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"sequence_ids": torch.ones(1, 9)}, "wrong-shape"),
        ({"sequence_ids": torch.tensor([[1, 2, 1, 1, 1, 1, 1, 1, 1]] * 5)}, "sequence-interrupted"),
    ],
)
def test_keys_that_separate_sequences_are_checked(keys: dict[str, torch.Tensor], code: str) -> None:
    rewards, values, mask = drawn(3)
    with pytest.raises(BatchError, check=has_violations(("sequence_ids", code))):
        generalized_advantages(rewards, values, {"mask": mask, **keys})


def test_a_mask_without_its_batch_is_refused() -> None:
    """In a row of two sequences whose prompts have a token each, it looks as that of one sequence."""
    packed = pack([[1], [2]], [[5, 6], [7, 8]], seq_length=4)
    mask = packed.batch["mask"]
    assert mask.tolist() == [[1, 1, 1, 1]]
    calls: list[Callable[[Any], object]] = [
        lambda batch: generalized_advantages(mask, mask, batch),
        lambda batch: align_log_probs([[-1.0, -1.0], [-1.0, -1.0]], batch),
        loss_weights,
    ]
    for call in calls:
        with pytest.raises(BatchError, check=has_violations(("batch", "no-mask"))):
            call(mask)
        with pytest.raises(BatchError, check=has_violations(("batch", "no-mask"))):
            call({"tokens": mask})


def test_what_is_outside_the_mask_is_not_read() -> None:
    rewards, values, mask = drawn(2)
    spoiled = [each.masked_fill(mask == 0, torch.nan) for each in (rewards, values)]
    for found, expected in zip(
        (*generalized_advantages(*spoiled, {"mask": mask}), whitened(spoiled[1], mask)),
        (*generalized_advantages(rewards, values, {"mask": mask}), whitened(values, mask)),
        strict=True,
    ):
        assert torch.equal(found, expected)


@given(seed=st.integers(0, 10**6), clip=st.one_of(st.none(), st.floats(0.01, 1)))
def test_the_loss_is_half_the_worse_squared_error(seed: int, clip: float | None) -> None:
    returns, values, mask = drawn(seed)
    old = values + 0.3 * returns.flip(0)
    weights = mask / mask.sum() * SHAPE[0]
    loss, report = value_loss(clip)({"returns": returns, "old_values": old, "weights": weights}, values)
    total, num_moved, count = 0.0, 0, int(mask.sum())
    for row in range(SHAPE[0]):
        for step in range(SHAPE[1]):
            if mask[row, step]:
                value, target, before = (float(tensor[row, step]) for tensor in (values, returns, old))
                near = value if clip is None else min(max(value, before - clip), before + clip)
                total += 0.5 * max((value - target) ** 2, (near - target) ** 2)
                num_moved += near != value
    assert loss.item() == pytest.approx(total / count)
    assert report["value_loss"].item() == pytest.approx(total / count)
    assert report["value_clip_fraction"].item() == pytest.approx(num_moved / count)


def test_a_value_that_moved_too_far_the_right_way_is_not_pushed_further() -> None:
    """The gradient is that of the clipped error, which is constant, where it is the larger one."""
    values = torch.tensor([[0.9]], requires_grad=True)
    batch = {"returns": torch.tensor([[1.0]]), "old_values": torch.tensor([[0.0]]), "weights": torch.tensor([[1.0]])}
    value_loss(0.2)(batch, values)[0].backward()
    assert values.grad is not None
    assert values.grad.item() == 0.0
    values.grad = None
    value_loss(None)(batch, values)[0].backward()
    assert values.grad.item() == pytest.approx(-0.1)


@pytest.mark.parametrize("clip", [0.2, None])
def test_what_has_weight_0_is_not_read_by_the_loss(clip: float | None) -> None:
    returns, values, mask = drawn(5)
    old, weights = values + 0.3 * returns.flip(0), mask / mask.sum()
    found = []
    for outside in (0.0, torch.nan, torch.inf):
        of_critic, *rest = (each.masked_fill(mask == 0, outside) for each in (values, returns, old))
        batch = dict(zip(("returns", "old_values"), rest, strict=True), weights=weights)
        loss, report = value_loss(clip)(batch, of_critic.requires_grad_())
        loss.backward()
        assert of_critic.grad is not None
        found.append(torch.stack([loss.detach(), *report.values(), *of_critic.grad.flatten()]))
    assert found[0].isfinite().all()
    assert all(torch.equal(each, found[0]) for each in found)


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    values, _, mask = drawn(2)
    found = whitened(values, mask)
    inside = found[mask.bool()]
    assert inside.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert inside.std(correction=0).item() == pytest.approx(1.0)
    assert not found[mask == 0].any()


def test_the_explained_variance_is_1_for_the_returns_and_0_for_a_constant() -> None:
    returns, values, mask = drawn(3)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 0.3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(values, torch.ones_like(returns), mask) == 0.0


REFUSED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str, str, list[str]]] = {
    "a reward for each answer": (
        lambda values, mask: generalized_advantages(torch.ones(5), values, {"mask": mask}),
        "rewards",
        "wrong-shape",
        ["[5]", "[5, 9]"],
    ),
    "flat values": (
        lambda values, mask: generalized_advantages(mask, values[0], {"mask": mask}),
        "values",
        "wrong-shape",
        ["[9]"],
    ),
    "a list": (lambda values, mask: whitened(values, [1]), "mask", "wrong-shape", ["list"]),  # type: ignore[arg-type]
    "another mask": (lambda values, mask: whitened(values, mask[:, 1:]), "mask", "wrong-shape", ["[5, 8]"]),
    "an empty mask": (lambda values, mask: whitened(values, mask * 0), "mask", "mask-is-zero", []),
    "a negative clip": (lambda values, mask: value_loss(-1), "clip", "out-of-range", ["-1"]),
    "returns [B]": (
        lambda values, mask: value_loss()({"returns": mask[:, 0], "old_values": mask, "weights": mask}, values),
        "returns",
        "wrong-shape",
        ["[5]"],
    ),
    "no variance": (
        lambda values, mask: explained_variance(values, values[1:], mask),
        "returns",
        "wrong-shape",
        ["[4, 9]"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_other_shapes_are_named(name: str) -> None:
    call, key, code, numbers = REFUSED[name]
    _, values, mask = drawn(4)
    with pytest.raises(BatchError, check=has_violations((key, code))) as caught:
        call(values, mask)
    for number in numbers:
        assert number in str(caught.value)
