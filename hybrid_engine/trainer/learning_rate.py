"""Learning rate of a trainer, set by its user or by a schedule that advances with every update.

`ParamSchedule` computes the same values as megatron-core's OptimizerParamScheduler, because FSDP2
also trains where megatron-core is not installed. A test compares the two, update by update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Final, Protocol

import torch

from hybrid_engine.config import OptimizerConfig, ScheduleConfig
from hybrid_engine.errors import ArgumentError, LossError, StateError, Violation, shortened

logger = logging.getLogger("hybrid_engine")

LARGEST = 1e30
"""Largest learning rate, also of `optimizer.lr`: float32 weights cannot use larger ones."""


MAX_SKIPPED = 10
"""Steps in a row whose gradients are not finite, after which training ends."""


class Scheduler(Protocol):
    """Schedule of learning rate and weight decay, by updates.

    Either megatron-core's `OptimizerParamScheduler`, or `ParamSchedule`.

    Attributes:
        num_steps: number of updates so far.
    """

    num_steps: int

    def step(self, increment: int) -> None:
        """Advance by `increment` updates, and set the values of every parameter group."""


class ScheduledOptimizer:
    """Optimizer of a trainer, and the schedule of its learning rate if it has one.

    Args:
        optimizer: torch's or Megatron's; None for a model that is not trained.
        schedule: of learning rate and weight decay; None if both are constant.
    """

    def __init__(self, optimizer: Any, schedule: Scheduler | None = None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._num_skipped = 0

    @property
    def inner(self) -> Any:
        """The optimizer. Raises StateError if there is none."""
        if self._optimizer is None:
            raise StateError(
                "this model has no optimizer and cannot be trained; train the actor, or the critic",
                code="no-optimizer",
            )
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update; NaN if this rank trains nothing.

        Groups with their own rate (decoupled_lr: embedding and output head) are ignored.
        """
        for group in self.inner.param_groups:
            if not group.get("is_decoupled_lr"):
                return float(group["lr"])
        return math.nan

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group.

        Raises StateError if a schedule sets it, and ArgumentError for an invalid value.
        """
        groups = self.inner.param_groups
        if self._schedule is not None:
            raise StateError(
                "the learning rate follows optimizer.schedule of the configuration; remove that "
                "key to set the rate by hand",
                code="learning-rate-is-scheduled",
            )
        # `object`, because a caller may pass anything
        value: object = learning_rate
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and 0 <= float(learning_rate) <= LARGEST):
            problem = f"{shortened(value)} is not a valid rate"
            remedy = f"Use a number from 0 to {LARGEST:g}"
            raise ArgumentError([Violation("learning_rate", problem, remedy, code="out-of-range")])
        for group in groups:
            group["lr"] = float(learning_rate)

    def conclude_step(self, successful: bool, max_skipped: int = MAX_SKIPPED) -> None:
        """Set the learning rate and the weight decay of the next update, after an update.

        A skipped step changes neither. Raises LossError after `max_skipped` of them in a row; all
        ranks skip the same steps.
        """
        if not successful:
            self._num_skipped += 1
            if self._num_skipped < max_skipped:
                return
            raise LossError(
                f"the gradients of {self._num_skipped} optimizer steps in a row are not finite, so "
                "these steps were skipped. Load the last checkpoint, and lower the learning rate",
                code="every-step-skipped",
            )
        self._num_skipped = 0
        if self._schedule is not None:
            self._schedule.step(1)

    @property
    def num_scheduled_updates(self) -> int | None:
        """Position of the schedule; None without a schedule."""
        return None if self._schedule is None else self._schedule.num_steps

    def resume_schedule(self, num_updates: int | None) -> None:
        """Set the position of the schedule to `num_updates`, from a checkpoint.

        None: the checkpoint was saved without a schedule.
        """
        if self._schedule is None:
            return
        if num_updates is None:
            logger.warning(
                "the checkpoint was saved without a learning-rate schedule; the schedule of this "
                "configuration starts at its first update"
            )
        self._schedule.num_steps = num_updates or 0
        # sets the values of the current position
        self._schedule.step(0)


_DECAYS: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * math.pow(0.5, progress) - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Style of a decay -> function from its progress (0 to 1) to the remaining factor (1 to 0)."""


class ParamSchedule:
    """Schedule of learning rate and weight decay of an optimizer's groups.

    Args:
        optimizer: only its first group has weight decay, as in `fsdp.actor`.
        config: with a schedule.

    Attributes:
        num_steps: number of updates so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
        assert config.schedule is not None
        self._optimizer = optimizer
        self._config = config
        self._schedule = config.schedule
        self.num_steps = 0
        self.step(0)

    def step(self, increment: int) -> None:
        """Advance by `increment` updates, and set the values of every parameter group."""
        self.num_steps += increment
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._schedule, self._config.lr, self.num_steps)
        self._optimizer.param_groups[0]["weight_decay"] = weight_decay(self._config, self.num_steps)


def learning_rate(schedule: ScheduleConfig, largest: float, num_steps: int) -> float:
    """Return the learning rate of the update after `num_steps` updates."""
    num_warmup_steps = schedule.num_warmup_steps
    num_decay_steps = schedule.lr_decay_steps
    if num_warmup_steps > 0 and num_steps <= num_warmup_steps:
        # linear from lr_warmup_init, as in Megatron
        increase = (largest - schedule.lr_warmup_init) * num_steps / num_warmup_steps
        return schedule.lr_warmup_init + increase
    if num_decay_steps is None or schedule.lr_decay_style == "constant":
        return largest
    if num_steps > num_decay_steps:
        return schedule.min_lr
    if schedule.lr_decay_style == "inverse-square-root":
        rate = largest * max(num_warmup_steps, 1) ** 0.5 / max(num_steps, 1) ** 0.5
        return max(schedule.min_lr, rate)
    if schedule.lr_decay_style == "WSD":
        # warm-up, stable, decay: constant until the last `lr_wsd_decay_steps`
        assert schedule.lr_wsd_decay_steps is not None
        decay_start = num_decay_steps - schedule.lr_wsd_decay_steps
        progress = max(0, num_steps - decay_start) / schedule.lr_wsd_decay_steps
        factor = _DECAYS[schedule.lr_wsd_decay_style](progress)
    else:
        # the decay starts after the warm-up
        progress = (num_steps - num_warmup_steps) / (num_decay_steps - num_warmup_steps)
        factor = _DECAYS[schedule.lr_decay_style](progress)
    return schedule.min_lr + factor * (largest - schedule.min_lr)


def weight_decay(config: OptimizerConfig, num_steps: int) -> float:
    """Return the weight decay of the update after `num_steps` updates."""
    schedule = config.schedule
    assert schedule is not None
    start, end = config.weight_decays
    style = schedule.weight_decay_incr_style
    num_growing_steps = schedule.num_weight_decay_steps
    if style == "constant" or num_growing_steps is None or num_steps > num_growing_steps:
        return end
    growth = 1.0 - _DECAYS[style](num_steps / num_growing_steps)
    return start + growth * (end - start)
