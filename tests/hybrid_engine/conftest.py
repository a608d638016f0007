"""Fixtures of several packages' tests. They import torch lazily: `nox -s pure-tests` has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.harness.late_copies import LateCopies
    from tests.zoo.tiny_models import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    from tests.zoo.tiny_models import Zoo

    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def job() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    from tests.harness.late_copies import LateCopies

    return LateCopies(monkeypatch)
