"""Fixtures of several packages' tests. They import torch lazily: `nox -s pure-tests` has none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture
def job() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event until which background copies wait."""
    from hybrid_engine.memory import arena

    event = threading.Event()
    copy = arena._timed_copy

    def waiting(*tensors: torch.Tensor) -> float:
        assert event.wait(60)
        return copy(*tensors)

    monkeypatch.setattr(arena, "_timed_copy", waiting)
    yield event
    event.set()
