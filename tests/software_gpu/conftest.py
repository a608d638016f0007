"""Fixtures of every test on the software GPU: the checker, and a check for leftovers."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from hybrid_engine.ranks.world import store_at
from tests.harness.launch import start_fork_server
from tests.software_gpu.checks import _require_no_reports, reports

__all__ = ["_require_no_reports", "reports"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore these tests unless CUDA is the software GPU's; `make test-gpu` runs them."""
    return None if "SOFTWARE_GPU_LIBRARIES" in os.environ else True


@pytest.fixture(autouse=True)
def _require_no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves device memory or open descriptors in this process."""
    import torch

    from tests.software_gpu.device import virtual_memory

    def held() -> Counter[str]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # torch's allocator may have split its memory differently.
        files = (name for name in open_files() if not name.startswith("/memfd:software_gpu.device"))
        return Counter({**asdict(virtual_memory()), **Counter(files)})

    torch.zeros(1, device="cuda")
    # It stays, like the fork server, and a pipe of the first store.
    resource_tracker.ensure_running()
    if request.node.get_closest_marker("ranks"):
        start_fork_server()
        store_at("127.0.0.1")
    before = held()
    yield
    more = held() - before
    assert not more, dict(more)


def open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The directory's own descriptor.
            yield os.readlink(f"/proc/self/fd/{descriptor}")
