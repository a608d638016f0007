"""The learning rate of a trainer: set by its user, or by a schedule that takes a step with every update.

`ParamSchedule` computes what megatron-core's OptimizerParamScheduler does: FSDP2 trains where megatron-core is not
installed. A test compares the two, update by update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Final, Protocol

import torch

from hybrid_engine.config import OptimizerConfig, ScheduleConfig
from hybrid_engine.errors import ArgumentError, StateError, Violation, shortened

logger = logging.getLogger("hybrid_engine")

LARGEST = 1e30
"""The most that `optimizer.lr` may be, too: float32 weights take no more."""

ParamGroups = Sequence[dict[str, Any]]
"""Of an optimizer."""


class Scheduler(Protocol):
    """Learning rate and weight decay by update: megatron-core's `OptimizerParamScheduler`, or `ParamSchedule`.

    Attributes:
        num_steps: updates so far.
    """

    num_steps: int

    def step(self, increment: int) -> None:
        """Set learning rate and weight decay of every parameter group for the update after `increment` more."""


def learning_rate_of(groups: ParamGroups) -> float:
    """Rate of the next update; embedding and output head may have one of their own (decoupled_lr). NaN where this rank
    trains nothing."""
    return float(next((group["lr"] for group in groups if not group.get("is_decoupled_lr")), float("nan")))


def set_learning_rate(groups: ParamGroups, scheduler: Scheduler | None, learning_rate: float) -> None:
    """Set the learning rate of every group. Raises StateError where a schedule does that, and ArgumentError."""
    if scheduler is not None:
        raise StateError(
            "the learning rate follows optimizer.schedule of the configuration; leave that out to set it by hand"
        )
    given: object = learning_rate
    if isinstance(given, bool) or not (isinstance(given, Real) and 0 <= float(given) <= LARGEST):
        problem = f"{shortened(given)} is not possible"
        raise ArgumentError([Violation("learning_rate", problem, f"Use a number from 0 to {LARGEST:g}")])
    for group in groups:
        group["lr"] = float(learning_rate)


def resume(scheduler: Scheduler | None, num_steps: int | None) -> None:
    """Go on after `num_steps` updates, which a checkpoint has; None: it was saved without a schedule."""
    if scheduler is None:
        return
    if num_steps is None:
        logger.warning("the checkpoint was saved without a learning-rate schedule, which begins with its first update")
    scheduler.num_steps = num_steps or 0
    scheduler.step(0)


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
