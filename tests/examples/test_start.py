"""What a start of the example refuses, and who ends with whom: the real command, before any engine is built.

One rank, without torchrun, where no second one is needed: what rank 0 refuses is said before torch is imported.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.gpt_rl import settings
from examples.gpt_rl.run_lock import take_lock
from examples.gpt_rl.run_state import Progress, RunDirectory
from examples.gpt_rl.settings import load_settings
from hybrid_engine.errors import ConfigError
from tests.harness.interrupts import INTERRUPTED_IN
from tests.harness.launch import REPO_ROOT
from tests.harness.small_disks import mounted_disk

CONFIG = Path(settings.__file__).parent / "configs" / "tp2_to_dp2.yaml"
HOLD_THE_LOCK = """
import sys, time
from pathlib import Path
from examples.gpt_rl.run_lock import take_lock
lock = take_lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""
LAUNCH_AND_WAIT = """
import subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]])
"""


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    """A Python program as rank 0 of 2; the other rank does not exist, nor does the store where they would meet."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **ranks, **agent, "PYTHONPATH": str(REPO_ROOT)},
        cwd=REPO_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def train(out: Path, *options: str) -> list[str]:
    return ["-m", "examples.gpt_rl.train", "--config", str(CONFIG), "--out", str(out), *options]


def refusal(out: Path, *options: str, **popen: object) -> str:
    """What a start in this directory says on the terminal before it ends."""
    process = start(*train(out, *options), **popen)
    try:
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert all(line.startswith(("rank 0: ", "  - ")) for line in output.splitlines()), output  # no traceback
    return output


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock."""
    process = start("-c", HOLD_THE_LOCK, str(tmp_path / "run" / "lock"))
    try:
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_second_job_leaves_the_first_alone(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "log-rank0.txt").write_text("of the first\n")
    before = {path.name: path.read_text() for path in out.iterdir()}
    for options in ((), ("--no-resume",)):
        output = refusal(out, *options)
        assert f"another job is writing {out}: process {holder.pid} on {os.uname().nodename}, since 20" in output
        assert "use another --out" in output
    assert {path.name: path.read_text() for path in out.iterdir()} == before


def test_a_killed_process_holds_no_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    with pytest.raises(ConfigError, match=f"process {holder.pid} "):
        take_lock(path)
    holder.kill()
    holder.wait()
    with take_lock(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(ConfigError, match=f"process {os.getpid()} "):
            take_lock(path)
    take_lock(path).close()


def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    """Also one that waits inside a library: here for the store where ranks meet."""
    lock = tmp_path / "run" / "lock"
    launcher = start("-c", LAUNCH_AND_WAIT, *train(tmp_path / "run"))
    try:
        wait_until(lambda: lock.exists() and lock.read_text().endswith("\n"))
        rank = int(re.match(r"process (\d+) on", lock.read_text())[1])
        assert Path(f"/proc/{rank}").exists()
        launcher.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_running(rank), seconds=5)
    finally:
        launcher.kill()
        launcher.communicate()
    take_lock(lock).close()


def test_a_damaged_run_is_refused_in_one_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.start_over(load_settings(CONFIG, 2).fingerprint())
    for iteration in (0, 10):
        run.weights(iteration).mkdir(parents=True)
        run.complete_checkpoint(Progress(iteration, {"iteration": iteration}))
    (run.checkpoint(10) / "progress.json").write_text("{}")
    output = refusal(run.path)
    assert len(output.splitlines()) == 1
    assert f"{run.checkpoint(10)}/progress.json is not a checkpoint's progress" in output
    assert f"write iteration-0000 into {run.latest_file}" in output
    run.latest_file.unlink()
    assert "latest is missing, though" in refusal(run.path)
    assert not list(run.path.glob("log-*"))


def no_larger_files() -> None:
    """A full disk for whom may not mount one: from here on every file that grows is an OSError."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path / 'file'}: not a directory" in refusal(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    out = tmp_path / "run"
    output = refusal(out, preexec_fn=no_larger_files)
    assert f"locking {out / 'lock'}: file too large" in output
    assert "ulimit" in output


def test_a_full_disk(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", 1) as disk:
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(2 << 20))
        output = refusal(disk / "run")
    assert len(output.splitlines()) == 1
    assert f"locking {disk / 'run' / 'lock'}: no space left on device (0.0 MB free on {disk})" in output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_another_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "permission denied" in refusal(tmp_path / "run")


def test_all_of_the_launchers_variables_are_asked_for(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, *train(tmp_path / "run")], cwd=REPO_ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 1
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in process.stdout
    assert "examples.gpt_rl.torchrun" in process.stdout
    assert process.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_make_gives_the_iteration_under_way_its_time() -> None:
    command = ["make", "-n", "rl", "PYTHON_ENV=/none", "STOP_SECONDS=1234", "ARGS=rl_config.iterations=5"]
    output = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=True).stdout
    assert "--out runs/gpt_rl rl_config.iterations=5" in output
    assert "--shutdown-timeout 1234 -m examples.gpt_rl.train" in output.replace("\\\n", "").replace("    ", "")


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("module", ["torch", "torch.distributed.elastic.multiprocessing"])
def test_ctrl_c_while_the_launcher_imports_is_one_line(module: str) -> None:
    program = INTERRUPTED_IN + "import examples.gpt_rl.torchrun as launcher; launcher.main()"
    ended = subprocess.run([sys.executable, "-c", program, module], cwd=REPO_ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Interrupted.\n")
