"""Fixtures of the tests of the switch, which are several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.hybrid_engine.switch.fakes import Rig


@pytest.fixture
def job() -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def rig(job: None) -> Rig:
    return Rig()
