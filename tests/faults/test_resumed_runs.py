"""The documented loop with checkpoints resumes with the lines of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT, on_engines

pytestmark = pytest.mark.faults

PROGRAM = REPO_ROOT / "examples" / "ppo.py"
SETTINGS = 'RUN, NUM_STEPS, LENGTH = Path("runs/ppo"), 8, 11'


def run(directory: Path, num_steps: int) -> list[str]:
    lines = []
    code = PROGRAM.read_text().replace(
        SETTINGS, f"RUN, NUM_STEPS, LENGTH = Path({str(directory)!r}), {num_steps}, 11"
    )
    exec(compile(code, str(PROGRAM), "exec"), {"print": lines.append, "__file__": str(PROGRAM)})
    return lines


@on_engines(2)
def test_the_loop_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    assert SETTINGS in PROGRAM.read_text()
    at_once = run(tmp_path / "once", 3)
    assert len(at_once) == 3
    assert run(tmp_path / "stopped", 2) + run(tmp_path / "stopped", 3) == at_once
