"""The table of versions: each cell stands on a record, and the page on the table; runs leave records."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from compatibility import records
from compatibility.__main__ import PAGE
from compatibility.cells import MEGATRONS, NONE, OTHER, PYTHONS, VLLMS, Status, cell_of, requires_python
from compatibility.page import cell_rows, page
from compatibility.records import RUNS, Record, newest
from hybrid_engine.backends.vllm.version import READ_VERSIONS, TESTED_VERSION
from megatron_patches.patch import CORE_VERSIONS
from tests.harness.launch import REPO_ROOT

KEPT = records.read(records.KEPT)
CELLS = [(python, megatron, vllm) for python in PYTHONS for megatron in MEGATRONS for vllm in VLLMS]
CORE = Record("core-tests", "3.11.7", "2.13.0", CORE_VERSIONS[0], "", 9, 0, 1, "2026-11-22 17:00", "0a80bce0")
ALL = replace(CORE, run="test", megatron=CORE_VERSIONS[-1], vllm=TESTED_VERSION)
SURFACE = replace(CORE, run="vllm-surface", megatron="", vllm=READ_VERSIONS[0], skipped=0)
SHOWN = {Status.PASSED, Status.FAILED, Status.IN_PART, Status.READ}


def status(python: str, megatron: str, vllm: str, *found: Record) -> Status:
    return cell_of(python, megatron, vllm, found).status


def test_the_page_is_that_of_the_records() -> None:
    assert PAGE.read_text() == page(KEPT), "run: make compat"


def test_records_are_sorted_and_none_is_kept_twice() -> None:
    assert newest(KEPT) == KEPT


def test_no_cell_says_more_than_its_record() -> None:
    for python, megatron, vllm in CELLS:
        assert cell_of(python, megatron, vllm, []).status in (Status.NOT_TRIED, Status.REFUSED)
        found = cell_of(python, megatron, vllm, KEPT)
        assert (found.status in SHOWN) == (found.record is not None)
        if found.record is None:
            continue
        assert vllm in (NONE, found.record.vllm)
        if found.status != Status.READ:
            assert megatron in (NONE, found.record.megatron)
            assert found.record.minor_python == python
        assert found.record.succeeded == (found.status != Status.FAILED)
        if found.status == Status.PASSED:
            assert RUNS[found.record.run].extent == records.Extent.WHOLE


def test_what_a_run_shows() -> None:
    old, new = CORE_VERSIONS[0], CORE_VERSIONS[-1]
    assert status("3.11", old, NONE, CORE) == Status.PASSED
    assert status("3.12", old, NONE, CORE) == Status.NOT_TRIED
    assert status("3.11", old, TESTED_VERSION, CORE) == Status.NOT_TRIED
    assert status("3.11", NONE, NONE, CORE) == Status.NOT_TRIED
    for megatron in (new, NONE):
        for vllm in (TESTED_VERSION, NONE):
            assert status("3.11", megatron, vllm, ALL) == Status.PASSED
    assert status("3.11", new, TESTED_VERSION, replace(ALL, run="rl")) == Status.IN_PART
    assert status("3.11", new, NONE, replace(ALL, run="rl")) == Status.NOT_TRIED


def test_one_failure_counts() -> None:
    failed = replace(CORE, failed=1)
    assert status("3.11", CORE_VERSIONS[0], NONE, failed) == Status.FAILED
    of_all = replace(ALL, megatron=CORE_VERSIONS[0])
    assert status("3.11", CORE_VERSIONS[0], NONE, of_all, failed) == Status.FAILED
    assert status("3.11", CORE_VERSIONS[0], NONE, replace(CORE, passed=0)) == Status.FAILED


def test_what_was_read() -> None:
    cell = ("3.11", CORE_VERSIONS[0], READ_VERSIONS[0])
    assert status(*cell, SURFACE) == Status.READ
    assert status(*cell, replace(SURFACE, skipped=1)) == Status.NOT_TRIED
    assert status("3.11", CORE_VERSIONS[0], TESTED_VERSION, replace(SURFACE, vllm=TESTED_VERSION)) == Status.NOT_TRIED


def test_what_is_refused_stays_so_whatever_was_run() -> None:
    foreign = replace(ALL, megatron=OTHER, vllm=OTHER)
    assert status("3.11", OTHER, TESTED_VERSION, foreign) == Status.REFUSED
    assert status("3.11", CORE_VERSIONS[0], OTHER, foreign) == Status.REFUSED
    assert status("3.10", NONE, NONE, ALL) == Status.REFUSED


def test_the_last_of_equal_runs_is_kept() -> None:
    later = replace(CORE, python="3.11.9", failed=2, date="2026-11-23 09:00")
    assert newest([later, CORE, SURFACE]) == [later, SURFACE]


def test_pyproject_says_what_was_tried() -> None:
    """A Python is a classifier once Megatron's tests have passed with it."""
    project = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    tried = [
        python
        for python in PYTHONS
        if any(cell_of(python, megatron, NONE, KEPT).status == Status.PASSED for megatron in CORE_VERSIONS)
    ]
    assert [each for each in project["classifiers"] if each.startswith(prefix)] == [
        f"Programming Language :: Python :: {python}" for python in tried
    ]
    assert str(requires_python()) == f">={min(PYTHONS, key=Version)}"


