"""Advantages and losses, compared with examples worked out by hand and a plain loop over tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine import build_batch
from hybrid_engine.errors import BatchError
from hybrid_engine.rl import losses
from hybrid_engine.rl.losses import Aggregation
from hybrid_engine.trainer.batches import mean_weights, pack
from tests.harness.errors import has_violation, has_violations


def test_advantages_by_hand() -> None:
    # mean 1/4, standard deviation sqrt(1/4 * 3/4) = sqrt(3)/4
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[math.sqrt(3), *[-1 / math.sqrt(3)] * 3], [0.0] * 4, [0.0] * 4])
    torch.testing.assert_close(losses.group_advantages(rewards, epsilon=0.0)[:1], expected[:1])
    torch.testing.assert_close(losses.group_advantages(rewards), expected, rtol=1e-3, atol=1e-3)


def test_policy_loss_by_hand() -> None:
    """Two sequences, one padded.

    Ratios: 1; 2 with advantage 2, clipped to 1.2; 0.5 with advantage -1, clipped to 0.8.
    """
    old = torch.log(torch.tensor([[0.5, 0.4], [0.6, 0.9]]))
    new = torch.log(torch.tensor([[0.5, 0.8], [0.3, 0.1]])).requires_grad_()
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    batch = {
        "weights": mean_weights(mask),
        "old_log_probs": old,
        "ref_log_probs": torch.log(torch.tensor([[0.25, 0.8], [0.3, 0.5]])),
        "advantages": torch.tensor([2.0, -1.0]),
    }
    loss, report = losses.policy_loss(clip_ratio=0.2, kl_coefficient=0.1)(batch, new)
    # min(1*2, 1*2), min(2*2, 1.2*2), min(0.5*-1, 0.8*-1), over three tokens
    policy = -(2.0 + 2.4 - 0.8) / 3
    # r - log r - 1; the reference differs only at the first token, where r = 1/2
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
    loss, _ = losses.cross_entropy({"weights": weights}, torch.tensor([[-9.0, -1.0], [-2.0, -3.0]]))
    assert loss.item() == pytest.approx(2.0)


def brute_force(
    batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor, aggregation: Aggregation, length: int
) -> tuple[float, float]:
    """Compute the loss of `LOSS` token by token in Python, and the mean KL per token."""
    sums = list[list[float]]()
    kls = list[float]()
    for row in range(len(log_probs)):
        sums.append([])
        for column in (column for column in range(log_probs.shape[1]) if batch["mask"][row, column]):
            new, old, sampled, ref = (
                float(tensor[row, column])
                for tensor in (log_probs, batch["old_log_probs"], batch["sampled_log_probs"], batch["ref_log_probs"])
            )
            ratio = math.exp(new - old)
            advantage = float(batch["advantages"][row])
            gain = min(ratio * advantage, min(max(ratio, 1 - 0.2), 1 + 0.4) * advantage)
            kls.append(math.exp(ref - new) - (ref - new) - 1)
            sums[-1].append(-gain * min(math.exp(old - sampled), 1.1) + 0.3 * kls[-1])
    flat = [value for values in sums for value in values]
    loss = {
        "token": sum(flat) / len(flat),
        "sequence": statistics.fmean(sum(values) / len(values) for values in sums if values),
        "constant": sum(flat) / length / len(sums),
    }[aggregation]
    return loss, statistics.fmean(kls)


LOSS = losses.policy_loss(0.2, 0.3, clip_ratio_high=0.4, importance_cap=1.1)


def random_batch(seed: int, rows: int = 8, length: int = 5) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return completions of 1 to `length` tokens, and new log-probabilities; float64."""
    generator = torch.Generator().manual_seed(seed)
    first, old, sampled, ref = -torch.rand(4, rows, length, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    batch = {
        "tokens": torch.arange(rows)[:, None].expand(rows, length),
        "mask": (torch.arange(length) < lengths).double(),
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
        **{"old_log_probs": old, "sampled_log_probs": sampled, "ref_log_probs": ref},
    }
    return batch, first


@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence", "constant"]), st.sampled_from([1, 2, 4, 8]))
def test_the_loss_does_not_depend_on_micro_batches(seed: int, aggregation: Aggregation, size: int) -> None:
    """The mean over micro batches of `size` rows, as in an update, with its gradient."""
    batch, log_probs = random_batch(seed)
    (whole,) = losses.minibatches(batch, 1, torch.Generator(), aggregation, 7)
    new = log_probs[whole["tokens"][:, 0]].requires_grad_()
    parts = [
        LOSS({name: tensor[start : start + size] for name, tensor in whole.items()}, new[start : start + size])
        for start in range(0, 8, size)
    ]
    loss = torch.stack([loss for loss, _ in parts]).mean()
    kl = torch.stack([report["kl"] for _, report in parts]).mean()
    expected, expected_kl = brute_force(whole, new.detach(), aggregation, 7)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert kl.item() == pytest.approx(expected_kl, rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, new)
    (whole_gradient,) = torch.autograd.grad(LOSS(whole, new)[0], new)
    torch.testing.assert_close(gradient, whole_gradient)
    assert gradient[whole["mask"] == 0].eq(0).all()


VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "gspo": {"ratio_of": "sequence"},
    "cispo": {"clipping": "cispo"},
    "dual clip": {"dual_clip": 1.5},
    "k1": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2"},
}


