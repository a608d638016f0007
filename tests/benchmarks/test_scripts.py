"""The benchmark's script on its tiniest case: every contender runs, is right, and every key is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.resharding.cases import CASES, DENSE, EXPERTS, MODELS, TINY_CASE, chosen
from hybrid_engine.models import table_for

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "reshard.py"
FIXED_KEYS = (
    *("model", "ranks", "train", "infer", "ours_seconds", "ours_commit_seconds", "mbridge_seconds"),
    *("megatron_resharding_seconds", "gather_broadcast_seconds", "floor_seconds", "bytes_received", "bytes_least"),
    *("peak_bytes", "max_layout_bytes"),
)


def test_every_case_is_possible_and_large_enough(tmp_path: Path) -> None:
    for case in (*CASES, TINY_CASE):
        config = case.config(tmp_path)  # raises for an impossible one
        generate = config.generate_config
        assert case.ranks % (generate.infer_tensor_parallel_size * generate.infer_pipeline_parallel_size) == 0
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(".experts." in name for name in table_for(MODELS[EXPERTS]).shapes) >= 2000


def test_the_quick_run_has_both_models_and_both_numbers_of_ranks() -> None:
    quick = chosen("", quick=True)
    assert {case.model for case in quick} == {DENSE, EXPERTS}
    assert {case.ranks for case in quick} == {2, 4}
    assert [case.ranks for case in quick] == sorted(case.ranks for case in quick)
    assert {case.model for case in chosen(DENSE, quick=False)} == {DENSE}


@pytest.mark.engines
@pytest.mark.slow
def test_the_tiniest_case(tmp_path: Path) -> None:
    out, page, phases = tmp_path / "figures.json", tmp_path / "page.md", tmp_path / "phases.svg"
    command = [sys.executable, str(SCRIPT), "--only", "tiny", "--runs", "1", "--cycles", "3", "--json", str(out)]
    run = subprocess.run(
        [*command, "--markdown", str(page), "--plot", str(phases)], capture_output=True, text=True, timeout=550
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = json.loads(out.read_text())
    assert row["reasons"] == {}
    assert [key for key in FIXED_KEYS if row.get(key) is None] == []
    assert row["bytes_received"] == row["bytes_least"] > 0
    assert row["max_layout_bytes"] < row["peak_bytes"] <= row["max_layout_bytes"] + 2 * row["bucket_bytes"]
    assert row["growth"]["cycles"] == 3
    assert row["growth"]["last"]["memfd_bytes"] == row["growth"]["first"]["memfd_bytes"] > 0
    assert row["growth"]["last"]["fds"] == row["growth"]["first"]["fds"] > 0
    assert "mbridge" in page.read_text()
    assert "tp=2" in page.read_text()
    assert "<svg" in phases.read_text()
