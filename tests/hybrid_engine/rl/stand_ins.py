"""Stand-ins for a worker with engines, and for a job of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.trainer.batches.batch_checks import BatchLimits


@contextmanager
def phase(*_: object, **__: object) -> Iterator[None]:
    try:
        yield
    except HybridEngineError as error:
        error.cause_on_rank_0 = ""
        raise


AGREEMENT = mock.Mock(
    phase=phase,
    gather=lambda value, *_: [value],
    any_of=lambda flags, *_: flags,
    rounds=lambda _, steps: [*steps],
)
AGREEMENT.is_broken = bool
ALONE: Any = SimpleNamespace(
    rank=0, world_size=1, agreement=AGREEMENT, timeout_seconds=60.0, close=bool
)


def stand_in(micro_batch_size: int = 1, dp_size: int = 1, **attributes: Any) -> Any:
    """Return a mock worker for a `Loop`: a character is a token, and a row holds 301 tokens."""
    worker = mock.MagicMock(**attributes)
    worker.actor.engine.limits = BatchLimits(1000, micro_batch_size, 0, dp_size)
    worker.config.actor_config.seq_length = 300
    worker.inference.tokenizer.encode = lambda texts: [[5] * len(text) for text in texts]
    return worker
