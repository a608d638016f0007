"""Group relative policy optimization: advantages, minibatches and losses, as pure functions of tensors.

Shapes: P prompts, n samples of each, B = P * n sequences, S tokens per sequence; everything fp32.
Papers: GRPO, arXiv 2402.03300 section 4.1 (group-normalised advantages, KL in the loss); PPO, arXiv 1707.06347 eq. 7
(clipped ratio); the KL estimator "k3", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hybrid_engine.trainer.batches import mean_weights

Batch = Mapping[str, torch.Tensor]
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def group_advantages(rewards: torch.Tensor, epsilon: float = 1e-4) -> torch.Tensor:
    """Rewards [P, n] minus the mean of their group, over its standard deviation. Groups that agree get zeros."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, correction=0, keepdim=True) + epsilon)


def align_log_probs(values: Sequence[Sequence[float]], mask: torch.Tensor) -> torch.Tensor:
    """Put per-sequence lists, one value per response token, where `mask` [B, S] has its ones; zeros elsewhere."""
    aligned = torch.zeros_like(mask)
    aligned[mask.bool()] = torch.tensor([value for sequence in values for value in sequence], dtype=mask.dtype)
    return aligned


def split_minibatches(
    batch: Mapping[str, torch.Tensor], num_minibatches: int, generator: torch.Generator
) -> list[dict[str, torch.Tensor]]:
    """Shuffle the B sequences and cut them into equal parts, each with `weights` of its own."""
    order = torch.randperm(batch["tokens"].shape[0], generator=generator)
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in order.chunk(num_minibatches)]
    return [{**part, "weights": mean_weights(part["mask"])} for part in parts]


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scalar: values [b, S] summed over tokens and averaged over sequences with `weights` of `build_batch`."""
    return (values * weights).sum(dim=1).mean()


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Estimate per token of KL(policy || reference) from tokens the policy drew; never negative."""
    difference = ref_log_probs - log_probs
    return difference.exp() - difference - 1


def cross_entropy(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
    """The warm-up's loss: mean negative log-probability of the demonstrations' tokens.

    Reads `weights` [b, S]; `log_probs` [b, S] are those of the labels, with gradient.
    """
    loss = -weighted_mean(log_probs, micro_batch["weights"])
    return loss, {"loss": loss.detach()}


def policy_loss(clip_ratio: float, kl_coefficient: float) -> Callable[[Batch, torch.Tensor], Loss]:
    """The loss of GRPO: clipped policy gradient plus `kl_coefficient` times the KL to the reference.

    The function returned reads `weights`, `old_log_probs`, `ref_log_probs`, all [b, S], and `advantages` [b], or [b, S]
    where a critic gave each token its own. It reports loss, policy_loss, kl, and clip_fraction: the share of tokens
    whose ratio was outside 1 +- clip_ratio.
    """

    def loss_function(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
        weights, advantages = micro_batch["weights"], micro_batch["advantages"]
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        ratio = (log_probs - micro_batch["old_log_probs"]).exp()
        clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
        policy = -weighted_mean(torch.minimum(ratio * advantages, clipped * advantages), weights)
        kl = weighted_mean(kl_estimate(log_probs, micro_batch["ref_log_probs"]), weights)
        loss = policy + kl_coefficient * kl
        is_outside = (ratio != clipped).float()
        report = {"loss": loss, "policy_loss": policy, "kl": kl, "clip_fraction": weighted_mean(is_outside, weights)}
        return loss, {name: value.detach() for name, value in report.items()}

    return loss_function
