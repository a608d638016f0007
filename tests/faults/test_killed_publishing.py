"""A job that publishes to a server and is killed at random moments can be started again.

python -m tests.faults.test_killed_publishing 60 7    # kills, seed; prints a line per start, and the findings
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.running import Outcome
from tests.faults.test_killed_runs import NEVER, TORCHRUN, Findings, Kill, check_kills, kill_often, run_and_kill
from tests.faults.test_servers import Servers, save_served_model

pytestmark = [pytest.mark.faults, pytest.mark.engines]

NUM_STEPS = 6
LOOP = "tests.faults.publish_loop"


class PublishingJob:
    """The job, which does not resume, and the server that all of its starts publish to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._model = str(save_served_model(directory / "model"))
        self.servers = Servers(self._model, directory)
        self._number = 0

    def run(self, kill: Kill) -> tuple[Outcome, bool]:
        """Start the job and kill it; return the outcome and whether it was still running."""
        self._number += 1
        command = [*TORCHRUN, "-m", LOOP, self._model, self.servers.now.url, str(self._file), str(NUM_STEPS)]
        return run_and_kill(command, self.directory, LOOP, lambda: len(self.rows()), kill)

    @property
    def _file(self) -> Path:
        return self.directory / f"rows{self._number}"

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows of the last start."""
        text = self._file.read_text() if self._file.is_file() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def kill_publishing(directory: Path, num_kills: int, seed: int, log: Callable[[str], None]) -> Findings:
    """Kill the job `num_kills` times; it finishes now and then, and in the end."""
    findings = Findings()
    chance = random.Random(seed)
    random.seed(seed)
    job = PublishingJob(directory)
    try:
        outcome, _ = job.run(NEVER)
        whole = job.rows()
        longest = outcome.total_seconds
        assert (outcome.status, len(whole)) == (0, NUM_STEPS), outcome.terminal
        log(f"a run without kills: {longest:.0f} s")
        is_killed = True
        while is_killed or findings.kills.total() < num_kills:
            is_last = findings.kills.total() >= num_kills
            kill = NEVER if is_last else Kill.at_random(chance, longest, 1, NUM_STEPS, 1)
            outcome, is_killed = job.run(kill)
            findings.whole += not is_killed
            wrong = _faults(job, outcome, whole, is_killed=is_killed)
            ended = findings.add(kill, len(job.rows()), wrong, is_killed=is_killed)
            log(f"{ended}; {len(job.rows())} rows; {wrong or 'well'}")
            if wrong and not is_killed:
                break
    finally:
        job.servers.close()
    return findings


def _faults(job: PublishingJob, outcome: Outcome, whole: list[dict[str, Any]], *, is_killed: bool) -> list[str]:
    """Return descriptions of wrong behaviour after a start."""
    wrong = []
    rows = job.rows()
    if not is_killed and outcome.status != 0:
        wrong.append(f"ended with {outcome.status}: {outcome.terminal[-2000:]}")
    if rows != whole[: len(rows)] or (not is_killed and len(rows) < len(whole)):
        wrong.append(f"has other rows than a run that was not killed: {rows}")
    if outcome.leftovers:
        wrong.append(f"left {outcome.leftovers}")
    if not job.servers.is_up():
        wrong.append("the server is not up")
    return wrong


def test_every_killed_job_publishes_again(tmp_path: Path, record: Callable[..., None]) -> None:
    check_kills(kill_publishing, "a job that publishes", tmp_path, record)


if __name__ == "__main__":
    kill_often(kill_publishing, *sys.argv[1:])
