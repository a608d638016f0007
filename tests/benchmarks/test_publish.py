"""`benchmarks/publish.py` with its smallest model and two vLLM servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launch import REPO_ROOT

pytestmark = pytest.mark.slow  # All import both engines.

ROWS = {"publish", "save", "reload", "disk", "in process"}


def figures_of(module: str, directory: Path, *options: str) -> tuple[Any, str]:
    """Run a program, which must succeed; return its figures and output."""
    out = directory / "figures.json"
    command = [sys.executable, "-m", module, "--runs", "1", "--json", str(out), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=REPO_ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text()), run.stdout


@pytest.mark.long
@pytest.mark.engines
def test_every_row_is_measured_and_both_servers_have_the_same_weights(tmp_path: Path) -> None:
    """The program fails if weights differ."""
    options = ("--model", "tiny", "--rounds", "1", "--directory", str(tmp_path))
    figures, output = figures_of("benchmarks.publish", tmp_path, *options)
    rows = figures["rows"]
    assert set(rows) == ROWS
    assert all(row["seconds"] > 0 and row["runs"] == 1 for row in rows.values())
    assert rows["in process"]["nbytes"] == 2 * rows["publish"]["nbytes"] == 2 * rows["disk"]["nbytes"] > 0
    assert rows["disk"]["over_publish"] == rows["disk"]["seconds"] / rows["publish"]["seconds"]
    assert "in process" in output
    # Whether the tied head is right after vLLM's reload depends on the CPU: docs/planning.md.
    assert figures["draw_alike"] == ("draws other tokens" not in output)


def test_weights_that_differ_between_servers_are_listed() -> None:
    from benchmarks import publish

    same = {"a": "1", "b": "2"}
    publish._require_same(same, dict(same))
    with pytest.raises(SystemExit, match=r"weights differ.*\['b', 'c'\]"):
        publish._require_same(same, {"a": "1", "b": "3", "c": "4"})


def test_the_summary_is_the_median_over_all_rounds() -> None:
    from benchmarks import publish

    rows = publish.Rows()
    for seconds in ([9.0, 1.0], [3.0]):
        rows.add({"seconds": {"publish": seconds}, "nbytes": {"publish": 8}, "draw_alike": True})
    expected = {"seconds": 3.0, "fastest": 1.0, "runs": 3, "nbytes": 8, "over_publish": 1.0}
    assert publish.summary(rows, "publish") == expected
