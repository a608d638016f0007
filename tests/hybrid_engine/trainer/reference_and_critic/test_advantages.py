"""Advantages and the critic's loss, compared with loops over sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import BatchError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.rl.losses import align_log_probs, loss_weights
from hybrid_engine.trainer.batches import build_batch, pack
from hybrid_engine.trainer.batches.arrangement import positions_in
from hybrid_engine.trainer.reference_and_critic import (
    explained_variance,
    generalized_advantages,
    value_loss,
)
from hybrid_engine.trainer.reference_and_critic.advantages import whitened
from tests.harness.errors import violated

SHAPE = (5, 9)


def random_tensors(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards and values in float64, and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64)
    return rewards, values, (torch.rand(SHAPE, generator=generator) < 0.7).double()


def by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Compute advantages and returns of one sequence by their definition.

    The n-th later error counts by (gamma * lambda) ** n.
    """
    next_values = [*values[1:], 0.0]
    errors = [
        reward + gamma * after - value
        for reward, value, after in zip(rewards, values, next_values, strict=True)
    ]
    advantages = [
        sum((gamma * lam) ** (later - step) * errors[later] for later in range(step, len(errors)))
        for step in range(len(errors))
    ]
    return advantages, [
        advantage + value for advantage, value in zip(advantages, values, strict=True)
    ]


@given(seed=st.integers(0, 10**6), gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_advantages_are_discounted_sums_of_errors(seed: int, gamma: float, lam: float) -> None:
    rewards, values, mask = random_tensors(seed)
    actual = generalized_advantages(rewards, values, {"mask": mask}, gamma, lam)
    for row in range(SHAPE[0]):
        steps = mask[row].bool()
        advantages, returns = by_definition(
            rewards[row, steps].tolist(), values[row, steps].tolist(), gamma, lam
        )
        assert actual.advantages[row, steps].tolist() == pytest.approx(advantages)
        assert actual.returns[row, steps].tolist() == pytest.approx(returns)
        assert not actual.advantages[row, ~steps].any()
        assert not actual.returns[row, ~steps].any()


def test_packed_sequences_are_independent() -> None:
    prompts = [[1], [2, 3], [4]]
    completions = [[5, 6, 7], [8, 9], [5]]
    packed = pack(prompts, completions, seq_length=8)
    assert len(packed.batch["tokens"]) < len(prompts)  # some row has several sequences
    alone = build_batch(prompts, completions, seq_length=8)
    in_rows = torch.zeros(2, *packed.batch["tokens"].shape)
    plain = torch.randn(2, *alone["tokens"].shape, generator=torch.Generator().manual_seed(0))
    for number, place in enumerate(packed.places):
        in_rows[:, place.row, place.columns] = plain[:, number, : place.length]
    ids = packed.batch["sequence_ids"]
    mask = packed.batch["mask"]
    expected = generalized_advantages(*plain, alone, 0.9, 0.8)
    for batch in (packed.batch, {"mask": mask, "position_ids": positions_in(ids)}):
        actual = generalized_advantages(*in_rows, batch, 0.9, 0.8)
        for of_packed, of_alone in zip(actual, expected, strict=True):
            for number, unpacked in enumerate(packed.unpack(of_packed)):
                torch.testing.assert_close(unpacked, of_alone[number, : len(unpacked)])


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"sequence_ids": torch.ones(1, 9)}, "wrong-shape"),
        ({"sequence_ids": torch.tensor([[1, 2, 1, 1, 1, 1, 1, 1, 1]] * 5)}, "sequence-interrupted"),
    ],
)
def test_keys_of_sequences_are_checked(keys: TensorDict, code: str) -> None:
    rewards, values, mask = random_tensors(3)
    with violated(BatchError, ("sequence_ids", code)):
        generalized_advantages(rewards, values, {"mask": mask, **keys})


def test_a_mask_without_its_batch_is_refused() -> None:
    """The mask of two packed sequences with one-token prompts looks like one sequence's."""
    packed = pack([[1], [2]], [[5, 6], [7, 8]], seq_length=4)
    mask = packed.batch["mask"]
    assert mask.tolist() == [[1, 1, 1, 1]]
    calls = [
        lambda batch: generalized_advantages(mask, mask, batch),
        lambda batch: align_log_probs([[-1.0, -1.0], [-1.0, -1.0]], batch),
        loss_weights,
    ]
    for call in calls:
        with violated(BatchError, ("batch", "no-mask")):
            call(mask)
        with violated(BatchError, ("batch", "no-mask")):
            call({"tokens": mask})


