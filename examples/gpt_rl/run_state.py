"""What a run leaves in its directory, so that the same command goes on where it stopped.

    OUT/lock                          held by the job that writes here; see run_lock.py
    OUT/run.json                      configuration of the run; marks the directory as one of ours
    OUT/metrics.jsonl                 one row per iteration; row 0 is the warm-up
    OUT/checkpoints/iteration-0000/   after the warm-up: also the frozen reference, so it stays
    OUT/checkpoints/iteration-0020/   the two newest of the others; weights/ and, with PPO, critic/ by the engine,
                                      progress.json by us
    OUT/checkpoints/latest            name of the newest that is complete

A checkpoint counts once `latest` names it, and `latest` is replaced in one step. Rows of iterations after it are
dropped when the run is resumed: those iterations are repeated, with the same batches and samples.

A resumed run removes what a killed save left: incomplete weights, and checkpoints later than `latest` that have no
progress.json. Nothing else is deleted because a file is missing or damaged, and nothing that this program did not
write: a directory that is not clearly a run, or a run whose progress is unknown, is refused with a remedy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, FileError, Violation, shortened
from hybrid_engine.files.documents import MOST_BYTES, MOST_JSON_BYTES
from hybrid_engine.files.durable import append_text, naming, write_text

NUM_KEPT = 2

_TEMPORARY = r"(\.incomplete|\.replaced|\.replaced\.removed)?"  # see files/durable.py
_CHECKPOINT_NAME = re.compile(r"iteration-(\d{4,9})")
_IN_A_CHECKPOINT = re.compile(rf"(weights|critic|progress\.json){_TEMPORARY}")
_IN_CHECKPOINTS = re.compile(rf"{_CHECKPOINT_NAME.pattern}|latest{_TEMPORARY}")
# What is there when the first attempt ended before it had anything to keep.
_BEFORE_THE_FIRST_ROW = re.compile(rf"lock|log-rank\d+\.txt|run\.json{_TEMPORARY}")
# Sections that every run.json has.
_SECTIONS = {"world_size", "actor_config", "generate_config", "rl_config"}

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
    """The files of one run. Any rank may read; only rank 0 may call the methods that write.

    What reads raises FileError about a file that is damaged or cannot be read, with the remedy.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_file = path / "lock"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.latest_file = self.checkpoints / "latest"
        self._fingerprint_file = path / "run.json"

    def checkpoint(self, iteration: int) -> Path:
        """Directory of that iteration's checkpoint."""
        return self.checkpoints / f"iteration-{iteration:04d}"

    def weights(self, iteration: int) -> Path:
        """What `ActorHybridWorker.save_checkpoint` is given."""
        return self.checkpoint(iteration) / "weights"

    def critic(self, iteration: int) -> Path:
        """What `ValueModel.save_checkpoint` is given."""
        return self.checkpoint(iteration) / "critic"

    # -- may a run start here? ----------------------------------------------------------------------------------------

    def require_ours(self) -> None:
        """Raise ConfigError unless this is a run's directory, an empty one, or none yet. Writes nothing."""
        if _exists(self._fingerprint_file):
            self._fingerprint()
            return
        others = [name for name in _names(self.path) if not _BEFORE_THE_FIRST_ROW.fullmatch(name)]
        if others:
            problem = f"{self.path} holds {_listed(others)} but no {self._fingerprint_file.name}, so it is not a run"
            remedy = f"Use another --out, put {self._fingerprint_file.name} back, or remove those files yourself"
            raise ConfigError([Violation("--out", problem, remedy)])

    def require_resumable(self, fingerprint: Mapping[str, Any], chosen: Mapping[str, Any] | None = None) -> None:
        """Raise unless a run with this configuration can go on here, or start without a loss. Writes nothing.

        Arguments are those of `require_same`.
        """
        self.require_ours()
        if self.progress() is not None or self._lacks_only_latest():
            self.require_same(fingerprint, chosen)
            self.rows()
            return
        found = self._complete_iterations() or [number for number in self._iterations() if number > 0]
        if not found and not self.rows():
            return  # at most the first checkpoint was begun
        what = f"{len(found)} checkpoint(s)" if found else f"rows in {self.metrics_file.name}"
        raise FileError(f"{self.latest_file} is missing, though {self.path} holds {what}. {self._repair_of_latest()}")

    def require_replaceable(self) -> None:
        """Raise ConfigError unless what `start_over` would remove is all this program's. Writes nothing."""
        self.require_ours()
        foreign = [name for name in _names(self.checkpoints) if not _IN_CHECKPOINTS.fullmatch(name)]
        for iteration in self._iterations():
            directory = self.checkpoint(iteration)
            names = [name for name in _names(directory) if not _IN_A_CHECKPOINT.fullmatch(name)]
            foreign.extend(f"{directory.name}/{name}" for name in names)
        if foreign:
            problem = f"{self.checkpoints} holds {_listed(foreign)}, which no run has written"
            raise ConfigError([Violation("--no-resume", problem, "Move it elsewhere, or use another --out")])

    def require_room(self) -> None:
        """Raise FileError unless another checkpoint like the latest one fits beside it. Writes nothing."""
        progress, place = self.progress(), self.checkpoints
        if progress is None:
            return
        with naming("measuring", place):
            files = [path for path in self.checkpoint(progress.iteration).rglob("*") if path.is_file()]
            needed, free = sum(path.stat().st_size for path in files), shutil.disk_usage(place).free
        if free < needed:
            problem = f"the next checkpoint needs {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free"
            raise FileError(f"{place}: too little space: {problem}. Free some space there")

    def require_same(self, fingerprint: Mapping[str, Any], chosen: Mapping[str, Any] | None = None) -> None:
        """Raise ConfigError naming every setting in which the run found here differs from `fingerprint`.

        Args:
            fingerprint: all settings, defaults included.
            chosen: those of them that differ from their defaults; default: all. A setting that is younger than the run
                is no difference unless it was chosen: the run did what is the default now.
        """
        if not _exists(self._fingerprint_file):
            return
        before, now = _flat(self._fingerprint()), _flat(fingerprint)
        defaults = now.keys() - _flat(fingerprint if chosen is None else chosen).keys()
        before = {key: now[key] for key in defaults} | before
        remedy = "Use the old value, another --out, or --no-resume to start over"
        violations = [
            Violation(key, f"the run in {self.path} has {before.get(key)!r}, this one {now.get(key)!r}", remedy)
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if violations:
            raise ConfigError(violations)

    def _fingerprint(self) -> dict[str, Any]:
        path = self._fingerprint_file
        remedy = "Put the run's own file back, use another --out, or remove the directory yourself"
        values = _read_json(path, remedy)
        if not isinstance(values, dict) or not values.keys() >= _SECTIONS:
            raise FileError(f"{path} is not the configuration of a run ({shortened(values)}). {remedy}")
        return values

    # -- reading ------------------------------------------------------------------------------------------------------

    def progress(self) -> Progress | None:
        """Of the latest complete checkpoint; None when there is none."""
        path = self.latest_file
        if not _exists(path):
            return None
        name = _read(path, self._repair_of_latest()).decode(errors="replace").strip()
        iteration = _iteration_of(name)
        if iteration is None:
            raise FileError(f"{path} says {shortened(name)}, not a checkpoint's name. {self._repair_of_latest()}")
        if not self.checkpoint(iteration).is_dir():
            raise FileError(f"{path} names {name}, which does not exist. {self._repair_of_latest()}")
        return self._progress_of(iteration)

    def way_back(self, iteration: int) -> str:
        """What to do when the checkpoint of that iteration is damaged."""
        older = [number for number in self._complete_iterations() if number < iteration]
        if not older:
            return "No older checkpoint is left: start over with --no-resume"
        name = self.checkpoint(older[-1]).name
        return f"To go on from the checkpoint before it, write {name} into {self.latest_file}"

    def rows(self) -> list[Row]:
        """The metrics written so far. A last line that was cut off does not count."""
        path = self.metrics_file
        if not _exists(path):
            return []
        remedy = "Correct the line or remove it; the run goes on without that row"
        rows = []
        for number, line in enumerate(_read(path, remedy, MOST_BYTES).split(b"\n")[:-1], start=1):
            with naming(f"reading line {number} of", path, remedy):
                rows.append(json.loads(line))
            if (problem := _problem_of(rows[-1])) is not None:
                raise FileError(f"reading line {number} of {path}: {problem}. {remedy}")
        return rows

    def _progress_of(self, iteration: int) -> Progress:
        path, remedy = self.checkpoint(iteration) / "progress.json", self.way_back(iteration)
        values = _read_json(path, remedy)
        if not isinstance(values, dict) or not values.keys() >= {"iteration", "row"}:
            raise FileError(f"{path} is not a checkpoint's progress ({shortened(values)}). {remedy}")
        problem = _problem_of(values["row"])
        if problem is None and not values["iteration"] == values["row"]["iteration"] == iteration:
            problem = f"belongs to iteration {shortened(values['iteration'])}, not to {iteration}"
        if problem is not None:
            raise FileError(f"{path}: {problem}. {remedy}")
        return Progress(iteration, values["row"])

    def _repair_of_latest(self) -> str:
        complete = self._complete_iterations()
        if not complete:
            return "No complete checkpoint is left: start over with --no-resume, or use another --out"
        name = self.checkpoint(complete[-1]).name
        return f"Write {name}, the newest complete checkpoint, into it, or start over with --no-resume"

    def _iterations(self) -> list[int]:
        """Of which there is a checkpoint, complete or not, in their order."""
        numbers = (_iteration_of(name) for name in _names(self.checkpoints))
        return sorted(number for number in numbers if number is not None)

    def _complete_iterations(self) -> list[int]:
        """progress.json is the last thing that is written into a checkpoint."""
        return [number for number in self._iterations() if (self.checkpoint(number) / "progress.json").is_file()]

    def _lacks_only_latest(self) -> bool:
        """Whether the run was killed between the last two steps of its first checkpoint: nothing was done after it."""
        if _exists(self.latest_file) or not self._iterations() == self._complete_iterations() == [0]:
            return False
        self._progress_of(0)
        return all(row["iteration"] == 0 for row in self.rows())

    # -- writing ------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Call when the run is resumable: finish, or remove, what a kill during a save left."""
        if self._lacks_only_latest():
            self._name_latest(0)
        if (progress := self.progress()) is None:
            return
        for iteration in self._iterations():
            self._discard_incomplete(iteration, and_weights=iteration > progress.iteration)

    def start_over(self, fingerprint: Mapping[str, Any]) -> None:
        """Remove what an earlier run left here, nothing else, and note the configuration of the new one."""
        self.require_replaceable()
        with naming("starting a run in", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.latest_file.unlink(missing_ok=True)
            for iteration in self._iterations():
                _remove_checkpoint(self.checkpoint(iteration))
            for path in [self.metrics_file, self.path / "reward.png", *self.path.glob("events.out.tfevents.*")]:
                path.unlink(missing_ok=True)
        write_text(self._fingerprint_file, json.dumps(fingerprint, indent=2) + "\n")

    def complete_checkpoint(self, progress: Progress) -> None:
        """Call when the weights are written: makes the checkpoint the latest one and removes old ones."""
        directory = self.checkpoint(progress.iteration)
        text = json.dumps({"iteration": progress.iteration, "row": progress.row})
        write_text(directory / "progress.json", text + "\n")
        self._name_latest(progress.iteration)
        # One that a run left behind after `latest` is from a future that will come again.
        past = [number for number in self._complete_iterations() if 0 < number <= progress.iteration]
        kept = {0, *past[-NUM_KEPT:]}
        for iteration in self._iterations():
            if iteration not in kept:
                with naming("removing", self.checkpoint(iteration)):
                    _remove_checkpoint(self.checkpoint(iteration))

    def discard_incomplete(self, iteration: int) -> None:
        """Call when a checkpoint could not be written: what is there of it would keep a full disk full."""
        self._discard_incomplete(iteration, and_weights=True)

    def _discard_incomplete(self, iteration: int, *, and_weights: bool) -> None:
        """What a save began, and the weights too of a checkpoint without progress.json if `and_weights`."""
        directory = self.checkpoint(iteration)
        with naming("removing", directory):
            if and_weights and iteration not in self._complete_iterations() and directory.exists():
                _remove_checkpoint(directory)
                return
            for part in (self.weights(iteration), self.critic(iteration)):
                incomplete = part.with_name(f"{part.name}.incomplete")
                if incomplete.exists() and not directory.is_symlink():
                    shutil.rmtree(incomplete)

    def _name_latest(self, iteration: int) -> None:
        write_text(self.latest_file, self.checkpoint(iteration).name + "\n")

    def append_row(self, row: Row) -> None:
        """Add a line to the metrics."""
        append_text(self.metrics_file, json.dumps(row) + "\n")

    def drop_rows_after(self, iteration: int) -> None:
        """Keep the rows up to `iteration`."""
        kept = [row for row in self.rows() if row["iteration"] <= iteration]
        write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))


