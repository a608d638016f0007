"""The example as a job under torchrun, with a fault in one function of one rank, and what came of it.

    job = Job(directory)                                      # its configuration and OUT
    outcome = job.run(Fault("kill", "examples.gpt_rl.trainer:Trainer._update", rank=1))
    assert outcome.seconds < 30 and "rank 1" in outcome.terminal and outcome.leftovers == []
    assert job.run().status == 0                              # taken up and finished

Every process of a job carries a token in its environment and is found by it, in whatever session and below whatever
parent it is; when `run` returns or raises, none is alive. (Ports end with the processes that listen on them.)
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.gpt_rl import settings
from tests.conftest import SHARED_MEMORY, is_mapped
from tests.launch import REPO_ROOT

CONFIG = Path(settings.__file__).parent / "configs" / "tp2_to_dp2.yaml"
FAULT_VARIABLE = "FAULTY_TRAIN_FAULT"
_TOKEN_VARIABLE = "FAULTY_TRAIN_TOKEN"
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_FOR_TRACKERS = 5.0  # multiprocessing's resource trackers clean up after the rank that they belong to


class FaultError(Exception):
    """What a fault of kind "raise" raises."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong where.

    Attributes:
        kind: "raise" a FaultError, "kill" the process itself by SIGKILL, or "stop" it by SIGSTOP.
        where: module:function, e.g. "examples.gpt_rl.trainer:Trainer._update"; it happens as the function is entered.
        rank: on which it happens.
        call: at the how-manieth call.
    """

    kind: str
    where: str
    rank: int = 1
    call: int = 1

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def function(self) -> str:
        return self.where.partition(":")[2]

    @property
    def text(self) -> str:
        """Of the exception."""
        return f"injected into {self.function} on rank {self.rank}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: torchrun's exit status, negative for a signal; None when the time was over and it was ended.
        seconds: from the fault to the end of the last process; None when no fault happened.
        total_seconds: of the whole job.
        terminal: what torchrun and the ranks wrote to the terminal.
        logs: text of OUT/log-rank<r>.txt that this job added, by rank.
        survivors: command lines of processes that were alive after torchrun had ended, and had to be ended.
        shared_memory: names in /dev/shm that this job left.
    """

    status: int | None
    seconds: float | None
    total_seconds: float
    terminal: str
    logs: Mapping[int, str]
    survivors: Sequence[str]
    shared_memory: Sequence[str]

    @property
    def leftovers(self) -> list[str]:
        """Everything that ought not to be there any more."""
        return [*self.survivors, *self.shared_memory]

    def row(self) -> dict[str, Any]:
        """For the table of all cases."""
        return {
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "status": self.status,
            "message": _first_message(self.terminal),
            "leftovers": self.leftovers,
        }


