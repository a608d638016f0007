"""Trainers that publish to a vLLM server, killed at random moments; the server accepts new ones."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.faults.running import Outcome, Running
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.zoo.tiny_models import save_model
from tests.zoo.tokenizers import save_numbers

pytestmark = [pytest.mark.faults, pytest.mark.engines]

LOOP = "tests.faults.publish_loop"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NUM_STEPS = 6
NUM_KILLS = 4
SECONDS_TO_END = 120


class PublishingJob:
    """The job, which does not resume; each start has a file of rows."""

    def __init__(self, directory: Path, model: str, url: str) -> None:
        self._directory = directory
        self._arguments = [*TORCHRUN, "-m", LOOP, model, url]
        self._number = 0

    def run(self, victims: str = "", after_row: int = 0, seconds: float = 0.0) -> Outcome:
        """Start the job and kill "one" rank or "all" processes, `seconds` after a row; "": none."""
        self._number += 1
        command = [*self._arguments, str(self._file), str(NUM_STEPS)]
        with Running(command, self._directory, {"OMP_NUM_THREADS": "1"}) as running:
            while victims and len(self.rows()) < after_row and running.launcher.poll() is None:
                time.sleep(0.05)
            time.sleep(seconds)
            alive = running.processes() if victims else {}
            ranks = [pid for pid, line in alive.items() if LOOP in line and TORCHRUN[1] not in line]
            for pid in [random.choice(ranks)] if victims == "one" and ranks else list(alive):
                with suppress(ProcessLookupError):  # It ended together with another.
                    os.kill(pid, signal.SIGKILL)
            running.wait(SECONDS_TO_END)
        return running.outcome()

    @property
    def _file(self) -> Path:
        return self._directory / f"rows{self._number}"

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows of the last start."""
        text = self._file.read_text() if self._file.is_file() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_every_killed_job_publishes_again(tmp_path: Path, record: Callable[..., None]) -> None:
    """No start leaves a process or shared memory, and completions equal those of a whole run."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128, "eos_token_id": 9}
    model = save_model(tmp_path / "model", "qwen2", **sizes)
    save_numbers(model)
    chance = random.Random(1)
    with serving(str(model), tmp_path / "server", *FILLED, *PLAIN) as server:
        job = PublishingJob(tmp_path, str(model), server.url)
        outcome = job.run()
        assert outcome.status == 0, outcome.terminal
        whole = job.rows()
        assert len(whole) == NUM_STEPS
        for number in range(NUM_KILLS):
            kill = (("one", "all")[number % 2], chance.randint(0, NUM_STEPS - 1), chance.uniform(0, 1))
            outcome = job.run(*kill)
            record(fault=f"killed {kill[0]}, {kill[2]:.1f} s after row {kill[1]}", **outcome.row())
            assert job.rows() == whole[: len(job.rows())]
            assert outcome.leftovers == []
            assert requests.get(f"{server.url}/health", timeout=5).ok
        outcome = job.run()
        assert outcome.status == 0, outcome.terminal
        assert job.rows() == whole
        assert outcome.leftovers == []
