"""`benchmarks/two_hosts.py` on its smallest model: only changed weights cross the link."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.test_publish import figures_of
from tests.harness.hosts import two_hosts

pytestmark = pytest.mark.slow  # Imports both engines.


@pytest.mark.long
@pytest.mark.engines
def test_every_row_is_measured_and_sends_only_changes(tmp_path: Path) -> None:
    with two_hosts():  # Skips the test if simulated hosts are impossible.
        pass
    figures, _ = figures_of("benchmarks.two_hosts", tmp_path, "--model", "tiny")
    rows = figures["rows"]
    planned = {name: row["planned"] for name, row in rows.items()}
    assert planned["publish"] == planned["kept: all"] == planned["kept: one in 1,000"] == planned["socket"] > 0
    assert planned["delta: all"] == pytest.approx(planned["publish"], rel=0.001)  # Small deltas may be longer.
    assert planned["publish"] > planned["delta: 30 %"] > planned["delta: 1 %"]
    assert planned["delta: nothing"] == 0
    assert 0 < rows["delta: 1 %"]["density"][0] < 0.1
    assert planned["kept: nothing"] == 0
    assert all(row["link"] > row["planned"] and row["seconds"] > 0 for row in rows.values())
