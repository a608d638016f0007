"""GRPO's advantages, and the minibatches and losses of GRPO and PPO, as pure functions of tensors. Advantages and loss
of PPO's critic are in trainer/companions/advantages.py.

Shapes: P prompts, n samples of each, B = P * n sequences, S tokens per sequence; everything fp32.
Papers: GRPO, arXiv 2402.03300 section 4.1 (group-normalised advantages, KL in the loss); PPO, arXiv 1707.06347 eq. 7
(clipped ratio); DAPO, arXiv 2503.14476 (`clip_ratio_high`, the mean over tokens); Dr. GRPO, arXiv 2503.20783
(advantages that are not scaled, a constant length); the KL estimator "k3", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Literal

import torch

from hybrid_engine.errors import BatchError, Violation, shortened
from hybrid_engine.ports import Batch
from hybrid_engine.trainer.batches import mean_weights
from hybrid_engine.trainer.batches.arrangement import require_one_sequence_a_row
from hybrid_engine.trainer.batches.making import mask_of

Aggregation = Literal["token", "sequence", "constant"]
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def group_advantages(rewards: torch.Tensor, epsilon: float = 1e-4, *, scale: bool = True) -> torch.Tensor:
    """Rewards [P, n] minus the mean of their group and, with `scale`, over its standard deviation (with n, not n - 1).

    Groups that agree get zeros.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, correction=0, keepdim=True) + epsilon) if scale else centred


def align_log_probs(values: Sequence[Sequence[float]], batch: Batch) -> torch.Tensor:
    """Put per-sequence lists, one value per response token, where `mask` [B, S] has its ones; zeros elsewhere.

    Raises BatchError for rows of several sequences, and where a list is not as long as its row has response tokens.
    """
    mask = mask_of(batch)
    require_one_sequence_a_row(batch, "align_log_probs", in_order=True)
    lengths = [len(sequence) for sequence in values]
    if (counts := mask.bool().sum(dim=1).tolist()) != lengths:
        problem = f"lists of {shortened(lengths)} values, and mask has {shortened(counts)} response tokens a row"
        raise BatchError([Violation("values", problem, "Pass a list for each row, with a value for each such token")])
    aligned = torch.zeros_like(mask)
    aligned[mask.bool()] = torch.tensor([value for sequence in values for value in sequence], dtype=mask.dtype)
    return aligned


def loss_weights(batch: Batch, aggregation: Aggregation = "token", length: int | None = None) -> torch.Tensor:
    """Weights [B, S] for `weighted_mean`, made of the rows of a whole optimizer step.

    Args:
        batch: `mask` [B, S] is 1 for the tokens that count.
        aggregation: "token": the mean over all tokens. "sequence": the mean over sequences of their means. "constant":
            the mean over sequences of their sums, over `length`. The last two take a row for a sequence.
        length: tokens, for "constant".

    An update takes the mean over micro batches and data parallel ranks, which have equally many rows each: so the loss
    does not depend on how these split the batch. Raises BatchError where no token counts, and, but for "token", for
    rows of several sequences.
    """
    mask = mask_of(batch)
    if aggregation == "token":
        return mean_weights(mask)
    require_one_sequence_a_row(batch, f'aggregation "{aggregation}"')
    if aggregation == "constant":
        if length is None:
            raise ValueError('aggregation "constant" needs a length in tokens, e.g. the max_tokens of the completions')
        return mask / length
    return mean_weights(mask / mask.sum(dim=1, keepdim=True).clamp(min=1))


def minibatches(
    batch: Batch,
    number: int,
    generator: torch.Generator,
    aggregation: Aggregation = "token",
    length: int | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Shuffle the B rows and cut them into `number` equal parts, each for one optimizer step.

    Each has `weights` of its own, by `loss_weights`, and `token_weights` for the figures of `policy_loss`.
    """
    order = torch.randperm(batch["tokens"].shape[0], generator=generator)
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in order.chunk(number)]
    return [
        {
            **part,
            "weights": loss_weights(part, aggregation, length),
            "token_weights": mean_weights(part["mask"]),
        }
        for part in parts
    ]


def mean_of(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the reports of several optimizer steps; they have the same names."""
    return {name: fmean(report[name] for report in reports) for name in reports[0]}


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scalar: values [b, S] summed over tokens with `weights` and averaged over sequences."""
    return (values * weights).sum(dim=1).mean()


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Estimate per token of KL(policy || reference) from tokens the policy drew; never negative."""
    difference = ref_log_probs - log_probs
    return difference.exp() - difference - 1


def cross_entropy(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
    """Mean negative log-probability of demonstrations' tokens, for a supervised warm-up.

    Reads `weights` [b, S]; `log_probs` [b, S] are those of the labels, with gradient.
    """
    loss = -weighted_mean(log_probs, micro_batch["weights"])
    return loss, {"loss": loss.detach()}


def policy_loss(
    clip_ratio: float,
    kl_coefficient: float,
    *,
    clip_ratio_high: float | None = None,
    importance_cap: float | None = None,
) -> Callable[[Batch, torch.Tensor], Loss]:
    """Make the loss of the policy: clipped policy gradient plus `kl_coefficient` times the KL to the reference.

    The function returned reads `weights`, `old_log_probs`, all [b, S], and `advantages` [b], or [b, S] where a critic
    gave each token its own; `ref_log_probs` [b, S] if the batch has them, which a KL term needs.

    Args:
        clip_ratio: a ratio of new to old probability counts from 1 - clip_ratio ...
        kl_coefficient: weight of the KL.
        clip_ratio_high: ... to 1 + clip_ratio_high; default: 1 + clip_ratio.
        importance_cap: multiply each token's policy term by the probability that the trainer gave it before the step,
            over the one that the sampler drew it with (`sampled_log_probs` [b, S], of `align_log_probs`), or by this,
            if that is less. No gradient passes through it.

    It reports loss and policy_loss, by `weights`; and, by `token_weights` [b, S] if there are any, clip_fraction, the
    share of tokens whose ratio was outside these bounds; kl, with a reference; importance, the mean of that weight.
    """
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high

    def loss_function(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
        weights, advantages = micro_batch["weights"], micro_batch["advantages"]
        by_token = micro_batch.get("token_weights", weights)
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        ratio = (log_probs - micro_batch["old_log_probs"]).exp()
        clipped = ratio.clamp(1 - clip_ratio, 1 + high)
        gains = torch.minimum(ratio * advantages, clipped * advantages)
        report = {"clip_fraction": weighted_mean((ratio != clipped).float(), by_token)}
        if importance_cap is not None:
            correction = (
                (micro_batch["old_log_probs"] - micro_batch["sampled_log_probs"]).exp().clamp(max=importance_cap)
            )
            gains = gains * correction.detach()
            report["importance"] = weighted_mean(correction, by_token)
        loss = policy = -weighted_mean(gains, weights)
        if kl_coefficient or "ref_log_probs" in micro_batch:
            kl = kl_estimate(log_probs, micro_batch["ref_log_probs"])
            loss = policy + kl_coefficient * weighted_mean(kl, weights)
            report["kl"] = weighted_mean(kl, by_token)
        report |= {"loss": loss, "policy_loss": policy}
        return loss, {name: value.detach() for name, value in report.items()}

    return loss_function
