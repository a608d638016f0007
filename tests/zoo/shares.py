"""A rank's part of a batch, and a loss with infinite gradient, for engines without a worker."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybrid_engine.ports import Batch, LossFunction
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, own_share


class Limited(Protocol):
    """A trainer of language or value models."""

    @property
    def limits(self) -> BatchLimits: ...


def share_of(engine: Limited, batch: Batch) -> Batch:
    """Return this data parallel rank's consecutive part of a global batch. Raises BatchError."""
    return own_share(batch, engine.limits, needs_labels=False)


def spoiled(loss_function: LossFunction) -> LossFunction:
    """Return the same loss with a gradient of NaN on rank 1."""

    def spoil(micro_batch: Batch, values: torch.Tensor) -> Any:
        loss, report = loss_function(micro_batch, values)  # type: ignore[misc]
        # the root of 0 has an infinite derivative
        return loss + (values * 0).sum().sqrt() * (dist.get_rank() == 1), report

    return spoil
