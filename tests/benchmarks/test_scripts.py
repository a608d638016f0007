"""The benchmarks' scripts: their smallest cases, their processing of figures, and their imports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import critical_path, planning
from benchmarks.resharding.cases import CASES, DENSE, EXPERTS, GPU_CASES, MODELS, TINY_CASE, Case, chosen
from hybrid_engine.models import table_for
from tests.harness.launch import REPO_ROOT

FIXED_KEYS = (
    *("model", "ranks", "train", "infer", "ours_seconds", "ours_commit_seconds", "mbridge_seconds"),
    *("megatron_resharding_seconds", "gather_broadcast_seconds", "floor_seconds", "bytes_received", "bytes_least"),
    *("peak_bytes", "max_layout_bytes"),
)


def test_every_case_is_possible_and_large_enough(tmp_path: Path) -> None:
    for case in (*CASES, TINY_CASE):
        config = case.config(tmp_path)  # Raises if the case is impossible.
        generate = config.generate_config
        assert case.ranks % (generate.infer_tensor_parallel_size * generate.infer_pipeline_parallel_size) == 0
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(".experts." in name for name in table_for(MODELS[EXPERTS]).shapes) >= 2000


def test_the_quick_run_covers_both_models_and_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    quick = chosen("", quick=True)
    assert {case.model for case in quick} == {DENSE, EXPERTS}
    assert {case.ranks for case in quick} == {2, 4}
    assert [case.ranks for case in quick] == sorted(case.ranks for case in quick)
    assert {case.model for case in chosen(DENSE, quick=False)} == {DENSE}


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_cases_of_a_gpu_are_possible(case: Case, tmp_path: Path) -> None:
    assert case.config(tmp_path, {"attention_backend": "TRITON_ATTN"}).generate_config.vllm
    table_for(MODELS[case.model])  # Raises if the model is impossible.


@pytest.mark.slow
def test_the_experts_of_a_large_model_are_copied_by_few_kernels() -> None:
    """Kernels are counted from the plan; each launch takes the host some microseconds."""
    (job,) = (job for job in critical_path.JOBS if job.name == "30B-A3B, 8: EP8 -> TP8")
    figures = critical_path.figures_of(job, critical_path.Rates())
    assert figures["launches"] <= 1000 < 12000 < figures["alone"]
    for name in ("stay", "leave"):
        assert figures[name]["bound"] < figures[name]["seconds"]


@pytest.mark.slow
def test_all_jobs_are_possible_and_the_smallest_of_each_series_is_planned() -> None:
    smallest: dict[str, planning.Point] = {}
    for point in planning.points():
        table_for(point.config)  # Raises if the model is impossible.
        smallest.setdefault(point.series, point)
    for series in ("dense", "tensors"):
        figures = planning.measure(smallest[series])
        assert figures.transfers > 0
        assert min(figures.layouts, figures.summary, figures.order, figures.rank_plan) > 0
    rows = [planning.Figures("made up", size, size, 1, size, 1.0, size**2, size, 1, 1) for size in (2, 4, 1)]
    grown = planning.exponents(rows)
    assert (grown["layouts"], grown["summary"], grown["order"]) == pytest.approx((1, 0, 2))


def run_smallest_case(module: str, directory: Path, *options: str) -> dict[str, Any]:
    """Run the smallest case of a benchmark; return its row of figures."""
    out = directory / "figures.json"
    command = [sys.executable, "-m", module, "--only", "tiny", "--runs", "1", "--json", str(out), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=REPO_ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = json.loads(out.read_text())
    assert row["bytes_received"] == row["bytes_least"] > 0
    return row


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_every_contender_runs_correctly_and_reports_every_key(tmp_path: Path) -> None:
    phases = tmp_path / "phases.svg"
    row = run_smallest_case("benchmarks.reshard", tmp_path, "--cycles", "3", "--plot", str(phases))
    assert row["reasons"] == {}
    assert [key for key in FIXED_KEYS if row.get(key) is None] == []
    assert row["max_layout_bytes"] < row["peak_bytes"] <= row["max_layout_bytes"] + 2 * row["bucket_bytes"]
    assert row["growth"]["cycles"] == 3
    assert row["growth"]["last"]["memfd_bytes"] == row["growth"]["first"]["memfd_bytes"] > 0
    assert row["growth"]["last"]["fds"] == row["growth"]["first"]["fds"] > 0
    assert "<svg" in phases.read_text()


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_with_fsdp2_both_contenders_write_the_same_bits(tmp_path: Path) -> None:
    row = run_smallest_case("benchmarks.fsdp", tmp_path)
    assert row["same_bits"]
    assert row["ours_seconds"] > 0
    assert row["full_tensor_ratio"] == row["full_tensor_seconds"] / row["ours_seconds"]
    assert row["floor_ratio"] == row["ours_seconds"] / row["floor_seconds"]


@pytest.mark.slow
def test_an_unknown_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.fsdp import main

    monkeypatch.setattr(sys, "argv", ["fsdp.py", "--only", "nothing"])
    with pytest.raises(SystemExit, match="no case's name contains 'nothing'"):
        main()


MODULES = sorted(
    ".".join(path.relative_to(REPO_ROOT).with_suffix("").parts) for path in (REPO_ROOT / "benchmarks").rglob("*.py")
)


@pytest.mark.slow  # Some import both engines.
@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)
