"""Advantages and losses, compared with examples worked out by hand and with the papers' formulas in
float64.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine import build_batch
from hybrid_engine.errors import BatchError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.rl import GrpoConfig, Loop, PpoConfig, losses
from hybrid_engine.rl.critic import at_last_tokens
from hybrid_engine.rl.losses import Aggregation
from hybrid_engine.trainer.batches import mean_weights, pack
from hybrid_engine.trainer.reference_and_critic.advantages import generalized_advantages, whitened
from tests.harness.errors import has_violation, has_violations
from tests.hybrid_engine.trainer.reference_and_critic.test_advantages import by_definition

DOCS = Path(__file__).resolve().parents[3] / "docs/rl.md"


def test_cross_entropy_by_hand() -> None:
    weights = mean_weights(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    loss, _ = losses.cross_entropy({"weights": weights}, torch.tensor([[-9.0, -1.0], [-2.0, -3.0]]))
    assert loss.item() == pytest.approx(2.0)


LOSS = losses.policy_loss(0.2, 0.3, clip_ratio_high=0.4, importance_cap=1.1)


def random_batch(seed: int, rows: int = 8, length: int = 5) -> tuple[TensorDict, torch.Tensor]:
    """Return completions of 1 to `length` tokens, and new log-probabilities; float64."""
    generator = torch.Generator().manual_seed(seed)
    first, old, sampled, ref, entropy = -torch.rand(
        5, rows, length, generator=generator, dtype=torch.float64
    )
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    batch = {
        "tokens": torch.arange(rows)[:, None].expand(rows, length),
        "mask": (torch.arange(length) < lengths).double(),
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
        **{
            "old_log_probs": old,
            "sampled_log_probs": sampled,
            "ref_log_probs": ref,
            "entropy": entropy,
        },
    }
    # Ratios reach the bound of dual clip, 3.
    return batch, 1 + 2 * first


@given(
    st.integers(0, 10**6),
    st.sampled_from(["token", "sequence", "constant"]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_the_loss_does_not_depend_on_micro_batches(
    seed: int, aggregation: Aggregation, size: int
) -> None:
    """The mean over micro batches of `size` rows, as in an update, with its gradient."""
    batch, log_probs = random_batch(seed)
    (whole,) = losses.minibatches(batch, 1, torch.Generator(), aggregation, 7)
    new = log_probs[whole["tokens"][:, 0]].requires_grad_()
    parts = [
        LOSS(
            {name: tensor[start : start + size] for name, tensor in whole.items()},
            new[start : start + size],
        )
        for start in range(0, 8, size)
    ]
    loss = torch.stack([loss for loss, _ in parts]).mean()
    kl = torch.stack([report["kl"] for _, report in parts]).mean()
    expected, report = LOSS(whole, new)
    assert (loss.item(), kl.item()) == pytest.approx(
        (expected.item(), report["kl"].item()), rel=1e-9
    )
    (gradient,) = torch.autograd.grad(loss, new)
    (whole_gradient,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(gradient, whole_gradient)
    assert gradient[whole["mask"] == 0].eq(0).all()


Lists = list[list[float]]


@dataclass(frozen=True)
class Step:
    """Rewards of two groups of four completions; penalties and values of their tokens."""

    rewards: list[float]
    penalties: Lists
    values: Lists


def to_go(step: Step) -> Lists:
    """Return the reward minus the penalties of this and later tokens: REINFORCE++, eq. 8."""
    return [
        [reward - sum(row[position:]) for position in range(len(row))]
        for reward, row in zip(step.rewards, step.penalties, strict=True)
    ]


def by_group(of_group: Callable[[list[float]], list[float]]) -> Callable[[Step], Lists]:
    """Return the advantages of tokens, by those of a group's rewards minus all penalties of a
    completion.
    """

    def advantages(step: Step) -> Lists:
        totals = [row[0] for row in to_go(step)]
        of_rows = of_group(totals[:4]) + of_group(totals[4:])
        return [
            [advantage] * len(row) for advantage, row in zip(of_rows, step.penalties, strict=True)
        ]

    return advantages


def centred(group: list[float]) -> list[float]:
    return [reward - statistics.fmean(group) for reward in group]


def normalized(group: list[float], epsilon: float = 1e-4) -> list[float]:
    return [difference / (statistics.pstdev(group) + epsilon) for difference in centred(group)]


def without_own(group: list[float]) -> list[float]:
    return [reward - (sum(group) - reward) / 3 for reward in group]


def over_tokens(rows: Lists, *, scaled: bool = True) -> Lists:
    values = [value for row in rows for value in row]
    left = iter(normalized(values, 1e-8) if scaled else centred(values))
    return [[next(left) for _ in row] for row in rows]


def by_critic(step: Step) -> Lists:
    earned = [
        [before - after for before, after in zip(row, [*row[1:], 0.0], strict=True)]
        for row in to_go(step)
    ]
    return [by_definition(*pair, 1.0, 0.95)[0] for pair in zip(earned, step.values, strict=True)]


def clipped(low: float = 0.2, high: float = 0.2, bound: float = 1e9) -> Callable[..., torch.Tensor]:
    """Return PPO's gain of tokens; with `bound`, dual clip's."""

    def gain(ratio: torch.Tensor, advantage: torch.Tensor, _log_prob: torch.Tensor) -> torch.Tensor:
        lesser = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return torch.where(advantage < 0, torch.maximum(lesser, bound * advantage), lesser)

    return gain


OF_GROUP = by_group(normalized)
CLIPPED = clipped()


@dataclass(frozen=True)
class Formula:
    """Formulas of a paper.

    Attributes:
        advantages: of the tokens of each row.
        gain: (ratio, advantage, log-probability) -> gain, of tokens.
        aggregation: of the losses of tokens.
        has_one_ratio: True if all tokens of a row have the geometric mean of their ratios.
        settings: of the run, if docs/rl.md has no row.
    """

    advantages: Callable[[Step], Lists] = OF_GROUP
    gain: Callable[..., torch.Tensor] = CLIPPED
    aggregation: Aggregation = "token"
    has_one_ratio: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


OF_SEQUENCES = {"importance_cap": 1.1, "importance_of": "sequence"}
FORMULAS = {
    "GRPO": Formula(aggregation="sequence"),
    "Dr. GRPO": Formula(by_group(centred), aggregation="constant"),
    "DAPO": Formula(gain=clipped(high=0.28)),
    "GSPO": Formula(gain=clipped(3e-4, 4e-4), aggregation="sequence", has_one_ratio=True),
    "CISPO": Formula(
        gain=lambda ratio, advantage, log_prob: (
            ratio.clamp(max=1.999).detach() * advantage * log_prob
        )
    ),
    "RLOO": Formula(by_group(without_own)),
    "REINFORCE++": Formula(lambda step: over_tokens(to_go(step))),
    "REINFORCE++ with the group's mean": Formula(lambda step: over_tokens(by_group(centred)(step))),
    "dual clip": Formula(gain=clipped(bound=3.0)),
    "PPO": Formula(lambda step: over_tokens(by_critic(step))),
    "k1": Formula(settings={"kl_coefficient": 0.3, "kl_estimator": "k1"}),
    "k2": Formula(settings={"kl_coefficient": 0.3, "kl_estimator": "k2"}),
    "k3 in the reward": Formula(settings={"kl_coefficient": 0.3, "kl_place": "reward"}),
    "the step's mean, not scaled": Formula(
        lambda step: over_tokens(to_go(step), scaled=False),
        settings={"baseline": "step", "scale_rewards": "none"},
    ),
    "importance sampling": Formula(settings={"importance_cap": 1.1}),
    "importance of tokens, masked": Formula(
        settings={"importance_cap": 1.1, "above_importance_cap": "mask"}
    ),
    "importance of sequences": Formula(settings=OF_SEQUENCES),
    "importance of sequences, masked": Formula(
        settings={**OF_SEQUENCES, "above_importance_cap": "mask"}
    ),
    "importance of few": Formula(settings={"importance_cap": 1.1, "importance_veto": 0.7}),
    "veto alone": Formula(settings={"importance_veto": 0.7}),
    "entropy": Formula(settings={"entropy_coefficient": 0.5}),
}
KL = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: log_ratio.exp() - log_ratio - 1,
}


def documented() -> dict[str, dict[str, Any]]:
    """Return algorithm -> settings, of the table of algorithms in docs/rl.md."""
    rows = re.findall(
        r"^\| (.+) \((?:arXiv )?\d+\.\d+\) \| (.*) \|$", DOCS.read_text(), re.MULTILINE
    )
    return {
        name: {
            key: ast.literal_eval(value) for key, value in re.findall(r"`(\w+)=([^`]+)`", settings)
        }
        for name, settings in rows
    }


def importance(config: Any, ratios: torch.Tensor) -> torch.Tensor:
    """Return the weights of the tokens of a completion."""
    if config.importance_veto is not None and min(ratios) < config.importance_veto:
        return 0 * ratios
    if config.importance_cap is None:
        return ratios**0
    if config.importance_of == "sequence":
        ratios = ratios.prod().expand_as(ratios)
    above = 0.0 if config.above_importance_cap == "mask" else config.importance_cap
    return torch.where(ratios > config.importance_cap, above, ratios)


def loss_by_formula(formula: Formula, config: Any, batch: Any, new: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, mask in enumerate(batch["mask"].bool()):
        names = ("old_log_probs", "ref_log_probs", "sampled_log_probs", "advantages")
        old, ref, sampled, advantages = (batch[name][row, mask] for name in names)
        log_ratios = new[row, mask] - old
        if formula.has_one_ratio:
            log_ratios = log_ratios.mean().expand_as(log_ratios)
        gains = formula.gain(log_ratios.exp(), advantages, new[row, mask])
        gains = gains * importance(config, (old - sampled).exp())
        coefficient = config.kl_coefficient if config.kl_place == "loss" else 0.0
        bonus = config.entropy_coefficient * batch["entropy"][row, mask]
        rows.append(coefficient * KL[config.kl_estimator](ref - new[row, mask]) - gains - bonus)
    return {
        "token": torch.cat(rows).mean(),
        "sequence": torch.stack([row.mean() for row in rows]).mean(),
        "constant": torch.stack([row.sum() for row in rows]).mean() / config.max_tokens,
    }[formula.aggregation]


@pytest.mark.parametrize("name", sorted({*documented(), *FORMULAS}))
@given(seed=st.integers(0, 10**6))
def test_algorithms_are_the_formulas_of_their_papers(name: str, seed: int) -> None:
    """Advantages, loss and gradient in float64; completions have gaps, as of replies between two
    turns.
    """
    formula = FORMULAS[name]
    config: Any = (PpoConfig if name == "PPO" else GrpoConfig)(
        **documented().get(name, formula.settings)
    )
    batch, new = random_batch(seed)
    mask = batch["mask"]
    mask[:, 1:] *= batch["old_log_probs"][:, 1:] < -0.3
    # any numbers
    rewards = batch["sampled_log_probs"][:, 0].view(2, 4)
    values = batch["ref_log_probs"]
    loop: Any = SimpleNamespace(config=config, _advantages=None)
    penalties = Loop._kl_penalties(loop, batch)
    if name == "PPO":
        earned = at_last_tokens(rewards.flatten(), mask) - penalties
        estimate = generalized_advantages(earned, values, batch, config.gamma, config.lam)
        batch["advantages"] = whitened(estimate.advantages, mask)
    else:
        batch["advantages"] = Loop._advantages_of(loop, config, rewards, penalties, batch, [])

    coefficient = config.kl_coefficient if config.kl_place == "reward" else 0.0
    kl = coefficient * KL[config.kl_estimator](batch["ref_log_probs"] - batch["sampled_log_probs"])
    of_tokens = [
        [row[drawn].tolist() for row, drawn in zip(rows, mask.bool(), strict=True)]
        for rows in (kl, values)
    ]
    expected = formula.advantages(Step(rewards.flatten().tolist(), *of_tokens))
    flat = torch.tensor([value for row in expected for value in row], dtype=torch.float64)
    torch.testing.assert_close(batch["advantages"][mask == 1], flat)
    assert not batch["advantages"][mask == 0].any()

    new.requires_grad_()
    (part,) = losses.minibatches(batch, 1, torch.Generator(), config.aggregation, config.max_tokens)
    loss, report = config.policy_loss()(part, new[part["tokens"][:, 0]])
    by_paper = loss_by_formula(formula, config, batch, new)
    # Weights of tokens are float32.
    assert loss.item() == pytest.approx(by_paper.item(), rel=1e-6, abs=1e-7)
    gradients = (torch.autograd.grad(value, new)[0] for value in (loss, by_paper))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
    if not formula.has_one_ratio:
        change = (new - batch["old_log_probs"])[mask == 1].exp() - 1
        is_clipped = (change < -config.clip_ratio) | (
            change > (config.clip_ratio_high or config.clip_ratio)
        )
        assert report["clip_fraction"].item() == pytest.approx(
            is_clipped.double().mean().item(), rel=1e-6
        )


def test_truncated_completions_have_no_weight_in_the_loss() -> None:
    batch, _ = random_batch(5)
    is_whole = torch.tensor([1.0, 0.0] * 4)[:, None]
    batch["learned_mask"] = batch["mask"] * is_whole
    (whole,) = losses.minibatches(batch, 1, torch.Generator())
    assert whole["weights"].bool().equal((batch["learned_mask"])[whole["tokens"][:, 0]].bool())
    assert whole["token_weights"].bool().equal(whole["mask"].bool())
    batch["learned_mask"] = torch.zeros_like(batch["mask"])
    (unweighted,) = losses.minibatches(batch, 1, torch.Generator())
    assert not unweighted["weights"].any()


def test_a_ratio_at_the_cap_is_not_above_it() -> None:
    """No random ratio is."""
    weights = losses.importance_weights(torch.zeros(2, 3), torch.ones(2, 3), 1.0, above_cap="mask")
    assert (weights == 1).all()


def test_weights_need_tokens_and_a_length() -> None:
    with pytest.raises(BatchError, match="0 everywhere"):
        losses.loss_weights({"mask": torch.zeros(2, 3)}, "sequence")
    with pytest.raises(ValueError, match="needs a length"):
        losses.loss_weights({"mask": torch.ones(2, 3)}, "constant")


def test_log_probs_are_aligned_with_their_tokens() -> None:
    batch = build_batch([[5, 6, 7, 8], [1, 2, 3, 4, 5]], [[9, 9], [8, 8, 8]], seq_length=8)
    aligned = losses.align_log_probs([[-1.0, -2.0], [-3.0, -4.0, -5.0]], batch)
    assert aligned.tolist() == [[0, 0, 0, -1, -2, 0, 0, 0], [0, 0, 0, 0, -3, -4, -5, 0]]
    with pytest.raises(
        BatchError, check=has_violation("values", "wrong-length", "[3, 2]", "[2, 3]")
    ):
        losses.align_log_probs([[-3.0, -4.0, -5.0], [-1.0, -2.0]], batch)


@pytest.mark.parametrize(("seq_length", "code"), [(8, "several-sequences"), (5, "rows-reordered")])
def test_packed_rows_are_refused_if_rows_must_be_sequences(seq_length: int, code: str) -> None:
    """Rows of one sequence each count as packed if reordered, since longer ones come first."""
    batch = pack([[1, 2], [3, 4, 5, 6]], [[9, 9], [8, 8]], seq_length).batch
    refused = has_violations(("sequence_ids", code))
    with pytest.raises(BatchError, check=refused):
        losses.align_log_probs([[-1.0, -2.0], [-3.0, -4.0]], batch)
    # The order of rows does not affect a mean.
    with pytest.raises(BatchError, check=refused) if seq_length == 8 else nullcontext():
        assert losses.loss_weights(batch, "sequence").sum() == 2
    torch.testing.assert_close(losses.loss_weights(batch, "token"), mean_weights(batch["mask"]))


def test_minibatches_are_a_partition() -> None:
    rows = list(range(12))
    batch = build_batch(
        [[row] for row in rows], [[row] * (1 + row % 3) for row in rows], seq_length=5
    )
    parts = losses.minibatches(batch, 3, torch.Generator().manual_seed(0))
    assert [len(part["tokens"]) for part in parts] == [4, 4, 4]
    shuffled = torch.cat([part["tokens"][:, 0] for part in parts]).tolist()
    assert sorted(shuffled) == rows != shuffled
