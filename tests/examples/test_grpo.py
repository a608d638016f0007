"""GRPO's and PPO's arithmetic against examples worked out by hand, and the properties it must have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt_rl import grpo, task
from examples.gpt_rl.ppo import at_last_steps
from hybrid_engine import build_batch
from hybrid_engine.trainer.batches import mean_weights


def test_advantages_by_hand() -> None:
    # mean 1/4, standard deviation sqrt(1/4 * 3/4) = sqrt(3)/4
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[math.sqrt(3), *[-1 / math.sqrt(3)] * 3], [0.0] * 4, [0.0] * 4])
    torch.testing.assert_close(grpo.group_advantages(rewards, epsilon=0.0)[:1], expected[:1])
    torch.testing.assert_close(grpo.group_advantages(rewards), expected, rtol=1e-3, atol=1e-3)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(0.5, 3), st.floats(-3, 3))
def test_advantages_ignore_shift_and_scale(rewards: list[float], scale: float, shift: float) -> None:
    group = torch.tensor([rewards], dtype=torch.float64)
    if group.std() < 0.1:
        return
    advantages = grpo.group_advantages(group, epsilon=0.0)
    torch.testing.assert_close(grpo.group_advantages(group * scale + shift, epsilon=0.0), advantages)
    assert advantages.sum().abs() < 1e-9


def test_policy_loss_by_hand() -> None:
    """Two sequences, one padded. Ratios: unchanged, doubled with advantage 2 (clipped to 1.2), halved with -1 (0.8)."""
    old = torch.log(torch.tensor([[0.5, 0.4], [0.6, 0.9]]))
    new = torch.log(torch.tensor([[0.5, 0.8], [0.3, 0.1]])).requires_grad_()
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    batch = {
        "weights": mean_weights(mask),
        "old_log_probs": old,
        "ref_log_probs": torch.log(torch.tensor([[0.25, 0.8], [0.3, 0.5]])),
        "advantages": torch.tensor([2.0, -1.0]),
    }
    loss, report = grpo.policy_loss(clip_ratio=0.2, kl_coefficient=0.1)(batch, new)
    # min(1*2, 1*2), min(2*2, 1.2*2), min(0.5*-1, 0.8*-1), over three tokens
    policy = -(2.0 + 2.4 - 0.8) / 3
    # the reference is half as likely in the first place only: r - log r - 1 with r = 1/2
    kl = (0.5 + math.log(2) - 1) / 3
    assert report["policy_loss"].item() == pytest.approx(policy, rel=1e-6)
    assert report["kl"].item() == pytest.approx(kl, rel=1e-6)
    assert loss.item() == report["loss"].item() == pytest.approx(policy + 0.1 * kl, rel=1e-6)
    assert report["clip_fraction"].item() == pytest.approx(2 / 3)

    loss.backward()
    # only the first token is not clipped: d(-2 * ratio)/d(log p) = -2, and d(kl)/d(log p) = 1 - r
    expected = torch.tensor([[(-2.0 + 0.1 * (1 - 0.5)) / 3, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(new.grad, expected)


def test_cross_entropy_by_hand() -> None:
    weights = mean_weights(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    loss, _ = grpo.cross_entropy({"weights": weights}, torch.tensor([[-9.0, -1.0], [-2.0, -3.0]]))
    assert loss.item() == pytest.approx(2.0)


@given(st.integers(0, 1000))
def test_micro_batches_average_to_the_mean_over_tokens(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(8, 5, generator=generator).round()
    mask[0, 0] = 1
    values = torch.randn(8, 5, generator=generator)
    weights = mean_weights(mask)
    parts = [grpo.weighted_mean(v, w) for v, w in zip(values.split(2), weights.split(2), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), values[mask.bool()].mean())


def test_kl_estimate_is_zero_for_equals_and_positive_else() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5])
    assert torch.equal(grpo.kl_estimate(log_probs, log_probs), torch.zeros(3))
    assert (grpo.kl_estimate(log_probs, log_probs.flip(0))[[0, 2]] > 0).all()


def test_batch_of_two_sequences() -> None:
    prompts = [task.encode("1+1="), task.encode("12+7=")]
    responses = [task.encode_response("2"), task.encode_response("19")]
    batch = build_batch(prompts, responses, 8, task.PADDING)
    end, padding = task.END, task.PADDING
    assert batch["tokens"].tolist() == [
        [1, 10, 1, 11, 2, end, padding, padding],
        [1, 2, 10, 7, 11, 1, 9, end],
    ]
    assert batch["labels"].tolist() == [
        [10, 1, 11, 2, end, padding, padding, padding],
        [2, 10, 7, 11, 1, 9, end, padding],
    ]
    assert batch["mask"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]]
    aligned = grpo.align_log_probs([[-1.0, -2.0], [-3.0, -4.0, -5.0]], batch["mask"])
    assert aligned.tolist() == [[0, 0, 0, -1, -2, 0, 0, 0], [0, 0, 0, 0, -3, -4, -5, 0]]


def test_minibatches_are_a_partition() -> None:
    rows = list(range(12))
    batch = build_batch([[row] for row in rows], [[row] * (1 + row % 3) for row in rows], seq_length=5)
    parts = grpo.split_minibatches(batch, 3, torch.Generator().manual_seed(0))
    assert [len(part["tokens"]) for part in parts] == [4, 4, 4]
    assert sorted(int(token) for part in parts for token in part["tokens"][:, 0]) == rows
    assert [int(token) for part in parts for token in part["tokens"][:, 0]] != rows
    for part in parts:
        torch.testing.assert_close(part["weights"].sum(), torch.tensor(4.0))


def test_a_reward_belongs_to_the_last_step() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    rewards = at_last_steps(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert rewards.tolist() == [[0.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]]


def test_one_advantage_for_all_tokens_is_one_for_each() -> None:
    """So that GRPO's loss is PPO's where all tokens of a completion have the same advantage."""
    generator = torch.Generator().manual_seed(1)
    log_probs, old, ref = torch.randn(3, 4, 5, generator=generator)
    mask = torch.ones(4, 5)
    batch = {"weights": mean_weights(mask), "old_log_probs": old, "ref_log_probs": ref}
    advantages, loss = torch.randn(4, generator=generator), grpo.policy_loss(0.2, 0.01)
    by_completion = loss({**batch, "advantages": advantages}, log_probs)[0]
    by_token = loss({**batch, "advantages": advantages[:, None].expand(4, 5)}, log_probs)[0]
    assert torch.equal(by_completion, by_token)
