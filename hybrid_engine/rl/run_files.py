"""A run's files, from which the same call goes on where it stopped.

    OUT/lock                        locked by the job that writes here
    OUT/run.json                    the settings that a resumed run must share
    OUT/metrics.jsonl               a row per step
    OUT/events.out.tfevents.*       the same for TensorBoard
    OUT/checkpoints/step-000050/    weights/ and, with PPO, critic/, by the engine; progress.json, by us

progress.json is written last and in one go: a checkpoint without it does not count, and is removed when the run is
resumed. Rows of steps after the newest checkpoint are dropped then: those steps are repeated.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import pydantic

from hybrid_engine.errors import ConfigError, FileError, Violation, first_of
from hybrid_engine.files.durable import append_text, write_text

Row = dict[str, Any]

# All that is there when the first attempt ended before it had anything to keep.
_BEFORE_THE_FIRST_ROW = re.compile(r"lock|log-rank\d+\.txt")


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        step: steps done.
        row: the metrics of that step as far as they were known when the checkpoint was written.
    """

    step: int
    row: Row


class MetricsFile:
    """Rows of metrics as JSON lines, in the order of the number that each has under `key`."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

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

    def has(self, number: int) -> bool:
        """Whether there is a row with this number."""
        return any(row[self.key] == number for row in self.rows())

    def append(self, row: Row) -> None:
        """Add a row, whole or not at all. Raises FileError."""
        append_text(self.path, json.dumps(row) + "\n")

    def cut_after(self, last: int) -> None:
        """Keep the rows whose number is at most `last`."""
        kept = [row for row in self.rows() if row[self.key] <= last]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))


class Events:
    """Rows as TensorBoard's scalars, where it is installed; nothing elsewhere.

    Args:
        out: directory of the events.
        groups: of tags, by the names of figures that are not told by the library's own: {"accuracy": "eval"}.
        left_out: names of a row that are not figures.
    """

    def __init__(
        self, out: Path, groups: Mapping[str, str] | None = None, left_out: Collection[str] = ("step",)
    ) -> None:
        self._out, self._groups, self._left_out = out, dict(groups or {}), left_out
        self._writer: Any = None

    def add(self, number: int, row: Row) -> None:
        """Write the figures of a row; what an interrupted run wrote for its number and later ones is hidden."""
        if self._writer is None and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._out), purge_step=number)
        if self._writer is not None:
            for name, value in row.items():
                if value is not None and name not in self._left_out:
                    self._writer.add_scalar(self.tag(name), value, number)
            self._writer.flush()

    def tag(self, name: str) -> str:
        """Group and name: reshard, time (seconds), memory, check, one of `groups`, or train."""
        if name.startswith(("reshard", "bytes")):
            return f"reshard/{name.removeprefix('reshard_')}"
        if name.endswith("seconds"):
            return f"time/{name.removesuffix('_seconds')}"
        if name in ("peak_bytes", "rss_bytes"):
            return f"memory/{name}"
        return f"{'check' if name.startswith('logprob_diff') else self._groups.get(name, 'train')}/{name}"

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()


class RunFiles:
    """The files of one run. Any rank may read; only rank 0 may call the methods that write.

    Args:
        out: directory of the run, shared by all ranks.
        key: what a step is called: the number of a row, and the name of a checkpoint.
        num_kept: newest checkpoints to keep. That of step 0, from which a run began, stays beside them.
        others: names of further files of a run, which go with it when it is started over.
    """

    def __init__(self, out: Path, key: str = "step", *, num_kept: int = 1, others: Sequence[str] = ()) -> None:
        self.out = out
        self.metrics = MetricsFile(out / "metrics.jsonl", key)
        self.checkpoints = out / "checkpoints"
        self._num_kept, self._others = num_kept, tuple(others)
        self._settings_file = out / "run.json"

    def checkpoint(self, step: int) -> Path:
        """Directory of that step's checkpoint."""
        return self.checkpoints / f"{self.metrics.key}-{step:06d}"

    def weights(self, step: int) -> Path:
        """Where `ActorHybridWorker.save_checkpoint` writes."""
        return self.checkpoint(step) / "weights"

    def critic(self, step: int) -> Path:
        """Where `ValueModel.save_checkpoint` writes."""
        return self.checkpoint(step) / "critic"

    # -- reading ------------------------------------------------------------------------------------------------------

    def check(
        self, settings: Mapping[str, Any], resume: bool = True, defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Raise ConfigError unless this directory is new, or has a run that may be resumed or, else, started over.

        Args:
            settings: those that a resumed run must share.
            resume: whether the run is to go on.
            defaults: of these settings, as far as they have any. A run that began before there was an option goes on
                with its default.

        Raises FileError about a file of the run that cannot be read.
        """
        if not self._settings_file.is_file():
            names = sorted(path.name for path in self.out.iterdir()) if self.out.exists() else []
            if foreign := [name for name in names if not _BEFORE_THE_FIRST_ROW.fullmatch(name)]:
                raise self._not_a_run(f"holds {', '.join(foreign[:3])} but no run.json")
            return
        found = _read_json(self._settings_file)
        if not isinstance(found, dict):
            raise self._not_a_run("has a run.json that is not a mapping")
        known = _flat(defaults or {})
        new = settings.keys() - found.keys()
        if found.keys() - settings.keys() or new - _at_defaults(settings, known):
            sections = [first_of(sorted(each), 5) for each in (found, settings)]
            raise self._not_a_run(
                f"has a run.json of {sections[0] or 'nothing'}, not of {sections[1]}", " of this kind"
            )
        if resume and self.progress() is not None:
            self.metrics.rows()
            self._require_same(found, settings, known)
        elif resume and self.metrics.rows():
            remedy = "Put one back, or begin a new run in another directory"
            raise FileError(f"{self.out} has rows of metrics but no complete checkpoint. {remedy}")

    def _not_a_run(self, why: str, kind: str = "") -> ConfigError:
        return ConfigError([Violation("out", f"{self.out} {why}, so it is not a run{kind}", "Use another directory")])

    def _require_same(self, found: Mapping[str, Any], settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise ConfigError naming every setting in which the run found here differs; `defaults` are flat."""
        before, now = _flat(found), _flat(settings)
        # a section that is None is no option that the run did not have
        missing = {key for key in now.keys() - before.keys() if not before.keys() & set(_sections_of(key))}
        before |= {key: defaults[key] for key in missing & defaults.keys()}
        violations = [
            Violation(
                key,
                f"the run in {self.out} has {before.get(key)!r}, this one {now.get(key)!r}",
                "Use the old value, or another directory for a new run",
            )
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if violations:
            raise ConfigError(violations)

    def progress(self) -> Progress | None:
        """That of the newest checkpoint; None when there is none."""
        complete = self._complete()
        return Progress(**_read_json(self.checkpoint(complete[-1]) / "progress.json")) if complete else None

    def _steps(self) -> list[int]:
        """Those with a checkpoint, complete or not, in their order."""
        prefix = f"{self.metrics.key}-"
        return sorted(int(path.name.removeprefix(prefix)) for path in self.checkpoints.glob(f"{prefix}*[0-9]"))

    def _complete(self) -> list[int]:
        return [step for step in self._steps() if (self.checkpoint(step) / "progress.json").exists()]

    # -- writing ------------------------------------------------------------------------------------------------------

    def lock(self) -> TextIO:
        """Keep other jobs out until the file that is returned is closed, at the latest when this process ends.

        Raises ConfigError when another job is writing here.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        file = (self.out / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            problem = f"another job is writing {self.out}: {file.read().strip()}"
            file.close()
            raise ConfigError([Violation("out", problem, "Wait until it has ended, or use another one")]) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    def begin(self, settings: Mapping[str, Any], resume: bool = True) -> None:
        """Clear away what is not continued: of a run that is, steps after its newest checkpoint; else all of it.

        Files that are no run's stay. Call `check` before.
        """
        progress = self.progress() if resume else None
        complete = [] if progress is None else self._complete()
        for step in set(self._steps()) - set(complete):
            self._remove(step)
        if progress is not None:
            self.metrics.cut_after(progress.step)
            self._write(settings)  # with options that are new, as they are now: a default may change
            return
        for path in [self.metrics.path, *map(self.out.joinpath, self._others), *self.out.glob("events.out.tfevents.*")]:
            path.unlink(missing_ok=True)
        self._write(settings)

    def _write(self, settings: Mapping[str, Any]) -> None:
        write_text(self._settings_file, json.dumps(settings, indent=2) + "\n")

    def complete(self, progress: Progress) -> None:
        """Call when the weights are written: makes the checkpoint count, and removes older ones."""
        write_text(self.checkpoint(progress.step) / "progress.json", json.dumps(asdict(progress)) + "\n")
        for step in self._complete()[: -self._num_kept]:
            if step:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """progress.json first: a checkpoint that is half removed must not count."""
        (self.checkpoint(step) / "progress.json").unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint(step))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        remedy = "Remove its directory to go on from the checkpoint before it, or begin a new run elsewhere"
        raise FileError(f"{path} is damaged: {error}. {remedy}") from error


def defaults_of(section: pydantic.BaseModel) -> dict[str, Any]:
    """The defaults of a section and of those inside it, as JSON has them; fields without one are left out.

    Of a section that is off by default that is its default, whatever it would be made of.
    """
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        value = getattr(section, name)
        if isinstance(value, pydantic.BaseModel) and (field.is_required() or default is not None):
            found[name] = defaults_of(value)
        elif not field.is_required():
            found[name] = json.loads(json.dumps(default, default=str))
    return found


def _at_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Sections in which every setting has its default; `defaults` are flat."""
    return {
        section
        for section, values in settings.items()
        if all(key in defaults and defaults[key] == value for key, value in _flat({section: values}).items())
    }


def _sections_of(key: str) -> list[str]:
    """Dotted names of the sections that a dotted key is in."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat
