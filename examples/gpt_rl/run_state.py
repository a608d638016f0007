"""What a run leaves in its directory, so that the same command goes on where it stopped.

    OUT/run.json                      configuration of the run
    OUT/metrics.jsonl                 one row per iteration; row 0 is the warm-up
    OUT/checkpoints/iteration-0000/   after the warm-up: also the frozen reference, so it stays
    OUT/checkpoints/iteration-0020/   the two newest of the others; weights/ by Megatron, progress.json by us
    OUT/checkpoints/latest            name of the newest that is complete

A checkpoint counts once `latest` names it, and `latest` is replaced in one step. Rows of iterations after it are
dropped when the run is taken up again: those iterations are done once more, with the same batches and samples.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, Violation

NUM_KEPT = 2

Row = dict[str, Any]


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
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self._fingerprint_file = path / "run.json"
        self._latest_file = self.checkpoints / "latest"

    def checkpoint(self, iteration: int) -> Path:
        """Directory of that iteration's checkpoint."""
        return self.checkpoints / f"iteration-{iteration:04d}"

    def weights(self, iteration: int) -> Path:
        """What `ActorHybridWorker.save_checkpoint` is given."""
        return self.checkpoint(iteration) / "weights"

    def progress(self) -> Progress | None:
        """Of the latest complete checkpoint; None when there is none."""
        if not self._latest_file.is_file():
            return None
        name = self._latest_file.read_text().strip()
        return Progress(**json.loads((self.checkpoints / name / "progress.json").read_text()))

    def rows(self) -> list[Row]:
        """The metrics written so far. A last line that was cut off does not count."""
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def require_same(self, fingerprint: Mapping[str, Any]) -> None:
        """Raise ConfigError naming every setting in which the run found here differs from `fingerprint`."""
        if not self._fingerprint_file.is_file():
            return
        before, now = (_flat(values) for values in (json.loads(self._fingerprint_file.read_text()), fingerprint))
        remedy = "Use the old value, another --out, or --no-resume to start over"
        violations = [
            Violation(key, f"the run in {self.path} has {before.get(key)!r}, this one {now.get(key)!r}", remedy)
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if violations:
            raise ConfigError(violations)

    def start_over(self, fingerprint: Mapping[str, Any]) -> None:
        """Remove what an earlier run left here, nothing else, and note the configuration of the new one."""
        self.path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        for path in [self.metrics_file, self.path / "reward.png", *self.path.glob("events.out.tfevents.*")]:
            path.unlink(missing_ok=True)
        _replace_text(self._fingerprint_file, json.dumps(fingerprint, indent=2) + "\n")

    def complete_checkpoint(self, progress: Progress) -> None:
        """Call when the weights are written: makes the checkpoint the latest one and removes old ones."""
        directory = self.checkpoint(progress.iteration)
        text = json.dumps({"iteration": progress.iteration, "row": progress.row})
        _replace_text(directory / "progress.json", text + "\n")
        _replace_text(self._latest_file, directory.name + "\n")
        # Newest by iteration: one that a run left behind after `latest` is from a future that will come again.
        others = sorted(path for path in self.checkpoints.glob("iteration-*") if path != self.checkpoint(0))
        past = [path for path in others if path.name <= directory.name]
        for path in [*past[:-NUM_KEPT], *(path for path in others if path.name > directory.name)]:
            shutil.rmtree(path)

    def append_row(self, row: Row) -> None:
        """Add a line to the metrics."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def drop_rows_after(self, iteration: int) -> None:
        """Keep the rows up to `iteration`."""
        kept = [row for row in self.rows() if row["iteration"] <= iteration]
        _replace_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))


def _replace_text(path: Path, text: str) -> None:
    """Write a file in one step: it has the old contents or the new ones, whatever happens."""
    temporary = path.with_name(f"{path.name}.incomplete")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat.update(_flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
