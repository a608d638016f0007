"""GRPO's advantages, and minibatches and losses of GRPO and PPO, as pure functions of tensors.

The advantages and the loss of PPO's critic are in trainer/reference_and_critic/advantages.py.

Shapes: P prompts, n samples of each, B = P * n sequences, S tokens per sequence; b sequences in a
micro batch. All tensors are fp32.

Papers:
    GRPO          arXiv 2402.03300 section 4.1: group-normalized advantages, KL in the loss
    PPO           arXiv 1707.06347 eq. 7: clipped ratio
    DAPO          arXiv 2503.14476: `clip_ratio_high`, the mean over tokens
    Dr. GRPO      arXiv 2503.20783: advantages that are not scaled, a constant length
    RLOO          arXiv 2402.14740: the baseline is the mean of the group's other rewards
    REINFORCE++   arXiv 2501.03262 eq. 8 to 10: KL of a token and of those after it in its
                  advantage; mean and scale of all tokens of a step; or the group's mean
    GSPO          arXiv 2507.18071 eq. 5: one ratio for a sequence
    CISPO         arXiv 2506.13585 eq. 4: a clipped ratio without gradient weights log-probabilities
    dual clip     arXiv 1912.09729 eq. 5: a bound for negative advantages
    k1, k2, k3    http://joschu.net/blog/kl-approx.html: estimators of the KL
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from hybrid_engine.errors import BatchError, shortened
from hybrid_engine.ports import Batch
from hybrid_engine.trainer.batches import mean_weights
from hybrid_engine.trainer.batches.arrangement import require_one_sequence_a_row
from hybrid_engine.trainer.batches.batch_building import NewBatch, mask_of
from hybrid_engine.trainer.batches.loss_results import Loss
from hybrid_engine.trainer.reference_and_critic.advantages import whitened

Aggregation = Literal["token", "sequence", "constant"]
Baseline = Literal["group", "others", "step"]
Scale = Literal["group", "batch", "none"]
Ratio = Literal["token", "sequence"]
Clipping = Literal["ppo", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]
Cap = Literal["truncate", "mask"]
PolicyLoss = Callable[[Batch, torch.Tensor], Loss]
"""(micro batch, log_probs [b, S] with gradient) -> (scalar loss, figures).

