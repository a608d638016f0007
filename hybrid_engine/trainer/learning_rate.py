"""Learning rate of a trainer, set by its user or by a schedule that advances with every update.

Schedules are megatron-core's, for FSDP2 too. The package is imported only if a configuration has a
schedule, because without one FSDP2 does not need it.
"""

from __future__ import annotations

import logging
import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from hybrid_engine.config import OptimizerConfig
from hybrid_engine.errors import (
    ArgumentError,
    LossError,
    StateError,
    needing_package,
    shortened,
)

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

logger = logging.getLogger("hybrid_engine")

LARGEST = 1e30
"""Largest learning rate, also of `optimizer.lr`: float32 weights cannot use larger ones."""


MAX_SKIPPED = 10
"""Steps in a row whose gradients are not finite, after which training ends."""


class ScheduledOptimizer:
    """Optimizer of a trainer, and the schedule of its learning rate if it has one.

    Args:
        optimizer: torch's or Megatron's; None for a model that is not trained.
        schedule: of learning rate and weight decay; None if both are constant.
    """

    def __init__(self, optimizer: Any, schedule: OptimizerParamScheduler | None = None) -> None:
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
            raise ArgumentError.of(
                "learning_rate",
                f"{shortened(value)} is not a valid rate",
                f"Use a number from 0 to {LARGEST:g}",
                code="out-of-range",
            )
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


def param_scheduler(optimizer: Any, config: OptimizerConfig) -> OptimizerParamScheduler | None:
    """Return megatron-core's schedule of learning rate and weight decay; None without a schedule.

    One step of the scheduler is one update of the weights. A group's `wd_mult` scales its weight
    decay. Raises DependencyError, see `scheduler_class`.

    Args:
        optimizer: torch's or Megatron's.
        config: of the optimizer.
    """
    schedule = config.schedule
    if schedule is None:
        return None
    num_warmup_steps = schedule.num_warmup_steps
    start_wd, end_wd = config.weight_decays
    return scheduler_class()(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=num_warmup_steps,
        # megatron-core requires more steps than those of the warm-up,
        # even if the rate stays constant.
        lr_decay_steps=schedule.lr_decay_steps or num_warmup_steps + 1,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=schedule.num_weight_decay_steps or 1,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.lr_wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )


def scheduler_class() -> type[OptimizerParamScheduler]:
    """Import the class of schedules. Raises DependencyError if megatron-core is not installed."""
    with needing_package(
        "actor_config.optimizer.schedule needs megatron-core, with FSDP2 too: "
        "pip install '.[train]' in a checkout"
    ):
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    return OptimizerParamScheduler
