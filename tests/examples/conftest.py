"""Runs that have begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gpt_rl.run_state import RunDirectory
from tests.examples.runs import FINGERPRINT, complete


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.start_over(FINGERPRINT)
    return run


@pytest.fixture
def under_way(directory: RunDirectory) -> RunDirectory:
    """A run with three checkpoints and their rows."""
    for iteration in (0, 10, 20):
        complete(directory, iteration)
        directory.append_row({"iteration": iteration, "reward": 0.5, "accuracy": None})
    return directory