It reads the columns that `policy_loss` reads. `weighted_mean(values, micro_batch["weights"])` is
the mean that `aggregation` names, independent of micro batches and ranks.
"""


def token_advantages(
    rewards: torch.Tensor,
    penalties: torch.Tensor,
    mask: torch.Tensor,
    *,
    baseline: Baseline = "group",
    scale: Scale = "group",
) -> torch.Tensor:
    """Return the advantage of each token [B, S]: 0 outside the mask and in rows left out.

    Args:
        rewards: [P, n], n at least 2. NaN where a completion is left out: it counts in no mean and
            no scale.
        penalties: [B, S], subtracted from the reward of each token, such as its KL; 0 outside the
            mask.
        mask: [B, S], 1 for tokens that were drawn.
        baseline: "group", "others": as of `group_advantages`, of the rewards minus the sum of
            their completion's penalties. "step": the mean over all tokens of the reward minus the
            penalties of this token and of those after it.
        scale: "group": the standard deviation (by n, not n - 1) of the rewards over which the
            baseline is a mean: of the group, or with the baseline "step", of all tokens. "batch":
            that of all tokens, whose mean is subtracted, too. "none": 1.
    """
    counted = mask * ~rewards.isnan().reshape(-1, 1)
    if baseline == "step":
        # Penalties 1 2 3 are 6 5 3, summed from each token to the last.
        values = rewards.reshape(-1, 1) - penalties.flip(1).cumsum(dim=1).flip(1)
    else:
        totals = rewards - penalties.sum(dim=1).view_as(rewards)
        advantages = group_advantages(totals, baseline=baseline, scaled=scale == "group")
        values = advantages.reshape(-1, 1).expand_as(mask)
    if baseline == "step" or scale == "batch":
        return whitened(values, counted, scaled=scale != "none")
    return values * counted


def group_advantages(
    rewards: torch.Tensor,
    epsilon: float = 1e-4,
    *,
    baseline: Literal["group", "others"] = "group",
    scaled: bool = True,
) -> torch.Tensor:
    """Return the rewards [P, n] minus a baseline; groups with equal rewards get zeros.

    Args:
        rewards: [P, n], n at least 2. NaN where a completion is left out: its advantage is 0, and
            it counts in no baseline and no scale.
        epsilon: is added to the standard deviation.
        baseline: "group": the mean of the group. "others": the mean of the group's other rewards.
        scaled: divide by the standard deviation of the group's rewards (by n, not n - 1).
    """
    counts = (~rewards.isnan()).sum(dim=1, keepdim=True)
    # 0 where a completion is left out, so that sums below do not count it.
    differences = (rewards - rewards.nanmean(dim=1, keepdim=True)).nan_to_num(0.0)
    # The mean of equal rewards may be rounded to another number.
    differences = differences.where(~are_agreeing(rewards)[:, None], 0.0)
    advantages = differences
    if baseline == "others":
        # Rewards 1 0 0 0: their mean is 1/4, that of the others 0, and 3/4 * 4/3 = 1 - 0.
        advantages = differences * (counts / (counts - 1).clamp(min=1))
    if scaled:
        variances = differences.square().sum(dim=1, keepdim=True) / counts.clamp(min=1)
        advantages = advantages / (variances.sqrt() + epsilon)
    return advantages


def are_agreeing(rewards: torch.Tensor) -> torch.Tensor:
    """Return True [P] for groups of `rewards` [P, n] that are all equal; NaN does not count."""
    # A group of NaN alone agrees: -inf <= inf.
    largest = rewards.nan_to_num(-math.inf).amax(dim=1)
    smallest = rewards.nan_to_num(math.inf).amin(dim=1)
    return largest <= smallest


def align_log_probs(values: Sequence[Sequence[float]], batch: Batch) -> torch.Tensor:
    """Align per-sequence lists, one value per response token, with the ones of `mask` [B, S].

    Returns [B, S], with zeros elsewhere.

    Raises BatchError for rows of several sequences, and if a list is not as long as its row has
    response tokens.
    """
    mask = mask_of(batch)
    require_one_sequence_a_row(batch, "align_log_probs", in_order=True)
    lengths = [len(sequence) for sequence in values]
    counts = mask.bool().sum(dim=1).tolist()
    if counts != lengths:
        raise BatchError.of(
            "values",
            f"lists of {shortened(lengths)} values, but mask has {shortened(counts)} response "
            "tokens per row",
            "Pass a list for each row, with a value for each of its response tokens",
            code="wrong-length",
        )
    # Indexing by a mask goes row by row, so the values are concatenated in the order of the rows.
    flat = [value for sequence in values for value in sequence]
    aligned = torch.zeros_like(mask)
    aligned[mask.bool()] = torch.tensor(flat, dtype=mask.dtype)
    return aligned


def loss_weights(
    batch: Batch,
    aggregation: Aggregation = "token",
    length: int | None = None,
) -> torch.Tensor:
    """Return the weights [B, S] for `weighted_mean`, from the rows of a whole optimizer step.

    An update takes the mean over micro batches and data parallel ranks, which have equal numbers
    of rows, so the loss does not depend on how they split the batch.

    Args:
        batch: `mask` [B, S] is 1 for the tokens that count.
        aggregation: "token": the mean over all tokens. "sequence": the mean over the means of
            sequences. "constant": the mean over the sums of sequences, divided by `length`. The
            last two require one sequence per row.
        length: number of tokens, for "constant".

    Raises BatchError if no token counts, and, except with "token", for rows of several sequences;
    ValueError for "constant" without a length.
    """
    mask = mask_of(batch)
    if aggregation == "token":
        return mean_weights(mask)
    require_one_sequence_a_row(batch, f'aggregation "{aggregation}"')
    if aggregation == "constant":
        if length is None:
            raise ValueError(
                'aggregation "constant" needs a length in tokens, e.g. the max_tokens of the '
                "completions"
            )
        return mask / length
    # Each token counts as 1 / (tokens of its sequence). clamp: a sequence may have none.
    # Their sum is the number of sequences with tokens, by which `mean_weights` divides.
    return mean_weights(mask / mask.sum(dim=1, keepdim=True).clamp(min=1))


def minibatches(
    batch: Batch,
    number: int,
    generator: torch.Generator,
    aggregation: Aggregation = "token",
    length: int | None = None,
) -> list[NewBatch]:
    """Shuffle the B rows and cut them into `number` equal parts, one per optimizer step.

    Each part gets its own `weights`, by `loss_weights`, and `token_weights` for the figures of
    `policy_loss`. With `learned_mask` [B, S] only the tokens where it is 1 have weights.
    """
    order = torch.randperm(batch["tokens"].shape[0], generator=generator)
    parts = []
    for rows in order.chunk(number):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        # Of the part, not of the whole batch: the weights must be a mean for each optimizer step.
        learned = part.pop("learned_mask", part["mask"])
        if learned.any():
            part["weights"] = loss_weights({**part, "mask": learned}, aggregation, length)
        else:
            # Every completion of the part was truncated: its optimizer step has no gradient.
            part["weights"] = torch.zeros_like(learned)
        part["token_weights"] = mean_weights(part["mask"])
        parts.append(part)
    return parts


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the scalar mean over sequences of the sums over tokens of values * weights [b, S]."""
    return (values * weights).sum(dim=1).mean()


