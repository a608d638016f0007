"""The documented loop with checkpoints resumes with the lines of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT, Ranks

pytestmark = [pytest.mark.faults, pytest.mark.engines]

PROGRAM = REPO_ROOT / "examples" / "ppo.py"
SETTINGS = 'RUN, NUM_STEPS, LENGTH = Path("runs/ppo"), 8, 11'


def run(directory: Path, num_steps: int) -> list[str]:
    lines: list[str] = []
    code = PROGRAM.read_text().replace(SETTINGS, f"RUN, NUM_STEPS, LENGTH = Path({str(directory)!r}), {num_steps}, 11")
    exec(compile(code, str(PROGRAM), "exec"), {"print": lines.append, "__file__": str(PROGRAM)})
    return lines


def test_the_loop_resumes_from_its_checkpoints(engines: Ranks, tmp_path: Path) -> None:
    once = tmp_path / "once"
    stopped = tmp_path / "stopped"
    calls = {"once": (run, (once, 3)), "stopped": (run, (stopped, 2)), "resumed": (run, (stopped, 3))}
    lines = engines.launch_in_turn(2, calls)
    assert SETTINGS in PROGRAM.read_text()
    for rank in range(2):
        at_once, first, second = (lines[name][rank] for name in calls)
        assert len(at_once) == 3
        assert at_once == first + second