def _remove_checkpoint(directory: Path) -> None:
    """Remove what a run writes into a checkpoint; the directory too, unless it holds anything else."""
    if directory.is_symlink():
        directory.unlink()
        return
    names = _names(directory)
    # progress.json first: what is half removed does not count as complete
    for path in sorted(directory / name for name in names if _IN_A_CHECKPOINT.fullmatch(name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if all(_IN_A_CHECKPOINT.fullmatch(name) for name in names):
        directory.rmdir()


def _iteration_of(name: str) -> int | None:
    """That a checkpoint of this name belongs to; None for other names."""
    match = _CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) if match and name == f"iteration-{int(match[1]):04d}" else None


def _problem_of(row: Any) -> str | None:
    """What is wrong with a row of metrics."""
    if not isinstance(row, dict):
        return f"not a row of metrics: {shortened(row)}"
    iteration = row.get("iteration")
    if type(iteration) is not int or iteration < 0:
        return f"iteration is {shortened(iteration)}, not a number from 0 on"
    wrong = {name: value for name, value in row.items() if value is not None and type(value) not in (int, float)}
    return f"not numbers: {shortened(wrong)}" if wrong else None


def _exists(path: Path) -> bool:
    """Whether there is something of that name, if only a link to nowhere."""
    with naming("looking for", path):
        return path.exists() or path.is_symlink()


def _names(directory: Path) -> list[str]:
    """What is in a directory; nothing where it does not exist."""
    with naming("listing", directory):
        return sorted(path.name for path in directory.iterdir()) if _exists(directory) else []


def _read(path: Path, remedy: str, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    with naming("reading", path, remedy):
        if path.is_symlink():  # what is written later would be written elsewhere
            raise FileError(f"{path} is a link to {shortened(os.readlink(path))}, not a file of the run. {remedy}")
        if not path.is_file():  # a pipe would never end
            raise FileError(f"{path} is {'not a file' if _exists(path) else 'missing'}. {remedy}")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise FileError(f"{path} is larger than {most_bytes:,} bytes, which no run has written. {remedy}")
        return content


def _read_json(path: Path, remedy: str) -> Any:
    content = _read(path, remedy)
    with naming("reading", path, remedy):
        return json.loads(content)


def _listed(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat.update(_flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
