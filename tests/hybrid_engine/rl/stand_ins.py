"""A stand-in for a worker with engines."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hybrid_engine.trainer.batches.batch_checks import BatchLimits


def stand_in(micro_batch_size: int = 1, dp_size: int = 1, **attributes: Any) -> Any:
    """Return a mock worker for a `Loop`: a character is a token, and a row holds 301 tokens."""
    worker = mock.MagicMock(**attributes)
    worker.actor.engine.limits = BatchLimits(1000, micro_batch_size, 0, dp_size)
    worker.config.actor_config.seq_length = 300
    worker.inference.tokenizer.encode = lambda texts: [[5] * len(text) for text in texts]
    return worker
