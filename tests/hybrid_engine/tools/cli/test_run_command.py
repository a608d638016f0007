"""`hybrid-engine run` of programs that do not import torch, on two ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT
from tests.harness.processes import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PORT = 29731
LOST = "Error: The connection to the C10d store has failed. See inner exception for details.\n"
RUN = (sys.executable, "-m", "hybrid_engine", "run")
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

rank, place = int(os.environ["RANK"]), Path(sys.argv[2])
names = ("WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
(place / f"rank{rank}").write_text(repr([sys.argv[3:], *map(os.environ.get, names)]))

def save(number, frame):
    time.sleep(1)
    (place / f"saved{rank}").touch()
    sys.exit(0)

match sys.argv[1]:
    case "exit":
        sys.exit(3 * rank)
    case "kill" if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    case "kill" | "wait":
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
        (place / f"waits{rank}").write_text(f"{os.getpid():8}")
        time.sleep(100)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(*words: object) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        variables.pop(name, None)
    return subprocess.Popen(
        [*RUN, *map(str, words)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(launcher: subprocess.Popen[str]) -> list[str]:
    """Wait for the end; return stdout, and stderr after the line that every launch begins with."""
    output, errors = launcher.communicate(timeout=100)
    first, _, others = errors.partition("\n")
    assert re.fullmatch(r"starting [12] ranks of /.*/program\.py \.\.\.", first), errors
    return [output, others]


@pytest.mark.parametrize(
    ("what", "status", "line"),
    [
        ("exit", 3, "ended with exit status 3"),
        ("kill", 137, "was killed by SIGKILL, often by the system for lack of memory (dmesg)"),
    ],
)
def test_first_failed_rank(program: Path, what: str, status: int, line: str) -> None:
    launcher = start("--nproc-per-node", 2, program, what, program.parent)
    output = output_of(launcher)
    assert (*output, launcher.returncode) == ("", f"rank 1 {line}\n", status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_ranks_have_time_to_save(program: Path, number: int) -> None:
    launcher = start("--nproc-per-node=2", program, "wait", program.parent)
    wait_until(lambda: len([*program.parent.glob("waits*")]) == 2, seconds=60)
    launcher.send_signal(number)
    output = output_of(launcher)
    assert len([*program.parent.glob("saved*")]) == 2
    line = "Interrupted.\n" if number == signal.SIGINT else ""
    assert (*output, launcher.returncode) == ("", line, 128 + number)


def test_words_after_the_program_are_its_own(program: Path) -> None:
    words = ["--nnodes", "-m", "--help", "--", "-x"]
    launcher = start("--nproc-per-node", 2, program, "", program.parent, *words)
    output = output_of(launcher)
    assert (*output, launcher.returncode) == ("", "", 0)
    written = repr([words, "2", "1", "lo", "600"])
    assert {(program.parent / f"rank{rank}").read_text() for rank in range(2)} == {written}


@pytest.mark.parametrize(
    ("is_lost", "line", "status"),
    [
        (False, "", 0),
        (True, LOST, 2),
    ],
    ids=["both end", "the node with the store is lost"],
)
def test_nodes_by_the_options_of_torchrun(
    program: Path, is_lost: bool, line: str, status: int
) -> None:
    meeting = f"--nnodes 2 --rdzv-backend c10d --rdzv-id job --rdzv-endpoint 127.0.0.1:{PORT}"
    options = (*meeting.split(), "--local-addr=127.0.0.1", "--nproc-per-node=1")
    with_store = start(*options, program, "wait", program.parent)
    with socket.socket() as probe:
        wait_until(lambda: probe.connect_ex(("127.0.0.1", PORT)) == 0, seconds=60)
    other = start(*options, program, "wait", program.parent)
    wait_until(lambda: len([*program.parent.glob("waits*")]) == 2, seconds=60)
    if is_lost:
        with_store.kill()
        with_store.wait()
    for rank in program.parent.glob("waits*"):
        os.kill(int(rank.read_text()), signal.SIGTERM)
    with_store.communicate(timeout=100)
    output = output_of(other)
    assert (*output, other.returncode) == ("", line, status)
    written = repr([[], "2", None, None, "600"])
    assert {(program.parent / f"rank{rank}").read_text() for rank in range(2)} == {written}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--nproc-per-node", 2, "missing.py"], "Error: PROGRAM: missing.py is not a file"),
        (["--nproc-per-node", "two", __file__], "Error: Unsupported nproc_per_node value: two"),
    ],
    ids=["program", "torchrun's"],
)
def test_refusals_are_one_line(words: list[object], error: str) -> None:
    launcher = start(*words)
    output, line = launcher.communicate(timeout=100)
    assert (output, launcher.returncode) == ("", 2)
    assert line.startswith(error)
    assert line.count("\n") == 1
