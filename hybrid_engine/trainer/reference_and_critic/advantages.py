"""Advantages from rewards and values, and the loss of PPO's critic: pure functions of tensors.

Shapes: B sequences of S tokens, fp32. Position t of a row is the step that samples the label at t;
its value is the critic's output for the token at t. `mask` is 1 where the label was sampled by the
policy. Positions outside of it, such as those between two turns of a conversation, are skipped.

Papers: generalized advantage estimation, arXiv 1506.02438 eq. 16; PPO's value loss, arXiv
1707.06347 section 5, clipped as in its reference code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hybrid_engine.errors import BatchError, require_none, shortened
from hybrid_engine.ports import Batch, LossFunction
from hybrid_engine.trainer.batches.arrangement import (
    KEYS,
    begins_of,
    sequence_faults,
    sequence_ids_of,
)
from hybrid_engine.trainer.batches.batch_building import mask_of, require_alike
from hybrid_engine.trainer.batches.loss_results import Loss

_REMEDIES = {
    "rewards": (
        "Pass [B, S], 0 except at steps that earn a reward: for a whole answer its last step"
    ),
    "mask": "Pass [B, S], 1 where the label is a token of a completion",
}


class Advantages(NamedTuple):
    """Advantages and returns, both [B, S], 0 outside the mask.

    Attributes:
        advantages: of the steps.
        returns: targets for the critic.
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
    """Return advantages and returns of every step.

    The sequences of a packed row do not influence each other. Elements outside the mask are not
    read.

    Args:
        rewards: [B, S], of each step; a reward for the whole answer belongs to its last step.
        values: [B, S], of the critic. After the last step of a sequence the value is 0.
        batch: from `build_batch` or `pack`. Must contain `mask` [B, S], 1 where the label was
            sampled by the policy, and the keys that separate the sequences of a row:
            `attention_mask`, `position_ids`, `sequence_ids`. The mask alone is not sufficient: a
            gap in it may lie between two turns or between two sequences.
        gamma: discount.
        lam: 0 relies on the critic alone, 1 on the rewards alone.

    Raises BatchError naming every tensor of another shape.
    """
    mask = mask_of(batch)
    keys = {key: batch[key] for key in KEYS if key in batch}
    require_alike(2, _REMEDIES, values=values, rewards=rewards, mask=mask, **keys)
    require_none(sequence_faults(batch), BatchError)
    sequence_ids = sequence_ids_of(batch)
    begins = None if sequence_ids is None else begins_of(sequence_ids)
    advantages = torch.zeros_like(values)
    # advantage and value of the following step, [B]
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        is_step = mask[:, step].bool()
        value = values[:, step]
        # A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}
        error = rewards[:, step] + gamma * next_value - value
        advantage = error + gamma * lam * next_advantage
        advantages[:, step] = torch.where(is_step, advantage, 0.0)
        # positions outside the mask pass on the following step
        # With a reply in column 2 between steps 1 and 3, step 3 follows step 1.
        next_advantage = torch.where(is_step, advantage, next_advantage)
        next_value = torch.where(is_step, value, next_value)
        if begins is not None:
            # the column before belongs to another sequence, which has no following step
            next_advantage = next_advantage.masked_fill(begins[:, step], 0.0)
            next_value = next_value.masked_fill(begins[:, step], 0.0)
    return Advantages(advantages, torch.where(mask.bool(), advantages + values, 0.0))


def whitened(
    values: torch.Tensor,
    mask: torch.Tensor,
    epsilon: float = 1e-8,
    *,
    scaled: bool = True,
) -> torch.Tensor:
    """Return values [B, S] with mean 0 and standard deviation 1 over the mask; 0 outside.

    Equal values become 0. `scaled`: False keeps the standard deviation.

    Raises BatchError for a mask of another shape, or that is 0 everywhere.
    """
    require_alike(None, _REMEDIES, values=values, mask=mask)
    # In float64 the mean of equal values of float32 is that value, without rounding.
    inside = values[mask.bool()].double()
    if not inside.numel():
        raise BatchError.of(
            "mask", "is 0 everywhere", "Set it to 1 where a value counts", code="mask-is-zero"
        )
    deviation = inside.std(correction=0) + epsilon if scaled else 1.0
    return torch.where(mask.bool(), (values - inside.mean()) / deviation, 0.0)


def value_loss(clip: float | None = 0.2) -> LossFunction:
    """Return the critic's loss function: half the squared error of the values.

    If the error of values that are clipped to the neighbourhood of the old values is larger, that
    counts instead. The function reads `returns`, `old_values` (the critic's before the first step)
    and `weights`, all [b, S]; elements with weight 0 are not read. It reports value_loss, and
    value_clip_fraction, the share of tokens whose value moved by more than `clip`.

    Args:
        clip: largest distance from the old values; None does not clip.

    Raises BatchError unless `clip` is a number >= 0 or None, as the function does for tensors of
    different shapes.
    """
    is_number = isinstance(clip, int | float) and not isinstance(clip, bool)
    if clip is not None and not (is_number and clip >= 0):
        raise BatchError.of(
            "clip", f"is {shortened(clip)}", "Pass a number >= 0, or None", code="out-of-range"
        )

    def loss_function(micro_batch: Batch, values: torch.Tensor) -> Loss:
        returns = micro_batch["returns"]
        old_values = micro_batch["old_values"]
        weights = micro_batch["weights"]
        require_alike(
            None,
            _REMEDIES,
            values=values,
            returns=returns,
            old_values=old_values,
            weights=weights,
        )
        # before anything is computed: NaN times 0 is NaN, and so is its gradient
        values = torch.where(weights != 0, values, 0.0)
        returns = torch.where(weights != 0, returns, 0.0)
        old_values = torch.where(weights != 0, old_values, 0.0)

        error = (values - returns).square()
        is_clipped = torch.zeros_like(error)
        if clip is not None:
            change = values - old_values
            clipped_values = old_values + change.clamp(-clip, clip)
            error = torch.maximum(error, (clipped_values - returns).square())
            is_clipped = (change.abs() > clip).to(error.dtype)
        loss = 0.5 * (error * weights).sum(dim=1).mean()
        clip_fraction = (is_clipped * weights).sum(dim=1).mean()
        return loss, {"value_loss": loss.detach(), "value_clip_fraction": clip_fraction.detach()}

    return loss_function


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the share of the variance of the returns over the mask that the values explain.

    At most 1; 0 if the returns are constant. Raises BatchError naming every tensor of another
    shape.
    """
    require_alike(None, _REMEDIES, values=values, returns=returns, mask=mask)
    inside = mask.bool()
    variance = returns[inside].var(correction=0)
    if not variance > 0:
        return 0.0
    residuals = (returns - values)[inside]
    return float(1 - residuals.var(correction=0) / variance)
