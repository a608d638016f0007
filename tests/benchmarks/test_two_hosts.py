"""`benchmarks/two_hosts.py` on its smallest model: only changed weights cross the link."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.hosts import two_hosts
from tests.harness.launch import REPO_ROOT

pytestmark = pytest.mark.slow  # Imports both engines.


@pytest.mark.long
@pytest.mark.engines
def test_every_row_is_measured_and_sends_only_changes(tmp_path: Path) -> None:
    with two_hosts():  # Skips the test if simulated hosts are impossible.
        pass
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.two_hosts", "--model", "tiny", "--runs", "1", "--json", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=REPO_ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(out.read_text())["rows"]
    planned = {name: row["planned"] for name, row in rows.items()}
    assert planned["publish"] == planned["kept: all"] == planned["kept: one in 1,000"] == planned["socket"] > 0
    assert planned["delta: all"] == pytest.approx(planned["publish"], rel=0.001)  # Small deltas may be longer.
    assert planned["publish"] > planned["delta: 30 %"] > planned["delta: 1 %"]
    assert planned["delta: nothing"] == 0
    assert 0 < rows["delta: 1 %"]["density"][0] < 0.1
    assert planned["kept: nothing"] == 0
    assert all(row["link"] > row["planned"] and row["seconds"] > 0 for row in rows.values())
