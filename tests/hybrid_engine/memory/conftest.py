"""Fixture of the tests of device memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest

from tests.hybrid_engine.memory.device_rig import Rig
from tests.hybrid_engine.memory.test_elastic import num_open_fds


@pytest.fixture
def rig() -> Iterator[Rig]:
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist now
    resource_tracker.ensure_running()  # it keeps a descriptor open, so start it before counting
    fds = num_open_fds()
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        yield rig
        rig.assert_empty()
    deadline = time.monotonic() + 5
    while num_open_fds() > fds and time.monotonic() < deadline:
        time.sleep(0.05)  # the descriptor server is closing its last connection
    # Fewer if those of an earlier test's silent peers have ended meanwhile.
    assert num_open_fds() <= fds
