"""Refusals at the start of the example, and its end by signals: the real command, before any engine
is built.

A single rank runs without torchrun, and without a second rank or a store.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from examples.gpt_rl import settings
from examples.gpt_rl.train import run_files
from hybrid_engine.errors import ConfigError
from tests.harness.launch import REPO_ROOT
from tests.harness.processes import is_running, wait_until
from tests.hybrid_engine.tools.programs import run_python

CONFIG = Path(settings.__file__).parent / "configs" / "tp2_to_dp2.yaml"
RANKS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
LAUNCH_AND_WAIT = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
STOPPED_TWICE = """
import os, signal, sys
from rich.console import Console
from examples.gpt_rl.train import StopRequest
stop = StopRequest(Console())
for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
    assert stop.is_made()
print("once more", flush=True)
os.kill(os.getpid(), signal.SIGINT)
"""


def train(out: Path, *options: str) -> list[str]:
    return ["-m", "examples.gpt_rl.train", "--config", str(CONFIG), "--out", str(out), *options]


def refusal(out: Path, *options: str, environment: Mapping[str, str] = RANKS | AGENT) -> str:
    """Start a run that is refused; return its output."""
    result = run_python(*train(out, *options), status=1, timeout=60, **environment)
    assert result.stderr == ""
    assert all(line.startswith(("rank 0: ", "  - ")) for line in result.stdout.splitlines()), (
        result.stdout
    )
    return result.stdout


def test_a_second_job_is_refused_without_changes(tmp_path: Path) -> None:
    with run_files(tmp_path).lock():
        for options in ((), ("--no-resume",)):
            output = refusal(tmp_path, *options)
            assert (
                f"another job is writing {tmp_path}: process {os.getpid()} on {os.uname().nodename}"
                in output
            )
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_directory_that_is_not_a_run_is_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert "so it is not a run" in refusal(tmp_path, "--no-resume")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert "not a directory" in refusal(tmp_path / "thesis.tex")


def test_all_missing_variables_of_the_launcher_are_listed(tmp_path: Path) -> None:
    output = refusal(tmp_path / "run", environment={})
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in output
    assert not (tmp_path / "run").exists()


def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    """Even if the rank waits inside a library, here for the store of the process group."""
    log = tmp_path / "log-rank0.txt"
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", LAUNCH_AND_WAIT, *train(tmp_path)]
    launcher = subprocess.Popen(
        command, cwd=REPO_ROOT, env={**os.environ, **RANKS, **AGENT}, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(log.exists)
        rank = int(re.match(r"process (\d+) on", lock.read_text())[1])
        assert Path(f"/proc/{rank}").exists()
        launcher.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_running(rank), seconds=30)  # on a busy machine
    finally:
        launcher.kill()
        launcher.communicate()

    def takes_lock() -> bool:
        try:
            run_files(tmp_path).lock().close()
        except ConfigError:
            return False
        return True

    wait_until(takes_lock)  # Threads of a process that has ended may hold its files for a moment.


def test_signals_request_a_stop_and_a_second_ctrl_c_ends_the_process() -> None:
    """SIGTERM prints nothing and may repeat: torchrun sends it when a rank has failed."""
    result = run_python("-c", STOPPED_TWICE, status=-signal.SIGINT)
    first, last = result.stdout.splitlines()
    assert first.startswith("Stopping after this iteration, with a checkpoint")
    assert last == "once more"
