"""Disturbed runs: a second job, a killed torchrun, Ctrl-C, a full disk, damage, small memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.gpt_rl.train import run_files
from tests.faults.job import Fault, Job
from tests.faults.running import can_mount
from tests.harness.processes import wait_until
from tests.harness.small_disks import mounted_disk

pytestmark = [pytest.mark.faults, pytest.mark.engines]

SECONDS_TO_START = 200
SECONDS_OF_TORCHRUN = 30
"""Time after Ctrl-C until torchrun kills its ranks by default."""

UPDATE = Fault("stop", "hybrid_engine.rl.loop:Loop._update", call=2)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("directory"))


def test_a_second_job_ends_and_the_first_continues(job: Job) -> None:
    run = run_files(job.out)
    with job.started() as first:
        wait_until(lambda: len(run.metrics.rows()) > 1, SECONDS_TO_START)
        logs = {path: path.read_text() for path in job.out.glob("log-rank*.txt")}
        second = job.run(None, "--no-resume")
        rows = len(run.metrics.rows())
        wait_until(lambda: len(run.metrics.rows()) > rows, SECONDS_TO_START)
        first.launcher.send_signal(signal.SIGINT)
        first.wait(SECONDS_TO_START)
    assert second.status == 1
    assert second.survivors == []
    assert second.terminal.count(f"another job is writing {job.out}: process ") == 1
    assert len(logs) == 2
    assert all(path.read_text().startswith(text) for path, text in logs.items())
    iterations = [row["iteration"] for row in run.metrics.rows()]
    assert iterations == list(range(len(iterations)))
    assert "Stopped after iteration" in first.outcome().terminal


def test_ranks_end_with_a_killed_torchrun(job: Job) -> None:
    run = run_files(job.out)
    before = len(run.metrics.rows())
    with job.started() as running:
        wait_until(lambda: len(run.metrics.rows()) > before, SECONDS_TO_START)
        running.launcher.kill()
        started = time.monotonic()
        running.wait(60)
        seconds = time.monotonic() - started
    outcome = running.outcome()
    again = job.run(None, f"rl_config.iterations={len(run.metrics.rows())}")
    assert seconds < 10
    assert outcome.leftovers == []
    assert again.status == 0, again.terminal


def test_ctrl_c_waits_for_a_long_iteration(job: Job) -> None:
    """A rank is stopped in an iteration for longer than torchrun's default timeout."""
    run = run_files(job.out)
    before = run.progress().step
    with job.started(UPDATE, environment={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}) as running:
        wait_until(lambda: job.fault_time is not None, SECONDS_TO_START)
        running.launcher.send_signal(signal.SIGINT)
        time.sleep(SECONDS_OF_TORCHRUN + 5)
        os.kill(stopped_process(running.processes()), signal.SIGCONT)
        running.wait(SECONDS_TO_START)
    outcome = running.outcome()
    assert run.progress().step == before + 2
    assert f"Stopped after iteration {before + 2}; the same command resumes" in outcome.terminal
    assert outcome.leftovers == []


def test_the_disk_fills_up(checkpoints_disk: Path, tmp_path: Path) -> None:
    """The disk fills up while a checkpoint is written; later there is space again."""
    job = Job(tmp_path, out=checkpoints_disk / "run")
    run = run_files(job.out)
    outcome = job.run()
    assert outcome.status == 1
    assert outcome.leftovers == []
    assert "no space left on device" in outcome.terminal
    assert f"MB free on {checkpoints_disk}" in outcome.terminal
    assert f"{run.checkpoints}/iteration-" in outcome.terminal
    reached = run.progress().step

    subprocess.run(["mount", "-o", "remount,size=200m", str(checkpoints_disk)], check=True)
    again = job.run(None, f"rl_config.iterations={reached + 2}")
    assert again.status == 0, again.terminal
    assert [row["iteration"] for row in run.metrics.rows()] == list(range(reached + 3))


@pytest.fixture
def checkpoints_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk with space for the first checkpoints (10 MB each), but not for all kept ones."""
    with mounted_disk(tmp_path / "disk", 25) as path:
        yield path


def stopped_process(processes: dict[int, str]) -> int:
    return next(pid for pid in processes if "State:\tT" in Path(f"/proc/{pid}/status").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("surroundings"))


@pytest.mark.parametrize("damage", ["latest", "progress.json", "__1_0.distcp"])
def test_a_damaged_directory_is_refused_unchanged(
    trained: Job, tmp_path: Path, damage: str
) -> None:
    """The error names the damaged file."""
    if not trained.rows():
        assert trained.run(None, "rl_config.iterations=1").status == 0
    copy = Job(tmp_path)
    shutil.copytree(trained.out, copy.out)
    (path,) = run_files(copy.out).checkpoint(copy.iteration).rglob(damage)
    if damage == "progress.json":
        path.write_text(path.read_text()[:20])
    else:
        _flip_bytes(path)
    before = _files(copy.out)
    outcome = copy.run(None, "rl_config.iterations=2")
    assert outcome.status not in (0, None), outcome.terminal
    assert damage in outcome.terminal, outcome.terminal
    assert _files(copy.out) == before, "something was changed"


def test_too_small_shared_memory_is_reported_before_vllm_is_built(tmp_path: Path) -> None:
    """If vLLM's kernels for this CPU do not use shared memory, it suffices."""
    if not can_mount():
        pytest.skip("this user may not mount a small /dev/shm")
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    job = Job(tmp_path, generate={"infer_tensor_parallel_size": 2}, prefix=small)
    outcome = job.run(None, "rl_config.iterations=1")
    assert outcome.leftovers == []
    if not _kernels_share_memory():
        assert outcome.status == 0, outcome.terminal
        return
    assert outcome.status not in (0, None)
    for text in ("/dev/shm", "1.0 MiB are free", "8.0 MiB", "--shm-size"):
        assert text in outcome.message, outcome.terminal
    assert outcome.total_seconds < 100


def _kernels_share_memory() -> bool:
    """Return whether vLLM's kernels here exchange tensors through /dev/shm. Uses a new process."""
    program = "import torch, vllm._custom_ops; print(hasattr(torch.ops._C, 'init_shm_manager'))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {"True": True, "False": False}[result.stdout.splitlines()[-1]]


def _flip_bytes(path: Path) -> None:
    """Damage the middle of the file, which holds weights."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
    path.write_bytes(content)


def _files(directory: Path) -> dict[str, bytes]:
    """Return the files of a run without logs and the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith("log-") and path.name != "lock"
    }