def gradient_by_formula(name: str, batch: Mapping[str, torch.Tensor], new: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the mean over tokens by each paper's formula, token by token."""
    gradient = torch.zeros_like(new)
    num_tokens = float(batch["mask"].sum())
    for row in range(len(new)):
        columns = [column for column in range(new.shape[1]) if batch["mask"][row, column]]
        log_ratios = {column: float(new[row, column] - batch["old_log_probs"][row, column]) for column in columns}
        mean_ratio = math.exp(statistics.fmean(log_ratios.values()))
        advantage = float(batch["advantages"][row])
        is_positive = advantage > 0
        for column in columns:
            ratio = mean_ratio if name == "gspo" else math.exp(log_ratios[column])
            # d(ratio) = ratio * d(log ratio); PPO's gradient is 0 if the clipped gain is smaller.
            is_clipped = ratio > 1.4 if is_positive else ratio < 0.8
            slope = 0.0 if is_clipped else ratio * advantage
            if name == "cispo":
                slope = min(max(ratio, 0.8), 1.4) * advantage
            if name == "dual clip" and not is_positive and ratio > 1.5:
                slope = 0.0
            difference = float(batch["ref_log_probs"][row, column] - new[row, column])
            kl_slope = {"k1": 1.0, "k2": -difference}.get(name, 1 - math.exp(difference))
            if name == "gspo":
                # Each token's ratio depends on every token of the row, by 1 / length.
                for other_column in columns:
                    gradient[row, other_column] += -slope / len(columns) / num_tokens
            else:
                gradient[row, column] -= slope / num_tokens
            gradient[row, column] += 0.3 * kl_slope / num_tokens
    return gradient


@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(VARIANTS)))
def test_gradients_equal_the_formulas_of_the_papers(seed: int, name: str) -> None:
    batch, log_probs = random_batch(seed)
    (whole,) = losses.minibatches(batch, 1, torch.Generator())
    new = log_probs[whole["tokens"][:, 0]].requires_grad_()
    loss_function = losses.policy_loss(0.2, 0.3, clip_ratio_high=0.4, **VARIANTS[name])
    # The mean over rows of sums of weighted tokens is the mean over tokens.
    (gradient,) = torch.autograd.grad(loss_function(whole, new)[0], new)
    torch.testing.assert_close(gradient, gradient_by_formula(name, whole, new.detach()))


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_the_baseline_may_exclude_the_completion(seed: int, size: int) -> None:
    rewards = torch.rand(3, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = [
        [reward - statistics.fmean(group[:index] + group[index + 1 :]) for index, reward in enumerate(group)]
        for group in rewards.tolist()
    ]
    advantages = losses.group_advantages(rewards, baseline="others", scale="none")
    torch.testing.assert_close(advantages, torch.tensor(expected).double())


def test_advantages_may_be_scaled_by_the_whole_batch() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    advantages = losses.group_advantages(rewards, epsilon=0.0, scale="batch")
    centred = [-0.5, 0.5, -1.5, 1.5]
    scale = statistics.pstdev(centred)
    assert advantages.flatten().tolist() == pytest.approx([value / scale for value in centred])


def test_truncated_completions_have_no_weight_in_the_loss() -> None:
    batch, log_probs = random_batch(5)
    is_whole = torch.tensor([1.0, 0.0] * 4)[:, None]
    batch["learned_mask"] = batch["mask"] * is_whole
    (whole,) = losses.minibatches(batch, 1, torch.Generator())
    assert whole["weights"].bool().equal((batch["learned_mask"])[whole["tokens"][:, 0]].bool())
    assert whole["token_weights"].bool().equal(whole["mask"].bool())
    batch["learned_mask"] = torch.zeros_like(batch["mask"])
    (unweighted,) = losses.minibatches(batch, 1, torch.Generator())
    new = log_probs.clone().requires_grad_()
    loss, _ = losses.policy_loss(0.2, 0.0)(unweighted, new)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.item() == 0
    assert not gradient.any()


def test_importance_weights_have_no_gradient() -> None:
    """Importance weights of 2 and 3 (capped) multiply the gain and its gradient."""
    old = torch.log(torch.tensor([[0.4, 0.8]]))
    sampled = torch.log(torch.tensor([[0.2, 0.1]]))
    new = old.clone().requires_grad_()
    batch = {"weights": torch.ones(1, 2), "mask": torch.ones(1, 2), "old_log_probs": old, "sampled_log_probs": sampled}
    loss, report = losses.policy_loss(0.2, 0.0, importance_cap=3.0)({**batch, "advantages": torch.ones(1)}, new)
    loss.backward()
    assert new.grad.tolist() == [pytest.approx([-2.0, -3.0])]
    assert (report["importance"].item(), "kl" in report) == (pytest.approx(5.0), False)


@given(
    seed=st.integers(0, 10**6),
    of=st.sampled_from(["token", "sequence"]),
    above_cap=st.sampled_from(["truncate", "mask"]),
    cap=st.sampled_from([None, 1.1, 2.0]),
    veto=st.sampled_from([None, 0.7, 1e-4]),
)
def test_importance_weights_token_by_token(seed: int, of: Any, above_cap: Any, cap: Any, veto: Any) -> None:
    batch, _ = random_batch(seed)
    log_ratio = batch["old_log_probs"] - batch["sampled_log_probs"]
    weights = losses.importance_weights(log_ratio, batch["mask"], cap, of=of, above_cap=above_cap, veto=veto)
    for row, mask in enumerate(batch["mask"].bool()):
        ratios = [math.exp(value) for value in log_ratio[row][mask].tolist()]
        for index, weight in enumerate(weights[row][mask].tolist()):
            ratio = math.prod(ratios) if of == "sequence" else ratios[index]
            expected = 1.0
            if cap is not None:
                expected = (cap if above_cap == "truncate" else 0.0) if ratio > cap else ratio
            if veto is not None and min(ratios) < veto:
                expected = 0.0
            assert weight == pytest.approx(expected, rel=1e-9)


def test_the_baseline_may_be_that_of_the_step() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, math.nan]], dtype=torch.float64)
    advantages = losses.group_advantages(rewards, baseline="step", scale="none")
    assert advantages.flatten().tolist() == pytest.approx([1 / 3, 1 / 3, -2 / 3, 0.0])


