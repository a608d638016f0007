"""What every test over the software GPU has: the checker, and a count of what is left."""

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
from tests.software_gpu.checks import _nothing_is_reported, reports

__all__ = ["_nothing_is_reported", "reports"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the tests out where CUDA is not the software's: `make test-gpu` runs them."""
    return None if "SOFTWARE_GPU_LIBRARIES" in os.environ else True


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which this process has more of the device, or more open descriptors, than before."""
    import torch

    from tests.software_gpu.device import virtual_memory

    def held() -> Counter[str]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # But for those of torch's allocator, which may have cut its memory otherwise.
        files = (name for name in open_files() if not name.startswith("/memfd:software_gpu.device"))
        return Counter({**asdict(virtual_memory()), **Counter(files)})

    torch.zeros(1, device="cuda")
    resource_tracker.ensure_running()  # it stays, as do what follows and a pipe of the first store
    if request.node.get_closest_marker("ranks"):
        start_fork_server()
        store_at("127.0.0.1")
    before = held()
    yield
    more = held() - before
    assert not more, dict(more)


def open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own
            yield os.readlink(f"/proc/self/fd/{descriptor}")
