"""The checks of tests/gpu that can run on the CPU: minutes, for stage 2 builds both engines and a vLLM of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT

pytestmark = [pytest.mark.faults, pytest.mark.engines]


def test_all_pass_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "records"
    options = ["--device", "cpu", "--budget", "540", "--records", str(path), "--confcutdir", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", *options]
    ended = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=570)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _, *records = map(json.loads, path.read_text().splitlines())
    assert {each["reason"] for each in records if each["outcome"] != "passed"} == {"needs a GPU"}
    passed = {each["check"].partition("::")[2] for each in records if each["outcome"] == "passed"}
    assert {"TestEager::test_built_again", "TestEager::test_the_same_completions"} < passed