def kl_estimate(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    estimator: KlEstimator = "k3",
) -> torch.Tensor:
    """Estimate KL(policy || reference) per token, from tokens that the policy drew.

    k1 and k3 are unbiased, k2 and k3 are never negative. The gradient of k1 is zero in expectation,
    that of k2 is the gradient of the KL.
    """
    # With r = reference / policy: k1 = -log r, k2 = (log r)**2 / 2, k3 = r - 1 - log r.
    difference = ref_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return difference.exp() - difference - 1


def importance_weights(
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    cap: float | None = None,
    *,
    of: Ratio = "token",
    above_cap: Cap = "truncate",
    veto: float | None = None,
) -> torch.Tensor:
    """Return weights [b, S] of tokens that another policy drew, without gradient.

    Args:
        log_ratio: [b, S], log of the probability in the trainer over that in the sampler.
        mask: [b, S], 1 for tokens that were drawn.
        cap: largest ratio; None: all weights are 1, but for the veto.
        of: "token": each token has its ratio. "sequence": the tokens of a row have the product of
            their ratios.
        above_cap: "truncate": a larger ratio counts as `cap`. "mask": it counts as 0.
        veto: all weights of a row are 0 if one of its tokens has a smaller ratio.
    """
    # A ratio of 1 outside of the mask, so that products do not count it.
    log_ratio = log_ratio.detach() * mask
    weights = torch.ones_like(log_ratio)
    if cap is not None:
        ratio = log_ratio if of == "token" else log_ratio.sum(dim=1, keepdim=True)
        ratio = ratio.exp().expand_as(log_ratio)
        weights = ratio.clamp(max=cap)
        if above_cap == "mask":
            weights = torch.where(ratio > cap, 0.0, ratio)
    if veto is not None:
        is_kept = log_ratio.exp().amin(dim=1, keepdim=True) >= veto
        weights = weights * is_kept
    return weights


