"""A run's files, from which the same call goes on where it stopped.

    OUT/run.json                   the configuration that a resumed run must share, and the step of the checkpoint
    OUT/metrics.jsonl              a row per step
    OUT/checkpoints/step-000050/   the newest checkpoint, by the engine

run.json is written last and in one go: a checkpoint that it does not name does not count.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, FileError, Violation
from hybrid_engine.files.documents import read_json
from hybrid_engine.files.durable import write_text

Row = dict[str, Any]


class MetricsFile:
    """Rows of metrics as JSON lines, in the order of the number that each has under `key`."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self._key = path, key

    def rows(self) -> list[Row]:
        """The rows so far. A last line that was cut off does not count. Raises FileError naming a damaged line."""
        if not self.path.exists():
            return []
        rows = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise FileError(f"line {number} of {self.path}: {error}. Remove or correct it") from error
        return rows

    def append(self, row: Row) -> None:
        """Add a row."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def cut_after(self, last: int) -> None:
        """Keep the rows whose number is at most `last`."""
        kept = [row for row in self.rows() if row[self._key] <= last]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))


class RunFiles:
    """The files of one run below `out`. Only rank 0 may call its methods, except for `checkpoint`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.metrics = MetricsFile(out / "metrics.jsonl", "step")
        self._run = out / "run.json"
        self._checkpoints = out / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Directory of that step's checkpoint."""
        return self._checkpoints / f"step-{step:06d}"

    def begin(self, config: Mapping[str, Any]) -> int:
        """Return the step of the checkpoint to go on from, 0 for a new run; cut the metrics back to it.

        Raises ConfigError where `out` holds something else, or the run of another configuration.
        """
        if self._run.exists():
            found = read_json(self._run, "out", "Name the directory of a run, or a new one")
            if found.keys() != {"step", "config"}:
                raise self._not_a_run("its run.json is another program's")
            self._require_same(found["config"], config)
            step = int(found["step"])
        elif self.out.exists() and any(self.out.iterdir()):
            raise self._not_a_run("it is not empty and has no run.json")
        else:
            step = 0
        self.out.mkdir(parents=True, exist_ok=True)
        self.complete(step, config)
        self.metrics.cut_after(step)
        return step

    def complete(self, step: int, config: Mapping[str, Any]) -> None:
        """Have the checkpoint of this step count, and remove others."""
        write_text(self._run, json.dumps({"step": step, "config": config}, indent=2) + "\n")
        for path in self._checkpoints.glob("step-*"):
            if path != self.checkpoint(step):
                shutil.rmtree(path)

    def _not_a_run(self, why: str) -> ConfigError:
        return ConfigError([Violation("out", f"{self.out} is not a run of train: {why}", "Name a new directory")])

    def _require_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        remedy = "Use the old value, or another directory for a new run"
        violations = [
            Violation(f"GrpoConfig.{key}", f"the run in {self.out} has {before[key]!r}, this one {now[key]!r}", remedy)
            for key in sorted(before.keys() & now.keys())
            if before[key] != now[key]
        ]
        if violations:
            raise ConfigError(violations)
