"""Lines, table and bar of a run, in a file and in a pseudo-terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.examples.launched import Terminal as Screen
from tests.harness.launch import REPO_ROOT

PROGRAM = """
import os
from hybrid_engine.rl.terminal import Column, Terminal

megabytes = Column("MB", "nbytes", ".1f", 4, 1e-6)
terminal = Terminal([Column("step", "step", "", 5), Column("reward", "reward", ".3f", 7), megabytes])
terminal.print("built [bold]")
with terminal:
    for step in (1, 2):
        terminal.begins(f"step {step}: generate", step - 1, 2)
        print("of a reward")
        if not os.fork():
            print("of its child")
            os._exit(0)
        os.wait()
        row = {"step": f"{step}/2", "reward": step / 4}
        terminal.add(row if step == 1 else {**row, "nbytes": 2e6}, "  accuracy 1")
terminal.print("ended")
"""
LINES = """\
built [bold]
step 1: generate ...
of a reward
of its child
 step   reward    MB
  1/2    0.250     -  accuracy 1
of a reward
of its child
  2/2    0.500   2.0  accuracy 1
ended
"""
COMMAND = (sys.executable, "-u", "-c", PROGRAM)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "TERM": "xterm"}


def test_lines_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "output"
    with path.open("w") as file:
        subprocess.run(COMMAND, env=ENVIRONMENT, stdout=file, stderr=file, check=True, timeout=60)
    assert path.read_text() == LINES


def test_the_same_lines_beside_a_bar() -> None:
    """A forked process, which has no bar, prints after it."""
    screen = Screen(columns=100)
    subprocess.run(COMMAND, env=ENVIRONMENT, stdout=screen.theirs, check=True, timeout=60)
    lines = screen.lines()
    assert any("step 2: generate" in line and "\u2501" in line for line in lines)
    shown = [re.sub(r".*\u2501 \d:\d\d:\d\d *", "", line) for line in lines]
    expected = LINES.splitlines()
    expected.remove("step 1: generate ...")
    assert [line for line in shown if line] == expected
