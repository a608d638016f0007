"""The benchmarks' scripts: their smallest cases, their processing of figures, and their imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import critical_path, hardware, reshard
from benchmarks.resharding.cases import CASES, DENSE, EXPERTS, GPU_CASES, MODELS, TINY_CASE, Case, chosen
from benchmarks.resharding.figures import Figures
from hybrid_engine.models import table_for
from tests.benchmarks.test_publish import figures_of
from tests.harness.launch import REPO_ROOT


@pytest.mark.parametrize("case", [*CASES, TINY_CASE, *GPU_CASES], ids=lambda case: case.name)
def test_every_case_is_possible(case: Case, tmp_path: Path) -> None:
    # Both raise if the case is impossible.
    assert case.config(tmp_path, {"attention_backend": "TRITON_ATTN"})
    assert table_for(MODELS[case.model])


@pytest.mark.parametrize(("failed", "status"), [({}, 0), ({"megatron_resharding": "it broke"}, 1)])
def test_a_contender_that_fails_is_named_and_fails_the_run(
    failed: dict[str, str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [Figures.of(TINY_CASE, reasons=failed).as_json()]
    monkeypatch.setattr(reshard, "launch", lambda *_: rows)
    monkeypatch.setattr(sys, "argv", ["reshard", "--only", "tiny"])
    assert reshard.main() == status
    assert all(f"256 MB: {key}" in capsys.readouterr().err for key in failed)


def test_the_quick_run_covers_both_models_and_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    quick = chosen("", quick=True)
    assert {case.model for case in quick} == {DENSE, EXPERTS}
    assert {case.ranks for case in quick} == {2, 4}
    assert [case.ranks for case in quick] == sorted(case.ranks for case in quick)
    assert {case.model for case in chosen(DENSE, quick=False)} == {DENSE}


@pytest.mark.slow
def test_the_errors_against_an_h100_are_the_published_ones() -> None:
    rows = critical_path.compared()
    assert [round(row["error"]) for row in rows] == [-53, -24, -22, -9]


def test_every_step_on_hardware_runs_a_program_that_exists(tmp_path: Path) -> None:
    for step in hardware.steps(tmp_path, "qwen3-1.7b", "cuda", []):
        option, module, *_ = step.arguments
        assert option == "-m"
        assert importlib.util.find_spec(module), step


def run_smallest_case(module: str, directory: Path, *options: str) -> dict[str, Any]:
    """Run the smallest case of a benchmark; return its first row of figures."""
    (row, *_), _ = figures_of(module, directory, "--only", "tiny", *options)
    assert row["bytes_received"] == row["bytes_least"] > 0
    return row


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_every_contender_runs_correctly_and_reports_every_key(tmp_path: Path) -> None:
    phases = tmp_path / "phases.svg"
    options = ("--bucket-mb", "1", "256", "--profile", str(tmp_path), "--plot", str(phases))
    memory = ("--plot-memory", f"{tmp_path}/memory.svg", "--cycles", "3")
    row = run_smallest_case("benchmarks.reshard", tmp_path, *options, *memory)
    assert row["reasons"] == {}
    assert not [key for key, value in row.items() if value is None and "bridge" not in key]
    assert len([*tmp_path.glob("tiny-*.json")]) == 10  # Seven contenders, and three with buckets.
    assert row["max_layout_bytes"] < row["peak_bytes"] <= row["max_layout_bytes"] + 2 * row["bucket_bytes"]
    growth = row["growth"]
    assert all(growth["last"][key] == growth["first"][key] > 0 for key in ("memfd_bytes", "fds"))
    assert "<svg" in phases.read_text()


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_with_fsdp2_both_contenders_write_the_same_bits(tmp_path: Path) -> None:
    row = run_smallest_case("benchmarks.fsdp", tmp_path)
    assert row["same_bits"]
    assert row["ours_seconds"] > 0


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
