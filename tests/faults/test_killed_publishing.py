"""A job that publishes to a server and is killed at random moments can be started again.

python -m tests.faults.test_killed_publishing 60 7  # kills, seed; prints starts and findings
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.running import Outcome
from tests.faults.test_killed_runs import (
    TORCHRUN,
    Findings,
    Kill,
    KilledJob,
    check_kills,
    kill_job,
    kill_often,
    run_and_kill,
)
from tests.faults.test_servers import Servers, save_served_model
from tests.harness.values import Values

pytestmark = [pytest.mark.faults, pytest.mark.engines]

LOOP = "tests.faults.publish_loop"


class PublishingJob(KilledJob):
    """The job, which does not resume, and the server that all of its starts publish to."""

    num_steps = 6
    seconds_of_row = 1

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = str(save_served_model(directory / "model"))
        self.servers = Servers(self._model, directory)
        self._number = 0

    def run(self, kill: Kill) -> tuple[Outcome, bool]:
        self._number += 1
        command = [
            *TORCHRUN,
            "-m",
            LOOP,
            self._model,
            self.servers.now.url,
            str(self._file),
            str(self.num_steps),
        ]
        return run_and_kill(command, self._directory, LOOP, lambda: len(self.rows()), kill)

    @property
    def _file(self) -> Path:
        return self._directory / f"rows{self._number}"

    def rows(self) -> list[Values]:
        """Return the complete rows of the last start."""
        text = self._file.read_text() if self._file.is_file() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def faults(self, outcome: Outcome, *, is_killed: bool) -> list[str]:
        return [] if self.servers.is_up() else ["the server is not up"]


def kill_publishing(
    directory: Path, num_kills: int, seed: int, log: Callable[[str], None]
) -> Findings:
    job = PublishingJob(directory)
    try:
        return kill_job(job, num_kills, seed, log)
    finally:
        job.servers.close()


def test_every_killed_job_publishes_again(tmp_path: Path) -> None:
    check_kills(kill_publishing, tmp_path)


if __name__ == "__main__":
    kill_often(kill_publishing, *sys.argv[1:])
