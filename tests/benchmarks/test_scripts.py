"""The benchmarks' scripts: their smallest cases, their processing of figures, and their imports."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import critical_path, hardware, reshard
from benchmarks.resharding import bridges
from benchmarks.resharding.cases import (
    CASES,
    DENSE,
    EXPERTS,
    GPU_CASES,
    MODELS,
    TINY_CASE,
    Case,
    chosen,
)
from benchmarks.resharding.figures import Figures
from hybrid_engine.errors import DependencyError
from hybrid_engine.models import table_for
from tests.harness.hosts import two_hosts
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.tools.programs import run_python


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


def test_the_quick_run_covers_both_models_and_numbers_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def figures_of(module: str, directory: Path, *options: str) -> tuple[Any, str]:
    """Run a program, which must succeed; return its figures and output."""
    out = directory / "figures.json"
    run = run_python("-m", module, "--runs", 1, "--json", out, *options, status=0, timeout=550)
    return json.loads(out.read_text()), run.stdout


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
    assert (
        row["max_layout_bytes"]
        < row["peak_bytes"]
        <= row["max_layout_bytes"] + 2 * row["bucket_bytes"]
    )
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


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_every_row_of_publish_is_measured_and_servers_agree(tmp_path: Path) -> None:
    """The program fails if weights differ."""
    options = ("--model", "tiny", "--rounds", "1", "--directory", str(tmp_path))
    figures, output = figures_of("benchmarks.publish", tmp_path, *options)
    rows = figures["rows"]
    assert set(rows) == {"publish", "save", "reload", "disk", "in process"}
    assert all(row["seconds"] > 0 and row["runs"] == 1 for row in rows.values())
    assert (
        rows["in process"]["nbytes"]
        == 2 * rows["publish"]["nbytes"]
        == 2 * rows["disk"]["nbytes"]
        > 0
    )
    assert rows["disk"]["over_publish"] == rows["disk"]["seconds"] / rows["publish"]["seconds"]
    assert "in process" in output
    # Whether the tied head is right after vLLM's reload depends on the CPU: docs/planning.md.
    assert figures["draw_alike"] == ("draws other tokens" not in output)


@pytest.mark.slow
def test_weights_that_differ_between_servers_are_listed() -> None:
    from benchmarks import publish

    same = {"a": "1", "b": "2"}
    publish._require_same(same, dict(same))
    with pytest.raises(SystemExit, match=r"weights differ.*\['b', 'c'\]"):
        publish._require_same(same, {"a": "1", "b": "3", "c": "4"})


@pytest.mark.slow
def test_the_summary_is_the_median_over_all_rounds() -> None:
    from benchmarks import publish

    rows = publish.Rows()
    for seconds in ([9.0, 1.0], [3.0]):
        rows.add({"seconds": {"publish": seconds}, "nbytes": {"publish": 8}, "draw_alike": True})
    expected = {"seconds": 3.0, "fastest": 1.0, "runs": 3, "nbytes": 8, "over_publish": 1.0}
    assert publish.summary(rows, "publish") == expected


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_only_changed_weights_cross_a_link(tmp_path: Path) -> None:
    with two_hosts():  # Skips the test if simulated hosts are impossible.
        pass
    figures, _ = figures_of("benchmarks.two_hosts", tmp_path, "--model", "tiny")
    rows = figures["rows"]
    planned = {name: row["planned"] for name, row in rows.items()}
    assert (
        planned["publish"]
        == planned["kept: all"]
        == planned["kept: one in 1,000"]
        == planned["socket"]
        > 0
    )
    assert planned["delta: all"] == pytest.approx(
        planned["publish"], rel=0.001
    )  # Small deltas may be longer.
    assert planned["publish"] > planned["delta: 30 %"] > planned["delta: 1 %"]
    assert planned["delta: nothing"] == 0
    assert 0 < rows["delta: 1 %"]["density"][0] < 0.1
    assert planned["kept: nothing"] == 0
    assert all(row["link"] > row["planned"] and row["seconds"] > 0 for row in rows.values())


@pytest.mark.slow  # Imports Megatron.
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="the real one is installed"
)
def test_empty_classes_exist_only_during_an_import() -> None:
    with bridges._importable_transformer_engine():
        te = importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.pytorch.module.grouped_linear")

        class Fused(te.ops.Sequential):  # type: ignore[name-defined]
            pass

    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    assert importlib.util.find_spec("transformer_engine") is None
    assert issubclass(Fused, bridges.torch.nn.Module)


@pytest.mark.slow  # Imports Megatron.
def test_a_missing_megatron_bridge_is_reported_with_a_hint() -> None:
    if importlib.util.find_spec("megatron.bridge") is not None:
        pytest.skip("Megatron-Bridge is installed")
    with pytest.raises(
        DependencyError, match=r"cannot be imported \(.*megatron.bridge.*\): pip install 'megatron"
    ):
        bridges._auto_bridge()


MODULES = sorted(
    ".".join(path.relative_to(REPO_ROOT).with_suffix("").parts)
    for path in (REPO_ROOT / "benchmarks").rglob("*.py")
)


@pytest.mark.slow  # Some import both engines.
@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)
