"""Launches that end well, badly and not at all; the ranks here are programs of a few lines, without torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hybrid_engine.launching import Ended, run_ranks

pytestmark = pytest.mark.engines

WELL_OR_BADLY = """
import os, sys
print(f"out of rank {os.environ['RANK']}", "x" * 100_000)
sys.stderr.write(f"err of rank {os.environ['RANK']} {os.environ['OMP_NUM_THREADS']} {os.environ.get('MARK')}\\n")
print(os.getcwd())
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""
NEVER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
place = pathlib.Path(sys.argv[1], os.environ["RANK"])
place.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
place.with_suffix(".new").rename(place)
print("the last words of rank", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("status", [0, 3])
def test_status_and_all_of_the_output_come_back(tmp_path: Path, status: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(WELL_OR_BADLY)
    ended = run_ranks([str(program), str(status)], 2, 100, environment={"MARK": "here"}, directory=tmp_path)
    assert (ended.status == 0) == (status == 0)
    for rank in range(2):
        assert f"out of rank {rank} " in ended.output and f"err of rank {rank} 1 here" in ended.output
    assert ended.output.count("x" * 100_000) == ended.output.count(f"{tmp_path}\n") == 2


def test_nothing_outlives_its_time(tmp_path: Path) -> None:
    """Neither ranks, which torchrun puts into sessions of their own, nor what they started."""
    program = tmp_path / "program.py"
    program.write_text(NEVER)
    ended = _run_until(tmp_path, [str(program), str(tmp_path)])
    assert ended.status is None
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    assert len(set(pids)) == 4
    deadline = time.monotonic() + 10  # init may take a moment to bury them
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_alive, pids))
    assert all(f"the last words of rank {rank}" in ended.output for rank in range(2))


def _run_until(directory: Path, arguments: list[str]) -> Ended:
    """Give the ranks longer where the machine is so busy that they did not start."""
    for timeout in (10, 60):
        ended = run_ranks(arguments, 2, timeout)
        if all((directory / str(rank)).is_file() for rank in range(2)):
            break
    return ended


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
