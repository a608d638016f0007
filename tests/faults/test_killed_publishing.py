"""A job that publishes to a server, killed at random moments: the same call publishes again.

python -m tests.faults.test_killed_publishing 60 7    # kills, seed; prints a line for each, and what came of them
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.running import Outcome
from tests.faults.test_killed_runs import NEVER, TORCHRUN, Findings, Kill, run_and_kill
from tests.faults.test_servers import Servers, save_served_model

pytestmark = [pytest.mark.faults, pytest.mark.engines]

NUM_STEPS = 6
NUM_KILLS = 4
LOOP = "tests.faults.publish_loop"


class PublishingJob:
    """The job, each start of which begins anew; and the one server that it publishes to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._model = str(save_served_model(directory / "model"))
        self.servers = Servers(self._model, directory)
        self._number = 0

    def run(self, kill: Kill) -> tuple[Outcome, bool]:
        """Start the job, and kill it; whether it was killed."""
        self._number += 1
        command = [*TORCHRUN, "-m", LOOP, self._model, self.servers.now.url, str(self._file), str(NUM_STEPS)]
        return run_and_kill(command, self.directory, LOOP, lambda: len(self.rows()), kill)

    @property
    def _file(self) -> Path:
        return self.directory / f"rows{self._number}"

    def rows(self) -> list[dict[str, Any]]:
        """Of the last start; a row that is being written does not count."""
        text = self._file.read_text() if self._file.is_file() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def kill_publishing(directory: Path, num_kills: int, seed: int, say: Callable[[str], None]) -> Findings:
    """Kill as often, and let the job finish now and then, and in the end."""
    findings, chance = Findings(), random.Random(seed)
    random.seed(seed)
    job = PublishingJob(directory)
    try:
        outcome, _ = job.run(NEVER)
        whole, longest = job.rows(), outcome.total_seconds
        assert (outcome.status, len(whole)) == (0, NUM_STEPS), outcome.terminal
        say(f"a run without kills: {longest:.0f} s")
        is_killed = True
        while is_killed or findings.kills.total() < num_kills:
            is_last = findings.kills.total() >= num_kills
            kill = NEVER if is_last else Kill.at_random(chance, longest, 1, NUM_STEPS, 1)
            outcome, is_killed = job.run(kill)
            findings.whole += not is_killed
            wrong = _faults(job, outcome, whole, is_killed=is_killed)
            ended = findings.add(kill, len(job.rows()), wrong, is_killed=is_killed)
            say(f"{ended}; {len(job.rows())} rows; {wrong or 'well'}")
            if wrong and not is_killed:
                break
    finally:
        job.servers.close()
    return findings


def _faults(job: PublishingJob, outcome: Outcome, whole: list[dict[str, Any]], *, is_killed: bool) -> list[str]:
    """What is not as it should be after one start."""
    found, rows = [], job.rows()
    if not is_killed and outcome.status != 0:
        found.append(f"ended with {outcome.status}: {outcome.terminal[-2000:]}")
    if rows != whole[: len(rows)] or (not is_killed and len(rows) < len(whole)):
        found.append(f"has other rows than a run that was not killed: {rows}")
    if outcome.leftovers:
        found.append(f"left {outcome.leftovers}")
    if not job.servers.is_up():
        found.append("the server is not up")
    return found


def test_every_killed_job_publishes_again(tmp_path: Path, record: Callable[..., None]) -> None:
    findings = kill_publishing(tmp_path, NUM_KILLS, 1, print)
    record(
        fault=f"{findings.kills.total()} kills of a job that publishes",
        message=str(findings),
        resumed=not findings.wrong,
    )
    assert findings.wrong == []
    assert findings.kills.total() == NUM_KILLS


def main(num_kills: str = "60", seed: str = "1") -> None:
    with tempfile.TemporaryDirectory() as directory:
        print(kill_publishing(Path(directory), int(num_kills), int(seed), lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
