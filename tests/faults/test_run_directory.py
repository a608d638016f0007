"""Disturbed runs of real engines: a killed torchrun, Ctrl-C, small memory.

Full disks, damage, and a second job in a directory are in tests/hybrid_engine/rl and trainer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.gpt_rl.train import run_files
from tests.faults.job import Fault, Job
from tests.faults.running import can_mount
from tests.harness.processes import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.engines]

SECONDS_TO_START = 200
SECONDS_OF_TORCHRUN = 30
"""Time after Ctrl-C until torchrun kills its ranks by default."""

UPDATE = Fault("stop", "hybrid_engine.rl.loop:Loop._update", call=2)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("directory"))


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
    with job.started(UPDATE, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="300") as running:
        wait_until(lambda: job.fault_time is not None, SECONDS_TO_START)
        running.launcher.send_signal(signal.SIGINT)
        time.sleep(SECONDS_OF_TORCHRUN + 5)
        os.kill(stopped_process(running.processes()), signal.SIGCONT)
        running.wait(SECONDS_TO_START)
    outcome = running.outcome()
    assert run.progress().step == before + 2
    assert f"Stopped after iteration {before + 2}; the same command resumes" in outcome.terminal
    assert outcome.leftovers == []


def stopped_process(processes: dict[int, str]) -> int:
    return next(pid for pid in processes if "State:\tT" in Path(f"/proc/{pid}/status").read_text())


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