def test_weights_need_tokens_and_a_length() -> None:
    with pytest.raises(BatchError, match="0 everywhere"):
        losses.loss_weights({"mask": torch.zeros(2, 3)}, "sequence")
    with pytest.raises(ValueError, match="needs a length"):
        losses.loss_weights({"mask": torch.ones(2, 3)}, "constant")


def test_log_probs_are_aligned_with_their_tokens() -> None:
    batch = build_batch([[5, 6, 7, 8], [1, 2, 3, 4, 5]], [[9, 9], [8, 8, 8]], seq_length=8)
    aligned = losses.align_log_probs([[-1.0, -2.0], [-3.0, -4.0, -5.0]], batch)
    assert aligned.tolist() == [[0, 0, 0, -1, -2, 0, 0, 0], [0, 0, 0, 0, -3, -4, -5, 0]]
    with pytest.raises(BatchError, check=has_violation("values", "wrong-length", "[3, 2]", "[2, 3]")):
        losses.align_log_probs([[-3.0, -4.0, -5.0], [-1.0, -2.0]], batch)


@pytest.mark.parametrize(("seq_length", "code"), [(8, "several-sequences"), (5, "rows-reordered")])
def test_packed_rows_are_refused_if_rows_must_be_sequences(seq_length: int, code: str) -> None:
    """Rows of one sequence each count as packed if reordered, since longer ones come first."""
    batch = pack([[1, 2], [3, 4, 5, 6]], [[9, 9], [8, 8]], seq_length).batch
    with pytest.raises(BatchError, check=has_violations(("sequence_ids", code))):
        losses.align_log_probs([[-1.0, -2.0], [-3.0, -4.0]], batch)
    if seq_length == 8:
        with pytest.raises(BatchError, check=has_violations(("sequence_ids", code))):
            losses.loss_weights(batch, "sequence")
    else:  # row order does not affect a mean
        assert losses.loss_weights(batch, "sequence").sum() == 2
    torch.testing.assert_close(losses.loss_weights(batch, "token"), mean_weights(batch["mask"]))


def test_minibatches_are_a_partition() -> None:
    rows = list(range(12))
    batch = build_batch([[row] for row in rows], [[row] * (1 + row % 3) for row in rows], seq_length=5)
    parts = losses.minibatches(batch, 3, torch.Generator().manual_seed(0))
    assert [len(part["tokens"]) for part in parts] == [4, 4, 4]
    assert sorted(int(token) for part in parts for token in part["tokens"][:, 0]) == rows
    assert [int(token) for part in parts for token in part["tokens"][:, 0]] != rows
    for part in parts:
        torch.testing.assert_close(part["weights"].sum(), torch.tensor(4.0))
