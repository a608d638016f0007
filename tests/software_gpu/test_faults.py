"""If NCCL fails or a rank dies in a switch, the state is right and no rank hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_engine.ranks.world import store_at
from tests.software_gpu.device import Reports
from tests.software_gpu.faults_on_ranks import FAULTS, run_fault

pytestmark = [pytest.mark.engines, pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """Open a store: the first one leaves a pipe of torch, which must not count as a leftover."""
    store_at("127.0.0.1")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_raised_and_all_device_memory_is_free_after_it(
    name: str, tmp_path: Path, reports: Reports
) -> None:
    before = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    right, output = run_fault(tmp_path, name)
    assert right == ([0, 1] if FAULTS[name].error else [1]), output
    assert before == [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    assert "terminate called" not in output, "torch's watchdog ended a rank"
    reports.require_none()
