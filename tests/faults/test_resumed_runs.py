"""The documented loop with checkpoints resumes with the lines of an uninterrupted run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT, Ranks

pytestmark = [pytest.mark.faults, pytest.mark.engines]

CODE = re.search(r"```python\n(.*?)```", (REPO_ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)[1]
SETTINGS = 'RUN, NUM_STEPS, LENGTH = Path("runs/ppo"), 8, 11'


def run(directory: Path, num_steps: int) -> list[str]:
    lines: list[str] = []
    code = CODE.replace(SETTINGS, f"RUN, NUM_STEPS, LENGTH = Path({str(directory)!r}), {num_steps}, 11")
    exec(compile(code, "docs/checkpoints.md", "exec"), {"print": lines.append})
    return lines


def test_the_loop_resumes_from_its_checkpoints(engines: Ranks, tmp_path: Path) -> None:
    once = tmp_path / "once"
    stopped = tmp_path / "stopped"
    calls = {"once": (run, (once, 3)), "stopped": (run, (stopped, 2)), "resumed": (run, (stopped, 3))}
    lines = engines.launch_in_turn(2, calls)
    assert SETTINGS in CODE
    for rank in range(2):
        at_once, first, second = (lines[name][rank] for name in calls)
        assert len(at_once) == 3
        assert at_once == first + second