def test_values_outside_the_mask_are_not_read() -> None:
    rewards, values, mask = random_tensors(2)
    spoiled = [tensor.masked_fill(mask == 0, torch.nan) for tensor in (rewards, values)]
    for actual, expected in zip(
        (*generalized_advantages(*spoiled, {"mask": mask}), whitened(spoiled[1], mask)),
        (*generalized_advantages(rewards, values, {"mask": mask}), whitened(values, mask)),
        strict=True,
    ):
        assert torch.equal(actual, expected)


@given(seed=st.integers(0, 10**6), clip=st.one_of(st.none(), st.floats(0.01, 1)))
def test_the_loss_is_half_the_larger_squared_error(seed: int, clip: float | None) -> None:
    returns, values, mask = random_tensors(seed)
    old = values + 0.3 * returns.flip(0)  # some changes are clipped, some are not
    weights = mask / mask.sum() * SHAPE[0]
    loss, report = value_loss(clip)(
        {"returns": returns, "old_values": old, "weights": weights}, values
    )
    total = 0.0
    num_clipped = 0
    count = int(mask.sum())
    for row in range(SHAPE[0]):
        for step in range(SHAPE[1]):
            if mask[row, step]:
                value, target, before = (
                    float(tensor[row, step]) for tensor in (values, returns, old)
                )
                clipped = value if clip is None else min(max(value, before - clip), before + clip)
                total += 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
                num_clipped += clipped != value
    assert loss.item() == pytest.approx(total / count)
    assert report["value_loss"].item() == pytest.approx(total / count)
    assert report["value_clip_fraction"].item() == pytest.approx(num_clipped / count)


@pytest.mark.parametrize("clip", [0.2, None])
def test_values_of_weight_0_are_not_read_by_the_loss(clip: float | None) -> None:
    returns, values, mask = random_tensors(5)
    old = values + 0.3 * returns.flip(0)
    weights = mask / mask.sum()
    results = []
    for outside in (0.0, torch.nan, torch.inf):
        of_critic, *rest = (
            tensor.masked_fill(mask == 0, outside) for tensor in (values, returns, old)
        )
        batch = dict(zip(("returns", "old_values"), rest, strict=True), weights=weights)
        loss, report = value_loss(clip)(batch, of_critic.requires_grad_())
        loss.backward()
        results.append(torch.stack([loss.detach(), *report.values(), *of_critic.grad.flatten()]))
    assert results[0].isfinite().all()
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_explained_variance_is_1_for_the_returns_and_0_for_a_constant() -> None:
    returns, values, mask = random_tensors(3)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 0.3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(values, torch.ones_like(returns), mask) == 0.0


REFUSED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str, str]] = {
    "a reward for each answer": (
        lambda values, mask: generalized_advantages(torch.ones(5), values, {"mask": mask}),
        "rewards",
        "wrong-shape",
    ),
    "flat values": (
        lambda values, mask: generalized_advantages(mask, values[0], {"mask": mask}),
        "values",
        "wrong-shape",
    ),
    "a list": (lambda values, mask: whitened(values, [1]), "mask", "wrong-shape"),
    "another mask": (lambda values, mask: whitened(values, mask[:, 1:]), "mask", "wrong-shape"),
    "an empty mask": (lambda values, mask: whitened(values, mask * 0), "mask", "mask-is-zero"),
    "a negative clip": (lambda values, mask: value_loss(-1), "clip", "out-of-range"),
    "returns [B]": (
        lambda values, mask: value_loss()(
            {"returns": mask[:, 0], "old_values": mask, "weights": mask}, values
        ),
        "returns",
        "wrong-shape",
    ),
    "no variance": (
        lambda values, mask: explained_variance(values, values[1:], mask),
        "returns",
        "wrong-shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_named(name: str) -> None:
    call, key, code = REFUSED[name]
    _, values, mask = random_tensors(4)
    with violated(BatchError, (key, code)):
        call(values, mask)
