"""Commands that fail leave no temporary directories and no process of transformers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_engine.errors import ReshardError
from hybrid_engine.tools.verify.reference import Reference
from tests.harness.processes import is_running, wait_until
from tests.hybrid_engine.tools.cli.test_plan_command import job
from tests.hybrid_engine.tools.programs import invoke
from tests.zoo.families import write_config
from tests.zoo.published_configs import LLAMA_3_8B

HOLDER = """
import time
from hybrid_engine.files.scratch import scratch_directory, unwinding_on_sigterm
with unwinding_on_sigterm(), scratch_directory("held-") as path:
    (path / "weights").write_text("large")
    print(path, flush=True)
    time.sleep(600)
"""
REFERENCE = """
import os, signal
from hybrid_engine.tools.verify.reference import Reference
reference = Reference()
reference._start()
print(reference._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def start(program: str) -> tuple[subprocess.Popen[str], str]:
    """Start a process; return it with the first line of its output."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_sigterm_removes_the_directory(temporary: Path) -> None:
    process, path = start(HOLDER)
    assert (Path(path) / "weights").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


def test_a_failed_reference_process_is_replaced(temporary: Path) -> None:
    """A failed process would answer late, or never."""
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    with Reference() as reference:
        for _ in range(2):
            reference._start()
            process = reference._process
            with pytest.raises(ReshardError, match=r"no log-probabilities of \S*slow within 0 s"):
                reference.log_probs(temporary / "slow", tokens, timeout=0)
            assert process.returncode == -signal.SIGKILL
            assert reference._connection is None
            reference._start()
            reference._process.kill()
            with pytest.raises(ReshardError, match=r"exited with status -9 on \S*killed"):
                reference.log_probs(temporary / "killed", tokens)
            assert reference._connection is None


def test_the_process_of_transformers_ends_with_its_parent() -> None:
    process, pid = start(REFERENCE)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(int(pid)), 20)


def test_more_processes_than_cores_are_refused(tmp_path: Path) -> None:
    result = invoke("verify", *job(write_config(tmp_path, LLAMA_3_8B), 99999), status=2)
    assert f"on {len(os.sched_getaffinity(0))} cores" in result.output
    assert "--oversubscribe" in result.output
