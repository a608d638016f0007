"""The FSDP2 benchmark's script on its tiniest case: both contenders write the same bits, and every figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.engines
@pytest.mark.slow
def test_the_tiniest_case(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.fsdp", "--only", "tiny", "--runs", "1", "--json", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = json.loads(out.read_text())
    assert row["same_bits"]
    assert row["bytes_received"] == row["bytes_least"] > 0
    assert row["ours_seconds"] > 0
    assert row["full_tensor_ratio"] == row["full_tensor_seconds"] / row["ours_seconds"]
    assert row["floor_ratio"] == row["ours_seconds"] / row["floor_seconds"]


@pytest.mark.slow
def test_an_unknown_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.fsdp import main

    monkeypatch.setattr(sys, "argv", ["fsdp", "--only", "nothing"])
    with pytest.raises(SystemExit, match="no case's name contains 'nothing'"):
        main()