def cross_entropy(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
    """Compute the mean negative log-probability of demonstrations, for a supervised warm-up.

    Reads `weights` [b, S]. `log_probs` [b, S] are the labels' log-probabilities, with gradient.
    """
    loss = -weighted_mean(log_probs, micro_batch["weights"])
    return loss, {"loss": loss.detach()}


def policy_loss(
    clip_ratio: float,
    kl_coefficient: float,
    *,
    clip_ratio_high: float | None = None,
    importance_cap: float | None = None,
    importance_of: Ratio = "token",
    above_importance_cap: Cap = "truncate",
    importance_veto: float | None = None,
    ratio_of: Ratio = "token",
    clipping: Clipping = "ppo",
    dual_clip: float | None = None,
    kl_estimator: KlEstimator = "k3",
    entropy_coefficient: float = 0.0,
) -> PolicyLoss:
    """Create the policy's loss: clipped policy gradient, plus a KL term, minus an entropy bonus.

    The returned function reads `weights` and `old_log_probs`, [b, S], and `advantages` [b, S], or
    [b], one for all tokens of a row. It reads `ref_log_probs` [b, S] if the batch has them; a KL
    term needs them.

    It reports loss and policy_loss, by `weights`, and by `token_weights` [b, S], if there are any:

        clip_fraction   share of tokens whose ratio was outside the bounds
        kl              KL to the reference, if there is one
        importance      mean importance weight, with `importance_cap` or `importance_veto`

    Args:
        clip_ratio: lower bound; the ratio of new to old probability is clipped to at least
            1 - clip_ratio.
        kl_coefficient: weight of the KL.
        clip_ratio_high: upper bound; the ratio is clipped to at most 1 + clip_ratio_high. Default:
            clip_ratio.
        importance_cap, importance_of, above_importance_cap, importance_veto: multiply each token's
            policy term by its weight of `importance_weights`, from the probability in the trainer
            before the step, divided by the probability in the sampler (`sampled_log_probs` [b, S],
            of `align_log_probs`).
        ratio_of: "token": each token has its ratio. "sequence": all tokens of a row have the
            geometric mean of their ratios, by `mask` [b, S].
        clipping: "ppo": the lesser of the clipped and the plain gain. "cispo": the clipped ratio,
            without gradient, weights the log-probability, so that every token has a gradient.
        dual_clip: with "ppo" and a negative advantage, the loss of a token is at most this many
            times the advantage; above 1.
        kl_estimator: see `kl_estimate`.
        entropy_coefficient: weight of the entropy. If it is not 0, the loss reads `entropy` [b, S],
            with gradient, of `ActorHybridWorker.update(..., entropy=True)`.
    """
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high

    def loss_function(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
        weights = micro_batch["weights"]
        # Figures are means over tokens, independent of the aggregation of the loss.
        token_weights = micro_batch.get("token_weights", weights)
        # [b] becomes [b, 1].
        advantages = micro_batch["advantages"].reshape(len(log_probs), -1)
        old_log_probs = micro_batch["old_log_probs"]
        log_ratio = log_probs - old_log_probs
        if ratio_of == "sequence":
            mask = micro_batch["mask"]
            length = mask.sum(dim=1, keepdim=True).clamp(min=1)
            # The exponential of the mean of logs is the geometric mean.
            log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / length
            log_ratio = log_ratio.expand_as(log_probs)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - clip_ratio, 1 + high)
        if clipping == "cispo":
            gains = clipped.detach() * advantages * log_probs
        else:
            # The pessimistic bound of PPO: clipping never increases the gain.
            # Bounds 0.8 and 1.2: ratio 1.5 with advantage 1 gains 1.2,
            # ratio 0.5 with -1 gains -0.8.
            gains = torch.minimum(ratio * advantages, clipped * advantages)
            if dual_clip is not None:
                # Ratio 10 with advantage -1 and a dual clip of 3 gains -3, not -10.
                bounded = torch.maximum(gains, dual_clip * advantages)
                gains = torch.where(advantages < 0, bounded, gains)
        report = {"clip_fraction": weighted_mean((ratio != clipped).float(), token_weights)}
        if importance_cap is not None or importance_veto is not None:
            importance = importance_weights(
                old_log_probs - micro_batch["sampled_log_probs"],
                micro_batch["mask"],
                importance_cap,
                of=importance_of,
                above_cap=above_importance_cap,
                veto=importance_veto,
            )
            gains = gains * importance
            report["importance"] = weighted_mean(importance, token_weights)
        policy = -weighted_mean(gains, weights)
        loss = policy
        # Without a KL term the figure is still reported if the batch has a reference.
        if kl_coefficient or "ref_log_probs" in micro_batch:
            kl = kl_estimate(log_probs, micro_batch["ref_log_probs"], kl_estimator)
            loss = policy + kl_coefficient * weighted_mean(kl, weights)
            report["kl"] = weighted_mean(kl, token_weights)
        if entropy_coefficient:
            loss = loss - entropy_coefficient * weighted_mean(micro_batch["entropy"], weights)
        report |= {"loss": loss, "policy_loss": policy}
        return loss, {name: value.detach() for name, value in report.items()}

    return loss_function
