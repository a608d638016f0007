"""Ctrl-C while a command imports what it needs, and while it works: one line and status 130."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.interrupts import INTERRUPTED_IN
from tests.harness.launch import REPO_ROOT

INTERRUPTED = """
sys.argv[1:] = ["verify", "model=none", "--ranks", "1"]
from hybrid_engine.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["hybrid_engine.cli", "pydantic", "hybrid_engine.verification.cases"])
def test_ctrl_c_ends_a_command_with_one_line(module: str) -> None:
    """Where a module is imported: of the command line, of what it imports, and of the command that is running."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN + INTERRUPTED, module],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Interrupted.\n")
