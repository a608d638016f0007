"""The job of examples/one_call.py, killed repeatedly at random moments, resumes and ends with the
rows of an undisturbed run.

python -m tests.faults.test_killed_runs 60 7  # kills, seed; prints starts and findings
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.rl.run_files import RunFiles
from tests.faults.running import Outcome, Running
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values

pytestmark = [pytest.mark.faults, pytest.mark.engines]

CODE = (REPO_ROOT / "examples" / "one_call.py").read_text()
STEPS = "steps=8,"
OUT = '"runs/even"'
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS_TO_END = 120
MEASURED = ("seconds", "rss_bytes", "peak_bytes")
REFUSED = re.compile(r"\b(FileError|ConfigError|StateError)\b")


@dataclass(frozen=True)
class Kill:
    """A kill of "one" rank or "all" processes, `seconds` after row number `num_rows`."""

    victims: str
    num_rows: int
    seconds: float

    @staticmethod
    def at_random(
        chance: random.Random, longest: float, first_row: int, last_row: int, seconds: float
    ) -> Kill:
        """Draw a kill within `seconds` after one of these rows or, less often, at any time."""
        victims = chance.choice(("one", "all"))
        after_start = chance.uniform(0, longest)
        # A job spends most of its time on starting, which would otherwise get most kills.
        if chance.random() < 0.7:
            return Kill(victims, chance.randint(first_row, last_row), chance.uniform(0, seconds))
        return Kill(victims, 0, after_start)

    def __str__(self) -> str:
        return f"killed {self.victims}, {self.seconds:.1f} s after row {self.num_rows}"


@dataclass
class Findings:
    """Findings of all starts of a job.

    Attributes:
        kills: numbers of kills, by victims and last step with a row.
        starts: number of starts.
        whole: number of finished runs.
        wrong: descriptions of wrong behaviour; empty if there was none.
    """

    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    whole: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, kill: Kill, num_rows: int, wrong: list[str], *, is_killed: bool) -> str:
        """Count a start of the job, which has `num_rows` rows now; return how it ended."""
        ended = str(kill) if is_killed else "finished"
        self.starts += 1
        self.kills[f"{kill.victims} at step {num_rows}"] += is_killed
        self.wrong += [f"start {self.starts}, {ended}: {fault}" for fault in wrong]
        return ended


NEVER = Kill("all", 0, SECONDS_TO_END * 5)  # Longer than any job.


def run_and_kill(
    command: list[str], directory: Path, mark: str, num_rows: Callable[[], int], kill: Kill
) -> tuple[Outcome, bool]:
    """Run a job under torchrun and kill it; return the outcome and whether it was killed before its
    end.

    `mark` occurs in the command lines of the ranks.
    """
    with Running(command, directory, {"OMP_NUM_THREADS": "1"}) as running:
        while num_rows() < kill.num_rows and running.launcher.poll() is None:
            time.sleep(0.05)
        deadline = time.monotonic() + kill.seconds
        while time.monotonic() < deadline and running.launcher.poll() is None:
            time.sleep(0.01)
        is_killed = running.launcher.poll() is None
        alive = running.processes() if is_killed else {}
        ranks = [pid for pid, line in alive.items() if mark in line and TORCHRUN[1] not in line]
        for pid in [random.choice(ranks)] if kill.victims == "one" and ranks else list(alive):
            with suppress(ProcessLookupError):  # It ended together with another.
                os.kill(pid, signal.SIGKILL)
        running.wait(SECONDS_TO_END)
    return running.outcome(), is_killed


class KilledJob:
    """A job that is killed and started again, by these methods of subclasses.

    run(kill)                        starts and kills it; returns the outcome, and if it still ran
    rows()                           rows without measurements of time and memory
    faults(outcome, is_killed=...)   descriptions of wrong behaviour after a start

    Attributes:
        num_steps: number of its rows.
        seconds_of_row: time after a row in which most kills are.
        newest: last step from which the next start may go on.
    """

    num_steps: int
    seconds_of_row: float
    newest = 0

    def start_over(self) -> None:
        """Forget a finished run."""


class ResumedJob(KilledJob):
    """The job of examples/one_call.py; each of its runs has a directory."""

    num_steps = 12
    seconds_of_row = 2

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = -1
        self.start_over()

    def start_over(self) -> None:
        self._number += 1
        self._out = self._directory / f"run-{self._number}"
        self._files = RunFiles(self._out)
        self._newest_before = 0
        self._script = self._directory / f"rl-{self._number}.py"
        longer = f"steps={self.num_steps}, save_every=2, kl_coefficient=0.01,"
        self._script.write_text(CODE.replace(STEPS, longer).replace(OUT, repr(str(self._out))))

    def run(self, kill: Kill) -> tuple[Outcome, bool]:
        self._newest_before = self.newest
        script = str(self._script)
        return run_and_kill(
            [*TORCHRUN, script], self._directory, script, lambda: len(self.rows()), kill
        )

    def rows(self) -> list[Values]:
        rows = self._files.metrics.rows()
        return [
            {key: value for key, value in row.items() if not key.endswith(MEASURED)} for row in rows
        ]

    @property
    def newest(self) -> int:
        progress = self._files.progress()
        return 0 if progress is None else progress.step

    def faults(self, outcome: Outcome, *, is_killed: bool) -> list[str]:
        wrong = []
        if refused := REFUSED.search(outcome.terminal):
            wrong.append(f"{refused[0]}: {outcome.terminal[-2000:]}")
        if (
            incomplete := [path.name for path in self._out.rglob("*.incomplete")]
            if not is_killed
            else []
        ):
            wrong.append(f"left {incomplete}")
        if self.newest < self._newest_before:
            wrong.append(f"its checkpoint is of step {self.newest}, it was {self._newest_before}")
        if self._out.exists() and not _is_unlocked(self._files):
            wrong.append("left its lock")
        return wrong


def kill_job(job: KilledJob, num_kills: int, seed: int, log: Callable[[str], None]) -> Findings:
    """Kill the job `num_kills` times; it finishes now and then, and in the end."""
    findings = Findings()
    chance = random.Random(seed)
    random.seed(seed)
    outcome, _ = job.run(NEVER)
    whole = job.rows()
    assert (outcome.status, len(whole)) == (0, job.num_steps), outcome.terminal
    log(f"a run without kills: {outcome.total_seconds:.0f} s")
    job.start_over()
    is_killed = True
    while is_killed or findings.kills.total() < num_kills:
        first_row = min(job.newest + 1, job.num_steps)
        kill = NEVER
        if findings.kills.total() < num_kills:
            kill = Kill.at_random(
                chance, outcome.total_seconds, first_row, job.num_steps, job.seconds_of_row
            )
        ended, is_killed = job.run(kill)
        rows = job.rows()
        wrong = job.faults(ended, is_killed=is_killed)
        if not is_killed and ended.status != 0:
            wrong.append(f"ended with {ended.status}: {ended.terminal[-2000:]}")
        if ended.leftovers:
            wrong.append(f"left {ended.leftovers}")
        if rows != whole[: len(rows) if is_killed else None]:
            wrong.append(f"has other rows than a run that was not killed: {rows}")
        how = findings.add(kill, len(rows), wrong, is_killed=is_killed)
        log(f"{how}; checkpoint {job.newest}, {len(rows)} rows; {wrong or 'well'}")
        if not is_killed:
            findings.whole += 1
            if wrong:
                break
            job.start_over()
    return findings


def kill_runs(directory: Path, num_kills: int, seed: int, log: Callable[[str], None]) -> Findings:
    return kill_job(ResumedJob(directory), num_kills, seed, log)


def _is_unlocked(files: RunFiles, patience: float = 20) -> bool:
    """Return whether the run's lock becomes free: a killed process closes its files late."""
    deadline = time.monotonic() + patience
    while True:
        try:
            files.lock().close()
        except ConfigError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        else:
            return True


NUM_KILLS = 4
Kills = Callable[[Path, int, int, Callable[[str], None]], Findings]
"""Kills in a directory: their number, a seed, and what gets a line per start."""


def check_kills(kill: Kills, directory: Path, num_kills: int = NUM_KILLS) -> None:
    """Kill a few times, and assert that nothing was wrong."""
    findings = kill(directory, num_kills, 1, print)
    assert findings.wrong == []
    assert findings.kills.total() == num_kills


def kill_often(kill: Kills, num_kills: str = "60", seed: str = "1") -> None:
    """Kill as often as the arguments of a command say, and print the findings."""
    with tempfile.TemporaryDirectory() as directory:
        print(
            kill(Path(directory), int(num_kills), int(seed), lambda text: print(text, flush=True))
        )


def test_every_killed_run_resumes(tmp_path: Path) -> None:
    check_kills(kill_runs, tmp_path)


if __name__ == "__main__":
    kill_often(kill_runs, *sys.argv[1:])
