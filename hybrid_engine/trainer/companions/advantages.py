"""What PPO makes of rewards and values, as pure functions of tensors.

Shapes: B sequences of S tokens, fp32. Position t of a row is the step that samples the label at t: its value is what
the critic says after the token at t. `mask` is 1 where the label was sampled by the policy; what lies between two turns
of a sequence is skipped.
Papers: generalized advantage estimation, arXiv 1506.02438 eq. 16; PPO's value loss, arXiv 1707.06347 section 5, clipped
as in its reference code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hybrid_engine.errors import BatchError, Violation, shortened
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.trainer.batches.arrangement import KEYS, begins_of, sequence_faults, sequence_ids_of
from hybrid_engine.trainer.batches.making import mask_of, require_alike

_REMEDIES = {
    "rewards": "Pass [B, S], 0 but for the steps that earn one: a reward for a whole answer at its last step",
    "mask": "Pass [B, S], 1 where the label is a token of a completion",
}


class Advantages(NamedTuple):
    """Both [B, S], 0 outside the mask.

    Attributes:
        advantages: of the steps.
        returns: what the critic is to learn.
    """

    advantages: torch.Tensor
    returns: torch.Tensor


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    batch: Batch,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Advantages:
    """Advantages and returns of every step. Nothing passes from one sequence of a packed row to another.

    Args:
        rewards: [B, S], of each step; a reward for the whole answer belongs to its last one.
        values: [B, S], of the critic. After the last step of a sequence the value is 0.
        batch: of `build_batch` or `pack`. Reads `mask` [B, S], 1 where the label was sampled by the policy, and the
            keys that tell the sequences of a row apart: `attention_mask`, `position_ids`, `sequence_ids`. The mask
            alone cannot: a gap in it may lie between two turns or between two sequences.
        gamma: discount. lam: 0 trusts the critic, 1 the rewards.

    What is outside the mask is not read. Raises BatchError naming every tensor of another shape.
    """
    mask = mask_of(batch)
    keys = {key: batch[key] for key in KEYS if key in batch}
    require_alike(2, _REMEDIES, values=values, rewards=rewards, mask=mask, **keys)
    if faults := list(sequence_faults(batch)):
        raise BatchError(faults)
    sequence_ids = sequence_ids_of(batch)
    begins = None if sequence_ids is None else begins_of(sequence_ids)
    advantages = torch.zeros_like(values)
    advantage, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        is_step, value = mask[:, step].bool(), values[:, step]
        found = rewards[:, step] + gamma * next_value - value + gamma * lam * advantage
        advantage = torch.where(is_step, found, advantage)
        next_value = torch.where(is_step, value, next_value)
        advantages[:, step] = torch.where(is_step, found, 0.0)
        if begins is not None:  # the column before belongs to another sequence
            advantage, next_value = (each.masked_fill(begins[:, step], 0.0) for each in (advantage, next_value))
    return Advantages(advantages, torch.where(mask.bool(), advantages + values, 0.0))


def whitened(values: torch.Tensor, mask: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """Values [B, S] minus their mean over the mask, divided by their standard deviation; 0 outside.

    Raises BatchError for a mask of another shape, or that is 0 everywhere.
    """
    require_alike(None, _REMEDIES, values=values, mask=mask)
    inside = values[mask.bool()]
    if not inside.numel():
        raise BatchError([Violation("mask", "is 0 everywhere", "Give it 1 where a value counts")])
    scaled = (values - inside.mean()) / (inside.std(correction=0) + epsilon)
    return torch.where(mask.bool(), scaled, 0.0)


def value_loss(clip: float | None = 0.2) -> LossFunction:
    """The critic's loss: half the squared error of the values or, if that is larger, of values kept near the old ones.

    The function returned reads `returns`, `old_values` (the critic's before the first step) and `weights`, all [b, S].
    It reports value_loss, and value_clip_fraction: the share of tokens whose value moved by more than `clip`. None does
    not clip. What has weight 0 is not read. Raises BatchError for a clip that is not a number >= 0, as the function
    does for tensors of other shapes.
    """
    if clip is not None and not (isinstance(clip, int | float) and not isinstance(clip, bool) and clip >= 0):
        raise BatchError([Violation("clip", f"is {shortened(clip)}", "Pass a number >= 0, or None")])

    def loss_function(micro_batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, Report]:
        returns, old, weights = micro_batch["returns"], micro_batch["old_values"], micro_batch["weights"]
        require_alike(None, _REMEDIES, values=values, returns=returns, old_values=old, weights=weights)
        # before anything is computed: NaN times 0 is NaN, and so is its gradient
        values, returns, old = (torch.where(weights != 0, each, 0.0) for each in (values, returns, old))
        error = (values - returns).square()
        moved = torch.zeros_like(error)
        if clip is not None:
            near = old + (values - old).clamp(-clip, clip)
            error = torch.maximum(error, (near - returns).square())
            moved = ((values - old).abs() > clip).to(error.dtype)
        loss = 0.5 * (error * weights).sum(dim=1).mean()
        clipped = (moved * weights).sum(dim=1).mean()
        return loss, {"value_loss": loss.detach(), "value_clip_fraction": clipped.detach()}

    return loss_function


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Share of the variance of returns over the mask that the values explain: at most 1, 0 for a constant.

    Raises BatchError naming every tensor of another shape.
    """
    require_alike(None, _REMEDIES, values=values, returns=returns, mask=mask)
    inside = mask.bool()
    variance = returns[inside].var(correction=0)
    if not variance > 0:
        return 0.0
    return float(1 - (returns - values)[inside].var(correction=0) / variance)
