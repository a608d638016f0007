"""A killed `verify` leaves no process and no shared memory, and after SIGTERM no directory."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from hybrid_engine.errors import ReshardError
from hybrid_engine.tools.verify.reference import Reference
from hybrid_engine.tools.verify.verify import SCRATCH_PREFIX
from tests.faults.running import Running
from tests.hybrid_engine.tools.cli.test_plan_command import job
from tests.zoo.families import write_config
from tests.zoo.published_configs import LLAMA_3_8B

pytestmark = [pytest.mark.faults, pytest.mark.engines]

MOST_SECONDS = 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_verify_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """The signal comes while transformers computes in a process that a rank started."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [
        "-m",
        "hybrid_engine",
        "verify",
        *job(write_config(tmp_path, LLAMA_3_8B), 2, tp=2, infer_tp=2),
    ]
    with Running(command, tmp_path, {"TMPDIR": str(temporary)}) as running:
        running.wait_for(
            lambda: any(".verify.reference" in line for line in running.processes().values())
        )
        running.launcher.send_signal(number)
        signalled = time.monotonic()
        running.wait(MOST_SECONDS)
        seconds = time.monotonic() - signalled
    outcome = running.outcome()
    left = list(temporary.glob(f"{SCRATCH_PREFIX}*"))
    assert seconds < MOST_SECONDS
    assert outcome.leftovers == []
    if number is signal.SIGTERM:
        assert outcome.status == 128 + number
        assert left == []
    else:
        assert outcome.status == -number


def test_a_model_unsupported_by_transformers_is_refused(tmp_path: Path) -> None:
    with Reference() as reference, pytest.raises(ReshardError, match="transformers cannot compute"):
        reference.log_probs(tmp_path, torch.zeros(1, 2, dtype=torch.int64))
