"""A rank's part of a batch, for engines without a worker."""

from __future__ import annotations

from typing import Protocol

from hybrid_engine.ports import Batch
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, own_share


class Limited(Protocol):
    """A trainer of language or value models."""

    @property
    def limits(self) -> BatchLimits: ...


def share_of(engine: Limited, batch: Batch) -> Batch:
    """Return this data parallel rank's consecutive part of a global batch. Raises BatchError."""
    return own_share(batch, engine.limits, needs_labels=False)