def test_numbers_in_the_table_are_those_of_the_runs() -> None:
    found = {row[:2]: row[2:] for row in cell_rows([SURFACE, ALL, CORE])}
    assert found["3.11", "none"] == ("passed [2]", "read only [1]", "passed [2]", "not tried (c)", "refused")
    assert found["3.11", CORE_VERSIONS[0]][0] == "passed [3]"
    assert found["3.11", CORE_VERSIONS[-1]][0] == "passed [2] (b)"
    assert found["3.12", "none"][0] == "not tried (c)"
    assert found["3.12", CORE_VERSIONS[0]][0] == "not tried (a)"


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records.add(CORE, path)
    records.add(replace(CORE, date="2026-11-23 09:00"), path)
    assert records.read(path)[0] == CORE
    path.write_text(path.read_text().replace("core-tests", "core-test", 1))
    with pytest.raises(ValueError, match=r"records\.jsonl, line 1: run is one of .*, not 'core-test'"):
        records.read(path)
    assert records.read(tmp_path / "missing") == []


@pytest.mark.slow
def test_a_run_leaves_a_record_if_it_comes_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 0\n"
        "def test_breaks(missing): pass\n"
        "def test_is_skipped(): pytest.skip('so')\n"
        "def test_is_interrupted(request):\n"
        "    if request.config.option.keyword == 'interrupted': raise KeyboardInterrupt\n"
    )
    path = tmp_path / "records.jsonl"
    _pytest(tmp_path, "--record", "pure-tests", "-k", "interrupted")
    assert not path.exists()
    path.mkdir()
    assert "not recorded" in _pytest(tmp_path, "--record", "pure-tests", "-k", "passes")
    path.rmdir()
    _pytest(tmp_path, "--record", "pure-tests")
    (found,) = records.read(path)
    assert (found.run, found.passed, found.failed, found.skipped) == ("pure-tests", 2, 2, 1)
    assert (found.python, found.megatron, found.vllm) == (sys.version.split()[0], "", "")
    path.unlink()
    assert "bringing up nodes" in _pytest(tmp_path, "--record", "pure-tests", "-p", "xdist", "-n", "2")
    (found,) = records.read(path)
    assert (found.passed, found.failed, found.skipped) == (2, 2, 1)


def _pytest(directory: Path, *options: str) -> str:
    plugin = ("-p", "compatibility.recording", "--record-file", "records.jsonl", "-p", "no:cacheprovider")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *options, "test_it.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout
