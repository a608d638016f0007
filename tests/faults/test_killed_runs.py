"""The job of examples/one_call.py, killed repeatedly at random moments, resumes and ends with the rows
of an undisturbed run.

python -m tests.faults.test_killed_runs 60 7          # kills, seed; prints a line per start, and the findings
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
from typing import Any

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.rl.run_files import RunFiles
from tests.faults.running import Outcome, Running
from tests.harness.launch import REPO_ROOT

pytestmark = [pytest.mark.faults, pytest.mark.engines]

CODE = (REPO_ROOT / "examples" / "one_call.py").read_text()
STEPS = "steps=8,"
OUT = '"runs/even"'
NUM_STEPS = 12
LONGER = f"steps={NUM_STEPS}, save_every=2, kl_coefficient=0.01,"
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
    def at_random(chance: random.Random, longest: float, first_row: int, last_row: int, seconds: float) -> Kill:
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
    """The job of examples/one_call.py in one directory."""

    def __init__(self, directory: Path, number: int) -> None:
        self.directory = directory
        self.out = directory / f"run-{number}"
        self.files = RunFiles(self.out)
        self._script = directory / f"rl-{number}.py"
        self._script.write_text(CODE.replace(STEPS, LONGER).replace(OUT, repr(str(self.out))))

    def run(self, kill: Kill) -> tuple[Outcome, bool]:
        """Start the job and kill it; return the outcome and whether it was still running."""
        script = str(self._script)
        return run_and_kill([*TORCHRUN, script], self.directory, script, lambda: len(self.files.metrics.rows()), kill)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows without measurements of time and memory."""
        rows = self.files.metrics.rows()
        return [{key: value for key, value in row.items() if not key.endswith(MEASURED)} for row in rows]

    def newest(self) -> int:
        progress = self.files.progress()
        return 0 if progress is None else progress.step


def kill_runs(directory: Path, num_kills: int, seed: int, log: Callable[[str], None]) -> Findings:
    findings = Findings()
    chance = random.Random(seed)
    job = KilledJob(directory, 0)
    outcome, _ = job.run(NEVER)
    whole = job.rows()
    longest = outcome.total_seconds
    assert (outcome.status, len(whole)) == (0, NUM_STEPS), outcome.terminal
    log(f"a run without kills: {longest:.0f} s")
    random.seed(seed)
    while findings.kills.total() < num_kills:
        job = KilledJob(directory, findings.whole + 1)
        is_killed = True
        while is_killed:
            is_last = findings.kills.total() >= num_kills
            before = job.newest()
            kill = NEVER if is_last else Kill.at_random(chance, longest, min(before + 1, NUM_STEPS), NUM_STEPS, 2)
            outcome, is_killed = job.run(kill)
            wrong = _faults(job, outcome, before, is_killed=is_killed)
            ended = findings.add(kill, len(job.rows()), wrong, is_killed=is_killed)
            log(f"{ended}; checkpoint {before} -> {job.newest()}, {len(job.rows())} rows; {wrong or 'well'}")
            if wrong and not is_killed:
                break
        findings.whole += 1
        if job.rows() != whole:
            findings.wrong.append(f"rows of run {findings.whole} differ from those of an undisturbed run")
    return findings


def _faults(job: KilledJob, outcome: Outcome, before: int, *, is_killed: bool) -> list[str]:
    """Return descriptions of wrong behaviour after a start."""
    wrong = []
    if not is_killed and outcome.status != 0:
        wrong.append(f"ended with {outcome.status}: {outcome.terminal[-2000:]}")
    if refused := REFUSED.search(outcome.terminal):
        wrong.append(f"{refused[0]}: {outcome.terminal[-2000:]}")
    if outcome.leftovers:
        wrong.append(f"left {outcome.leftovers}")
    if incomplete := [path.name for path in job.out.rglob("*.incomplete")] if not is_killed else []:
        wrong.append(f"left {incomplete}")
    if job.newest() < before:
        wrong.append(f"its checkpoint is of step {job.newest()}, it was {before}")
    if [row["step"] for row in job.rows()] != list(range(1, len(job.rows()) + 1)):
        wrong.append(f"rows of steps {[row['step'] for row in job.rows()]}")
    if job.out.exists() and not _is_unlocked(job):
        wrong.append("left its lock")
    return wrong


def _is_unlocked(job: KilledJob, patience: float = 20) -> bool:
    """Return whether the run's lock becomes free: a killed process closes its files late."""
    deadline = time.monotonic() + patience
    while True:
        try:
            job.files.lock().close()
        except ConfigError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        else:
            return True


NUM_KILLS = 4
Kills = Callable[[Path, int, int, Callable[[str], None]], Findings]
"""Kills in a directory: their number, a seed, and what gets a line per start."""


def check_kills(
    kill: Kills, what: str, directory: Path, record: Callable[..., None], num_kills: int = NUM_KILLS
) -> None:
    """Kill a few times, record it, and assert that nothing was wrong."""
    findings = kill(directory, num_kills, 1, print)
    fault = f"{findings.kills.total()} kills of {what}"
    record(fault=fault, message=str(findings), resumed=not findings.wrong)
    assert findings.wrong == []
    assert findings.kills.total() == num_kills


def kill_often(kill: Kills, num_kills: str = "60", seed: str = "1") -> None:
    """Kill as often as the arguments of a command say, and print the findings."""
    with tempfile.TemporaryDirectory() as directory:
        print(kill(Path(directory), int(num_kills), int(seed), lambda text: print(text, flush=True)))


def test_every_killed_run_resumes(tmp_path: Path, record: Callable[..., None]) -> None:
    check_kills(kill_runs, "one_call.py", tmp_path, record)


if __name__ == "__main__":
    kill_often(kill_runs, *sys.argv[1:])
