"""The example as a job under torchrun, with a fault in a function of one rank, and its outcome.

job = Job(directory)                                      # its configuration and OUT
outcome = job.run(Fault("kill", "hybrid_engine.rl.loop:Loop._update", rank=1))
assert outcome.seconds < 30 and "rank 1" in outcome.terminal and outcome.leftovers == []
assert job.run().status == 0                              # resumed and finished
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.gpt_rl.train import run_files
from tests.examples.launched import short_config
from tests.faults.running import Outcome, Running
from tests.harness.values import Values

FAULT_VARIABLE = "FAULTY_TRAIN_FAULT"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class FaultError(Exception):
    """Exception of a fault of kind "raise"."""


@dataclass(frozen=True)
class Fault:
    """A fault at the entry of a function on one rank.

    Attributes:
        kind: "raise" a FaultError, "kill" the process by SIGKILL, or "stop" it by SIGSTOP.
        where: module:function, such as "hybrid_engine.rl.loop:Loop._update".
        rank: rank of the fault.
        call: number of the call, from 1.
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
        return f"injected into {self.function} on rank {self.rank}"


class Job:
    """A small run of the example on two ranks, with both engines.

    Args:
        directory: receives config.yaml and the output.
        generate: changed keys of `generate_config`.
        prefix: see `Running`.
    """

    def __init__(
        self, directory: Path, *, generate: Mapping[str, Any] = {}, prefix: str = ""
    ) -> None:
        self.directory = directory
        self.out = directory / "run"
        self.prefix = prefix
        rl = {"iterations": 100, "warm_up": {"max_steps": 5, "batch_size": 32}}
        self.config = short_config(
            "tp2_to_dp2.yaml", directory, generate={"timeout_seconds": 60, **generate}, rl=rl
        )
        self._happened = directory / "fault-happened"

    def run(self, fault: Fault | None = None, *options: str) -> Outcome:
        """Start the job, wait until its last process has ended, and inspect leftovers.

        Args:
            fault: fault to inject.
            options: options of the example, such as "rl_config.iterations=3".
        """
        with self.started(fault, *options) as running:
            running.wait(240)
        return running.outcome(self.fault_time)

    @contextmanager
    def started(
        self, fault: Fault | None = None, *options: str, **environment: str
    ) -> Iterator[Running]:
        """The running job; `environment` has additional variables."""
        self._happened.unlink(missing_ok=True)
        program = [
            "-m",
            "tests.faults.faulty_train",
            "--config",
            str(self.config),
            "--out",
            str(self.out),
            *options,
        ]
        variable = json.dumps([None if fault is None else asdict(fault), str(self._happened)])
        variables = {"OMP_NUM_THREADS": "1", FAULT_VARIABLE: variable, **environment}
        with Running([*_TORCHRUN, *program], self.directory, variables, self.prefix) as running:
            yield running

    @property
    def fault_time(self) -> float | None:
        """Time of the fault on the monotonic clock, in seconds; None if it has not happened."""
        return float(self._happened.read_text()) if self._happened.exists() else None

    @property
    def iteration(self) -> int:
        """Last iteration with a checkpoint; -1 before the end of the warm-up."""
        progress = run_files(self.out).progress()
        return -1 if progress is None else progress.step

    def rows(self) -> list[Values]:
        return run_files(self.out).metrics.rows()
