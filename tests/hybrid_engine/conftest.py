"""Fixtures of several packages' tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.memory import arena


@pytest.fixture
def job() -> Iterator[None]:
    """The process group of a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background copies wait until it is set."""
    event, copy = threading.Event(), arena._timed_copy

    def waiting(*tensors: torch.Tensor) -> float:
        assert event.wait(60)
        return copy(*tensors)

    monkeypatch.setattr(arena, "_timed_copy", waiting)
    yield event
    event.set()