class Job:
    """A small run of the example on two ranks, with both engines.

    Args:
        directory: gets config.yaml, and the run in `out`.
        generate: keys of `generate_config` that are not the committed configuration's.
        rl: keys of `rl_config`.
        prefix: a command before torchrun's, e.g. ["unshare", "-m"].
    """

    def __init__(
        self,
        directory: Path,
        *,
        generate: Mapping[str, Any] | None = None,
        rl: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.out = directory / "run"
        self.prefix = prefix
        self.config = directory / "config.yaml"
        self.config.write_text(yaml.safe_dump(_short_configuration(generate or {}, rl or {})))
        self._happened = directory / "fault-happened"

    def run(
        self,
        fault: Fault | None = None,
        *options: str,
        timeout: float = 240,
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Start the job, wait until its last process has ended, look at what is left.

        Args:
            fault: put into it.
            options: of the example, e.g. "--iterations", "3".
            timeout: seconds until all is ended by force.
            environment: added to this process's own.
        """
        with self.started(fault, *options, environment=environment) as running:
            running.wait(timeout)
        return running.outcome()

    @contextmanager
    def started(
        self, fault: Fault | None = None, *options: str, environment: Mapping[str, str] | None = None
    ) -> Iterator[Running]:
        """The job while it runs; at the end of the block every process of it is ended."""
        self._happened.unlink(missing_ok=True)
        running = Running(self, fault, options, environment or {})
        try:
            yield running
        finally:
            running.end()

    @property
    def fault_time(self) -> float | None:
        """On the monotonic clock, when the fault happened."""
        return float(self._happened.read_text()) if self._happened.exists() else None

    def log_sizes(self) -> dict[int, int]:
        """Bytes of each rank's log."""
        logs = [self.out / f"log-rank{rank}.txt" for rank in range(2)]
        return {rank: log.stat().st_size if log.exists() else 0 for rank, log in enumerate(logs)}

    def logs_from(self, sizes: Mapping[int, int]) -> dict[int, str]:
        """What was added to each rank's log since it had that many bytes."""
        logs = {}
        for rank, size in sizes.items():
            log = self.out / f"log-rank{rank}.txt"
            logs[rank] = log.read_bytes()[size:].decode(errors="replace") if log.exists() else ""
        return logs

    def command(self, options: Sequence[str]) -> list[str]:
        """As a user gives it, but for the module that puts the fault in."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = ["-m", "tests.faults.faulty_train", "--config", str(self.config), "--out", str(self.out)]
        return [*self.prefix, *launcher, *program, *options]

    def fault_variable(self, fault: Fault | None) -> str:
        """For faulty_train.py."""
        return json.dumps([None if fault is None else asdict(fault), str(self._happened)])


class Running:
    """A job whose processes may be alive."""

    def __init__(self, job: Job, fault: Fault | None, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self.job = job
        self.fault = fault
        self._token = secrets.token_hex(8)
        self._log_sizes = job.log_sizes()
        self._shared_memory_before = _shared_memory()
        self._terminal = job.directory / f"terminal-{self._token}.txt"
        self._started = time.monotonic()
        self._ended_at: float | None = None
        self._survivors: list[str] = []
        self._was_ended = False
        with self._terminal.open("wb") as terminal:
            self.launcher = subprocess.Popen(
                job.command(options),
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(REPO_ROOT),
                    FAULT_VARIABLE: job.fault_variable(fault),
                    _TOKEN_VARIABLE: self._token,
                    **environment,
                },
                cwd=REPO_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def terminal(self) -> str:
        """All that was written so far."""
        return self._terminal.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """The job's live processes: pid -> command line."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
                if f"{_TOKEN_VARIABLE}={self._token}".encode() in environment.split(b"\0"):
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    found[int(process.name)] = b" ".join(words).decode(errors="replace").strip()
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def wait(self, timeout: float, *, seconds_to_follow: float = 10.0) -> None:
        """Until torchrun and all that it started have ended, or the time is over.

        What outlives torchrun by `seconds_to_follow` is a survivor.
        """
        deadline, launcher_has_ended = time.monotonic() + timeout, False
        while time.monotonic() < deadline:
            if not launcher_has_ended and self.launcher.poll() is not None:
                launcher_has_ended = True
                deadline = time.monotonic() + seconds_to_follow
            alive = self.processes()
            if launcher_has_ended and not alive:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._ended_at = time.monotonic()
        if launcher_has_ended:
            self._survivors = list(alive.values())

    def end(self) -> None:
        """End every process of the job."""
        self._was_ended = self.launcher.poll() is None
        while alive := self.processes():
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        self.launcher.wait()

    def outcome(self) -> Outcome:
        """After `end`."""
        fault_time, ended_at = self.job.fault_time, self._ended_at or time.monotonic()
        return Outcome(
            status=None if self._was_ended else self.launcher.returncode,
            seconds=None if fault_time is None else ended_at - fault_time,
            total_seconds=ended_at - self._started,
            terminal=self.terminal,
            logs=self.job.logs_from(self._log_sizes),
            survivors=self._survivors,
            shared_memory=sorted(self._left_in_shared_memory()),
        )

    def _left_in_shared_memory(self) -> set[str]:
        """New names that no live process has mapped: those that are mapped are of another run on this machine."""
        deadline = time.monotonic() + _SECONDS_FOR_TRACKERS
        while True:
            new = _shared_memory() - self._shared_memory_before
            left = {name for name in new if not is_mapped(SHARED_MEMORY / name)}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _first_message(terminal: str) -> str:
    """The first line by which a rank says what went wrong, else what torchrun says of it."""
    ours = [line for line in terminal.splitlines() if line.startswith("rank ")]
    report = [line for line in terminal.splitlines() if "failed (exitcode" in line]
    return next(iter([*ours, *report]), "")


def _short_configuration(generate: Mapping[str, Any], rl: Mapping[str, Any]) -> dict[str, Any]:
    """The committed configuration, with little to do and a checkpoint after each iteration."""
    values = yaml.safe_load(CONFIG.read_text())
    values["model"] = str((CONFIG.parent / values["model"]).resolve())
    values["actor_config"]["micro_batch_size"] = 16
    values["generate_config"].update(timeout_seconds=60, **generate)
    values["rl_config"].update(
        data=str((CONFIG.parent / values["rl_config"]["data"]).resolve()),
        iterations=100,
        prompts_per_iteration=16,
        samples_per_prompt=4,
        minibatches=2,
        checkpoint_every=1,
        warm_up={"max_steps": 5, "batch_size": 32},
    )
    values["rl_config"].update(rl)
    return values


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}
