"""Learning rate and weight decay by update, as megatron-core's OptimizerParamScheduler computes them.

Written anew, since FSDP2 trains where megatron-core is not installed; a test compares the two, update by update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch

from hybrid_engine.config import OptimizerConfig, ScheduleConfig

_FALLS: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (math.cos(math.pi * share) + 1.0),
    "exponential": lambda share: 2.0 * math.pow(0.5, share) - 1.0,
    "minus_sqrt": lambda share: 1.0 - math.sqrt(share),
}
"""Form of a decay -> share of it that is over -> what is left, from 1 to 0."""


class ParamSchedule:
    """Sets learning rate and weight decay of an optimizer's groups.

    Args:
        optimizer: whose first group decays, as `actor._adam` makes it, and no other.
        config: with a schedule.

    Attributes:
        num_steps: updates so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
        assert config.schedule is not None
        self._optimizer, self._config, self._schedule = optimizer, config, config.schedule
        self.num_steps = 0
        self.step(0)

    def step(self, increment: int) -> None:
        """Set the values for the update after `increment` more."""
        self.num_steps += increment
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._schedule, self._config.lr, self.num_steps)
        self._optimizer.param_groups[0]["weight_decay"] = weight_decay(self._config, self.num_steps)


def learning_rate(schedule: ScheduleConfig, largest: float, num_steps: int) -> float:
    """Of the update after `num_steps` others."""
    num_warmup_steps, num_decay_steps = schedule.num_warmup_steps, schedule.lr_decay_steps
    if num_warmup_steps > 0 and num_steps <= num_warmup_steps:
        return schedule.lr_warmup_init + (largest - schedule.lr_warmup_init) * num_steps / num_warmup_steps
    if num_decay_steps is None or schedule.lr_decay_style == "constant":
        return largest
    if num_steps > num_decay_steps:
        return schedule.min_lr
    if schedule.lr_decay_style == "inverse-square-root":
        return max(schedule.min_lr, largest * max(num_warmup_steps, 1) ** 0.5 / max(num_steps, 1) ** 0.5)
    if schedule.lr_decay_style == "WSD":
        assert schedule.lr_wsd_decay_steps is not None
        num_over = max(0, num_steps - (num_decay_steps - schedule.lr_wsd_decay_steps))
        left = _FALLS[schedule.lr_wsd_decay_style](num_over / schedule.lr_wsd_decay_steps)
    else:
        left = _FALLS[schedule.lr_decay_style]((num_steps - num_warmup_steps) / (num_decay_steps - num_warmup_steps))
    return schedule.min_lr + left * (largest - schedule.min_lr)


def weight_decay(config: OptimizerConfig, num_steps: int) -> float:
    """Of the update after `num_steps` others."""
    schedule, (start, end) = config.schedule, config.weight_decays
    assert schedule is not None
    num_growing = schedule.num_weight_decay_steps
    if schedule.weight_decay_incr_style == "constant" or num_growing is None or num_steps > num_growing:
        return end
    grown = 1.0 - _FALLS[schedule.weight_decay_incr_style](num_steps / num_growing)
    return start + grown * (end - start)
