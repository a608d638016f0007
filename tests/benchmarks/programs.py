"""Runs of a benchmark's program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.launch import REPO_ROOT


def figures_of(module: str, directory: Path, *options: str) -> tuple[Any, str]:
    """Run a program, which must succeed; return its figures and output."""
    out = directory / "figures.json"
    command = [sys.executable, "-m", module, "--runs", "1", "--json", str(out), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=REPO_ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text()), run.stdout
