"""What a start of the example refuses, and who ends with whom: the real command, before any engine is built.

One rank, without torchrun: there is no second one, nor the store where they would meet.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gpt_rl import settings
from examples.gpt_rl.train import run_files
from tests.harness.interrupts import INTERRUPTED_IN
from tests.harness.launch import REPO_ROOT
from tests.harness.processes import is_running, wait_until

CONFIG = Path(settings.__file__).parent / "configs" / "tp2_to_dp2.yaml"
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
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


def refusal(out: Path, *options: str, environment: dict[str, str] | None = None) -> str:
    """What a start in this directory says on the terminal before it ends."""
    variables = {**os.environ, **(RANKS | AGENT if environment is None else environment)}
    command = [sys.executable, *train(out, *options)]
    ended = subprocess.run(command, cwd=REPO_ROOT, env=variables, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert all(line.startswith(("rank 0: ", "  - ")) for line in ended.stdout.splitlines()), ended.stdout
    return ended.stdout


def test_the_second_job_leaves_the_first_alone(tmp_path: Path) -> None:
    with run_files(tmp_path).lock():
        for options in ((), ("--no-resume",)):
            output = refusal(tmp_path, *options)
            assert f"another job is writing {tmp_path}: process {os.getpid()} on {os.uname().nodename}" in output
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_what_is_not_a_run_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert "so it is not a run" in refusal(tmp_path, "--no-resume")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert "not a directory" in refusal(tmp_path / "thesis.tex")


def test_all_of_the_launchers_variables_are_asked_for(tmp_path: Path) -> None:
    output = refusal(tmp_path / "run", environment={})
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in output
    assert not (tmp_path / "run").exists()


def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    """Also one that waits inside a library: here for the store where ranks meet."""
    log, lock = tmp_path / "log-rank0.txt", tmp_path / "lock"
    command = [sys.executable, "-c", LAUNCH_AND_WAIT, *train(tmp_path)]
    launcher = subprocess.Popen(command, cwd=REPO_ROOT, env={**os.environ, **RANKS, **AGENT}, stdout=subprocess.DEVNULL)
    try:
        wait_until(log.exists)
        rank = int(re.match(r"process (\d+) on", lock.read_text())[1])
        assert Path(f"/proc/{rank}").exists()
        launcher.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_running(rank), seconds=5)
    finally:
        launcher.kill()
        launcher.communicate()
    run_files(tmp_path).lock().close()


def test_signals_ask_for_a_stop_and_a_second_ctrl_c_ends_the_process() -> None:
    """SIGTERM says nothing and may come again: torchrun sends it when a rank has failed."""
    ended = subprocess.run([sys.executable, "-c", STOPPED_TWICE], cwd=REPO_ROOT, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    first, last = ended.stdout.splitlines()
    assert first.startswith("Stopping after this iteration, with a checkpoint")
    assert last == "once more"


@pytest.mark.parametrize("module", ["torch", "torch.distributed.elastic.multiprocessing"])
def test_ctrl_c_while_the_launcher_imports_leaves_no_traceback(module: str) -> None:
    program = INTERRUPTED_IN + "import examples.gpt_rl.torchrun as launcher; launcher.main()"
    ended = subprocess.run([sys.executable, "-c", program, module], cwd=REPO_ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_make_gives_the_iteration_under_way_its_time() -> None:
    command = ["make", "-n", "rl", "PYTHON_ENV=/none", "STOP_SECONDS=1234", "ARGS=rl_config.iterations=5"]
    output = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=True).stdout
    assert "--out runs/gpt_rl rl_config.iterations=5" in output
    assert "--shutdown-timeout 1234 -m examples.gpt_rl.train" in output.replace("\\\n", "").replace("    ", "")
