"""Run of the checks of tests/gpu on the CPU, in minutes: stage 2 builds real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT

pytestmark = [pytest.mark.faults, pytest.mark.engines]


def test_all_checks_pass_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "records"
    options = ["--device", "cpu", "--budget", "540", "--records", str(path), "--confcutdir", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", *options]
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=570)
    assert result.returncode == 0, result.stdout + result.stderr
    _, *records = map(json.loads, path.read_text().splitlines())
    assert {record["reason"] for record in records if record["outcome"] != "passed"} == {"needs a GPU"}
    passed = {record["check"].partition("::")[2] for record in records if record["outcome"] == "passed"}
    assert {"TestEager::test_built_again", "TestEager::test_the_same_completions"} < passed
