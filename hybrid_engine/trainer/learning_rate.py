"""The learning rate of a trainer: set by its user, or by a schedule that takes a step with every update."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol

from hybrid_engine.errors import ArgumentError, StateError, Violation, shortened

logger = logging.getLogger("hybrid_engine")

LARGEST = 1e30
"""The most that `optimizer.lr` may be, too: float32 weights take no more."""

ParamGroups = Sequence[dict[str, Any]]
"""Of an optimizer."""


class Scheduler(Protocol):
    """Learning rate and weight decay by update: megatron-core's `OptimizerParamScheduler`, or
    trainer/fsdp/param_schedule.py.

    Attributes:
        num_steps: updates so far.
    """

    num_steps: int

    def step(self, increment: int) -> None:
        """Set learning rate and weight decay of every parameter group for the update after `increment` more."""
        ...


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
