"""A run's directory, from which the same command goes on where it stopped.

    OUT/lock                          locked by the job that writes here
    OUT/run.json                      the settings that a resumed run must share
    OUT/metrics.jsonl                 one row per iteration; row 0 is the warm-up
    OUT/checkpoints/iteration-0000/   after the warm-up: also the frozen reference, so it stays
    OUT/checkpoints/iteration-0020/   the two newest of the others: weights/ and, with PPO, critic/, by the engine;
                                      progress.json, by us

progress.json is written last and in one step: a checkpoint without it does not count, and is removed when the run is
resumed. Rows of iterations after the newest checkpoint are dropped then: those iterations are repeated, with the same
batches and samples.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from hybrid_engine.errors import ConfigError, FileError, Violation
from hybrid_engine.files.durable import write_text
from hybrid_engine.rl.run_files import MetricsFile, Row

NUM_KEPT = 2
# All that is there when the first attempt ended before it had anything to keep.
_BEFORE_THE_FIRST_ROW = re.compile(r"lock|log-rank\d+\.txt")


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        iteration: iterations done; 0 after the warm-up.
        row: that iteration's metrics as far as they were known when the checkpoint was written.
    """

    iteration: int
    row: Row


class RunDirectory:
    """The files of one run. Any rank may read; only rank 0 may call the methods that write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl", "iteration")
        self.checkpoints = path / "checkpoints"
        self._settings_file = path / "run.json"

    def checkpoint(self, iteration: int) -> Path:
        """Directory of that iteration's checkpoint."""
        return self.checkpoints / f"iteration-{iteration:04d}"

    def weights(self, iteration: int) -> Path:
        """Where `ActorHybridWorker.save_checkpoint` writes."""
        return self.checkpoint(iteration) / "weights"

    def critic(self, iteration: int) -> Path:
        """Where `ValueModel.save_checkpoint` writes."""
        return self.checkpoint(iteration) / "critic"

    # -- reading ------------------------------------------------------------------------------------------------------

    def check(self, settings: Mapping[str, Any], resume: bool = True) -> None:
        """Raise ConfigError unless this directory is new, or has a run that may be resumed or started over.

        Raises FileError about a file of the run that cannot be read.
        """
        if not self._settings_file.is_file():
            names = sorted(path.name for path in self.path.iterdir()) if self.path.exists() else []
            if foreign := [name for name in names if not _BEFORE_THE_FIRST_ROW.fullmatch(name)]:
                problem = f"{self.path} holds {', '.join(foreign[:3])} but no run.json, so it is not a run"
                raise ConfigError([Violation("--out", problem, "Use another --out")])
        elif resume and self.progress() is not None:
            self.rows()
            self._require_same(settings)
        elif resume and self.rows():
            remedy = "Put one back, or start over with --no-resume"
            raise FileError(f"{self.path} has rows of metrics but no complete checkpoint. {remedy}")

    def _require_same(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError naming every setting in which the run found here differs."""
        before, now = _flat(_read_json(self._settings_file)), _flat(settings)
        remedy = "Use the old value, another --out, or --no-resume to start over"
        violations = [
            Violation(key, f"the run in {self.path} has {before.get(key)!r}, this one {now.get(key)!r}", remedy)
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if violations:
            raise ConfigError(violations)

    def progress(self) -> Progress | None:
        """That of the newest checkpoint; None when there is none."""
        complete = self._complete()
        return Progress(**_read_json(self.checkpoint(complete[-1]) / "progress.json")) if complete else None

    def rows(self) -> list[Row]:
        """The metrics written so far."""
        return self.metrics.rows()

    def _iterations(self) -> list[int]:
        """Those with a checkpoint, complete or not, in their order."""
        return sorted(int(path.name.removeprefix("iteration-")) for path in self.checkpoints.glob("iteration-*[0-9]"))

    def _complete(self) -> list[int]:
        return [number for number in self._iterations() if (self.checkpoint(number) / "progress.json").exists()]

    # -- writing ------------------------------------------------------------------------------------------------------

    def lock(self) -> TextIO:
        """Keep other jobs out until the file that is returned is closed, at the latest when this process ends.

        Raises ConfigError when another job is writing here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            problem = f"another job is writing {self.path}: {file.read().strip()}"
            file.close()
            raise ConfigError([Violation("--out", problem, "Wait until it has ended, or use another --out")]) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    def start_over(self, settings: Mapping[str, Any]) -> None:
        """Remove what an earlier run wrote here, nothing else, and note the settings of the new one."""
        for iteration in self._iterations():
            self._remove(iteration)
        for path in [self.metrics.path, self.path / "reward.png", *self.path.glob("events.out.tfevents.*")]:
            path.unlink(missing_ok=True)
        write_text(self._settings_file, json.dumps(settings, indent=2) + "\n")

    def resume(self, progress: Progress) -> None:
        """Remove the checkpoints that were not completed, and the rows of iterations that will be repeated."""
        for iteration in set(self._iterations()) - set(self._complete()):
            self._remove(iteration)
        self.metrics.cut_after(progress.iteration)

    def complete_checkpoint(self, progress: Progress) -> None:
        """Call when the weights are written: makes the checkpoint count, and removes older ones."""
        write_text(self.checkpoint(progress.iteration) / "progress.json", json.dumps(asdict(progress)) + "\n")
        for iteration in self._complete()[1:-NUM_KEPT]:
            self._remove(iteration)

    def append_row(self, row: Row) -> None:
        """Add a line to the metrics."""
        self.metrics.append(row)

    def _remove(self, iteration: int) -> None:
        """progress.json first: a checkpoint that is half removed must not count."""
        (self.checkpoint(iteration) / "progress.json").unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint(iteration))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        remedy = "Remove its directory to go on from the checkpoint before it, or start over with --no-resume"
        raise FileError(f"{path} is damaged: {error}. {remedy}") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat
