"""Files of a run, from which the same call resumes.

    OUT/lock                        locked by the job that writes here; it comes first, and marks
                                    the directory as a run
    OUT/run.json                    settings that a resumed run must share
    OUT/run-until-000050.json       those of the steps up to 50, if they were changed after it
    OUT/metrics.jsonl               a row per step
    OUT/events.out.tfevents.*       the same for TensorBoard
    OUT/metrics.1.jsonl, ...        rows of attempts that have no checkpoint any more
    OUT/first-checkpoint            written after the first checkpoint, has its step; never removed
    OUT/checkpoints/step-000050/    weights/ and, with PPO, critic/, by the engine; progress.json;
                                    the place in a stream of prompts; queue.msgpack, with
                                    max_staleness; checksums.json of these files
    OUT/exports/step-000050/        Hugging Face checkpoints, written on request

progress.json is written last and atomically: a checkpoint without it is incomplete, and is removed
when the run is resumed. Rows of steps after the newest checkpoint are dropped then, because those
steps are repeated. Before the first checkpoint all steps are repeated, and the rows are set aside.
A run whose checkpoints are missing is refused.

All files are read as untrusted input: damage is a FileError that names the file.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import logging
import math
import os
import shutil
import socket
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import pydantic

from hybrid_engine.errors import (
    ConfigError,
    FileError,
    Violation,
    Violations,
    clipped,
    first_of,
    require_none,
    shortened,
)
from hybrid_engine.files.checksums import (
    CHECKSUMS,
    checksum_of,
    read_checksums,
    require_as_written,
    write_checksums,
)
from hybrid_engine.files.durable import append_text, naming, sync, write_text
from hybrid_engine.files.reading import open_regular, read_regular

logger = logging.getLogger("hybrid_engine")

Row = dict[str, Any]

_MAX_ROW_NBYTES = 1 << 20
_MAX_JSON_NBYTES = 1 << 24
_REMEDY = "Restore it from a copy, or begin a new run in another directory"
_CHECKPOINT_REMEDY = (
    "Remove its directory to resume from the checkpoint before it, or begin a new run elsewhere"
)

_OWNER = b"process "
"""Beginning of the text in the lock of a run."""


@pydantic.dataclasses.dataclass(
    frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid")
)
class Progress:
    """Progress of a run, as a checkpoint records it.

    Attributes:
        row: metrics of its step that were known when the checkpoint was written.
        reference: digest of the weights from which the run measures its KL; None without a KL.
    """

    row: Row
    reference: str | None = None

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.row["step"])

    @pydantic.model_validator(mode="after")
    def _require_step(self) -> Self:
        step = self.row.get("step")
        # Not isinstance: True is an int, and equals 1.
        if type(step) is not int:
            raise ValueError(f"its row is of step {shortened(step)}")
        return self


_PROGRESS = pydantic.TypeAdapter(Progress)


class MetricsFile:
    """Rows of metrics as JSON lines, in ascending order of their numbers, the values of `key`."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key

    def rows(self) -> list[Row]:
        """Return the rows, without a last line that was cut off.

        Raises FileError that names a damaged line.
        """
        return [row for row, _ in self._read()]

    def has(self, number: int) -> bool:
        """Return whether there is a row with this number."""
        return any(row[self.key] == number for row, _ in self._read())

    def _read(self) -> Iterator[tuple[Row, int]]:
        """Yield each row and the offset in bytes of its end, with one line in memory at a time."""
        # lexists, here and below: a link that leads nowhere is damage, not a missing file.
        if not os.path.lexists(self.path):
            return
        previous = -1
        end = 0
        with naming("reading", self.path, _REMEDY), open_regular(self.path) as file:
            for line_number in itertools.count(1):
                line = file.readline(_MAX_ROW_NBYTES)
                # The end of the file, or a last line that a kill has cut off.
                if not line.endswith(b"\n") and len(line) < _MAX_ROW_NBYTES:
                    return
                end += len(line)
                try:
                    row = self._parse(line, previous)
                except (ValueError, RecursionError) as error:
                    raise FileError(
                        f"line {line_number} of {self.path}: {clipped(str(error))}. "
                        "Remove or correct it",
                        code="damaged-row",
                    ) from error
                previous = row[self.key]
                yield row, end

    def _parse(self, line: bytes, previous: int) -> Row:
        """Return the row of a line. Raises ValueError unless its number is above `previous`."""
        if len(line) == _MAX_ROW_NBYTES:
            raise ValueError(f"it is longer than {_MAX_ROW_NBYTES} bytes")
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"a row must be a mapping, got {shortened(row)}")
        number = row.get(self.key)
        if type(number) is not int or number <= previous:
            raise ValueError(
                f"{self.key} must be a whole number above {previous}, got {shortened(number)}"
            )
        return row

    def append(self, row: Row) -> None:
        """Append a row, completely or not at all.

        Raises FileError, also for a row that is too long to be read again.
        """
        append_text(self.path, _line_of(row, self.path))

    def cut_after(self, last: int) -> None:
        """Keep the rows whose number is at most `last`. Raises FileError."""
        size = max((end for row, end in self._read() if row[self.key] <= last), default=0)
        if self.path.exists():
            with naming("cutting", self.path):
                os.truncate(self.path, size)
                sync(self.path)

    def set_aside(self) -> Path | None:
        """Rename the file; return the new path, None without a file. Raises FileError."""
        if not os.path.lexists(self.path):
            return None
        targets = (
            self.path.with_suffix(f".{number}{self.path.suffix}") for number in itertools.count(1)
        )
        with naming("renaming", self.path):
            return self.path.rename(next(path for path in targets if not os.path.lexists(path)))


class RunFiles:
    """Files of one run. Any rank may read them; only rank 0 may call the methods that write.

    Args:
        out: directory of the run, shared by all ranks.
        key: name of a step: the key of its number in a row, and the prefix of its checkpoint.
        num_kept: number of newest checkpoints to keep. The checkpoint of step 0, with which a run
            began, is kept in addition.
        best: column of the rows; the checkpoint with the best figure is kept in addition. None:
            no column.
        is_lowest_best: whether the lowest figure is the best.
    """

    def __init__(
        self,
        out: Path,
        key: str = "step",
        *,
        num_kept: int = 1,
        best: str | None = None,
        is_lowest_best: bool = False,
    ) -> None:
        self.out = out
        self.metrics = MetricsFile(out / "metrics.jsonl", key)
        self.checkpoints = out / "checkpoints"
        self._num_kept = num_kept
        self._best = best
        self._is_lowest_best = is_lowest_best
        self._settings_file = out / "run.json"
        self._first_checkpoint_file = out / "first-checkpoint"

    def checkpoint(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.checkpoints / f"{self.metrics.key}-{step:06d}"

    def weights(self, step: int) -> Path:
        """Return the directory for `ActorHybridWorker.save_checkpoint`."""
        return self.checkpoint(step) / "weights"

    def export(self, step: int) -> Path:
        """Return the directory of a Hugging Face checkpoint that is written during the run."""
        return self.out / "exports" / f"{self.metrics.key}-{step:06d}"

    def critic(self, step: int) -> Path:
        """Return the directory for `ValueModel.save_checkpoint`."""
        return self.checkpoint(step) / "critic"

    # -- reading ------------------------------------------------------------------------------

    def check(
        self,
        settings: Mapping[str, Any],
        resume: bool = True,
        defaults: Mapping[str, Any] | None = None,
        free: Collection[str] = (),
    ) -> None:
        """Check that the directory is new, or has a run that may be resumed or started over.

        Args:
            settings: settings that a resumed run must share.
            resume: whether the run is to be resumed, not started over.
            defaults: the same settings by default. A run that is older than an option resumes with
                the option's default.
            free: dotted names of settings or sections that may change though the run recorded them.

        Raises:
            ConfigError: the directory has something else, or the run cannot be resumed.
            FileError: a file of the run cannot be read.
        """
        with naming("reading the run in", self.out, _REMEDY):
            if not os.path.lexists(self._settings_file):
                names = []
                if self.out.exists() and not self.out.is_dir():
                    raise self._not_a_run("is not a directory")
                if os.path.lexists(self.out):
                    names = sorted(path.name for path in self.out.iterdir())
                foreign = names
                lock = self.out / "lock"
                # A killed process may have left the text cut off, or empty.
                # As much of "process ", of 8 bytes, as was written.
                if "lock" in names and _OWNER.startswith(read_regular(lock, 1 << 12)[:8]):
                    # A run that died early: run.json comes before these.
                    foreign = [
                        name for name in names if name.endswith(("checkpoint", "checkpoints"))
                    ]
                if foreign:
                    shown = ", ".join(map(clipped, foreign[:3]))
                    raise self._not_a_run(f"holds {shown} but no run.json")
                return
            recorded = self._settings()
            if recorded.keys() - settings.keys():
                old, new = (
                    first_of([clipped(name) for name in sorted(sections)], 5)
                    for sections in (recorded, settings)
                )
                raise self._not_a_run(f"has a run.json of {old}, not of {new}", " of this kind")
            if resume and self.progress() is not None:
                self.metrics.rows()  # raises if a line is damaged
                require_none(self._differences("", recorded, settings, defaults, free))
            elif resume and os.path.lexists(self._first_checkpoint_file):
                raise ConfigError.of(
                    "out",
                    f"{self.out} has no complete checkpoint, but had one: first-checkpoint is "
                    "there",
                    "Put its checkpoint back, or begin a new run in another directory",
                    code="checkpoint-is-missing",
                )

    def _settings(self) -> dict[str, Any]:
        """Return the recorded settings. Raises FileError."""
        with naming("reading", self._settings_file, _REMEDY):
            recorded = json.loads(read_regular(self._settings_file, _MAX_JSON_NBYTES))
        if not isinstance(recorded, dict):
            raise self._not_a_run("has a run.json that is not a mapping")
        return recorded

    def _not_a_run(self, reason: str, kind: str = "") -> ConfigError:
        return ConfigError.of(
            "out",
            f"{self.out} {reason}, so it is not a run{kind}",
            "Use another directory",
            code="not-a-run",
        )

    def _differences(
        self,
        key: str,
        recorded: Any,
        now: Any,
        default: Any,
        free: Collection[str],
    ) -> Violations:
        """Yield the settings at a dotted key, or in its section, that differ from the run's."""
        if key in free or recorded == now:
            return
        if isinstance(recorded, Mapping) and isinstance(now, Mapping):
            defaults = default if isinstance(default, Mapping) else {}
            for name in sorted(recorded.keys() | now.keys()):
                inner = defaults.get(name)
                old = recorded.get(name, inner)
                inner_key = f"{key}.{name}" if key else name
                yield from self._differences(inner_key, old, now.get(name), inner, free)
            return
        yield Violation(
            key,
            f"the run in {self.out} has {shortened(recorded)}, this one {shortened(now)}",
            "Use the old value, another directory, or for some keys `changed` of `train`",
            code="differs-from-run",
        )

    def require_reference(self, progress: Progress, now: str | None) -> None:
        """Raise ConfigError if the run measures its KL from other weights than now, by digest."""
        before = progress.reference
        if before and now and before != now:
            raise ConfigError.of(
                "model",
                f"the run in {self.out} measures its KL from weights with digest {before}; the "
                f"worker's have {now}",
                "Build a new worker, with the model, seed and weights that the run began with",
                code="different-reference",
            )

    def progress(self) -> Progress | None:
        """Return the progress of the newest complete checkpoint, if any.

        Raises FileError if a file of that checkpoint has changed since it was written.
        """
        complete = self._complete_steps()
        if not complete:
            return None
        path = self._progress_file(complete[-1])
        with naming("reading", path, _CHECKPOINT_REMEDY):
            # Those of the engine in weights/ and critic/ have checksums of their own.
            for name, checksum in read_checksums(path.parent, _CHECKPOINT_REMEDY).items():
                require_as_written(path.with_name(name), checksum, _CHECKPOINT_REMEDY)
            progress = _PROGRESS.validate_json(read_regular(path, _MAX_JSON_NBYTES))
            # A copy of another checkpoint under this name.
            if progress.step != complete[-1]:
                raise ValueError(f"it is of step {progress.step}")
        return progress

    def _progress_file(self, step: int) -> Path:
        return self.checkpoint(step) / "progress.json"

    def _steps(self) -> list[int]:
        """Return the steps with a checkpoint, complete or not, in ascending order.

        Other files in the directory belong to the user. They are ignored, and stay.

        Raises FileError if the path of a checkpoint is a file, or a link that leads nowhere.
        """
        steps = []
        with naming("reading the checkpoints in", self.checkpoints, _REMEDY):
            if not os.path.lexists(self.checkpoints):
                return []
            for path in self.checkpoints.iterdir():
                number = path.name.removeprefix(f"{self.metrics.key}-")
                # The comparison rejects other digits and numbers of zeros, which are not ours.
                if not number.isdecimal() or self.checkpoint(int(number)).name != path.name:
                    continue
                if not path.is_dir():
                    raise FileError(
                        f"reading {path}: it is not a directory. Put the checkpoint back, or "
                        "remove this",
                        code="not-a-directory",
                    )
                steps.append(int(number))
        return sorted(steps)

    def _complete_steps(self) -> list[int]:
        return [step for step in self._steps() if os.path.lexists(self._progress_file(step))]

    # -- writing ------------------------------------------------------------------------------

    def lock(self) -> Lock:
        """Lock out other jobs until the lock is closed or this process ends.

        Raises:
            ConfigError: another job is writing here.
            FileError: this process cannot write here.
        """
        with naming("locking", self.out / "lock", "Remove it"):
            self.out.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.out / "lock")
            holder = lock.take(f"{_OWNER.decode()}{os.getpid()} on {socket.gethostname()}\n")
            if holder is not None:
                raise ConfigError.of(
                    "out",
                    f"another job is writing {self.out}: {holder}",
                    "Wait until it has ended, or use another directory",
                    code="run-is-locked",
                )
        return lock

    def begin(self, settings: Mapping[str, Any], resume: bool = True) -> None:
        """Remove what is not continued, and record the settings. Call `check` before.

        If the run is resumed, these are the steps after its newest checkpoint; otherwise all its
        checkpoints, and its rows are set aside, with a warning. TensorBoard hides the events of
        these steps by itself, because the next ones begin with the number of the first. Files that
        do not belong to a run stay.

        Raises FileError.
        """
        progress = self.progress() if resume else None
        complete = [] if progress is None else self._complete_steps()
        if progress is None:
            # Before the checkpoints: if the process is killed in between, the next call must not
            # find this file without a checkpoint, which would look like a loss.
            with naming("removing", self._first_checkpoint_file):
                self._first_checkpoint_file.unlink(missing_ok=True)
        for step in set(self._steps()) - set(complete):
            self._remove(step)
        if progress is None:
            aside = self.metrics.set_aside()
            if aside is not None:
                logger.warning(
                    "%s begins again, without a checkpoint: rows of metrics are now %s",
                    self.out,
                    aside.name,
                )
        else:
            self.metrics.cut_after(progress.step)
            if self._settings() != settings:
                before = json.dumps(self._settings(), indent=2) + "\n"
                write_text(self.out / f"run-until-{progress.step:06d}.json", before)
        # Also in a resumed run: options that are newer than the run are recorded with the values
        # that they have now, since their defaults may change.
        write_text(self._settings_file, json.dumps(settings, indent=2) + "\n")

    def complete(self, progress: Progress) -> None:
        """Mark a checkpoint as complete, after its weights were written; remove older ones."""
        _line_of(progress.row, self._progress_file(progress.step))  # raises if it is too long
        text = json.dumps(asdict(progress)) + "\n"
        directory = self.checkpoint(progress.step)
        with naming("reading", directory):
            checksums = {
                path.name: checksum_of(path) for path in directory.iterdir() if path.is_file()
            }
        # Of an attempt to complete it that failed.
        checksums.pop(CHECKSUMS, None)
        checksums["progress.json"] = f"{zlib.crc32(text.encode()):08x}"
        write_checksums(directory, checksums)
        write_text(self._progress_file(progress.step), text)
        if not os.path.lexists(self._first_checkpoint_file):
            write_text(self._first_checkpoint_file, f"{progress.step}\n")
        steps = self._complete_steps()
        kept = {0, *steps[-self._num_kept :], self.best_step()}
        for step in steps:
            if step not in kept:
                self._remove(step)

    def best_step(self) -> int | None:
        """Return the step of the best complete checkpoint, the first of several that are equal.

        None if no column was named, or none of their rows has a finite figure in it. The row of a
        step is written after its checkpoint, so the newest may not count yet. Raises FileError.
        """
        if self._best is None:
            return None
        steps = set(self._complete_steps())
        finite = {
            row[self.metrics.key]: figure
            for row in self.metrics.rows()
            if row[self.metrics.key] in steps
            and isinstance(figure := row.get(self._best), int | float)
            and math.isfinite(figure)
        }
        choose = min if self._is_lowest_best else max
        return choose(finite, key=finite.__getitem__, default=None)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint. Of a link only the link: its target was moved away to be kept."""
        directory = self.checkpoint(step)
        with naming("removing", directory):
            if directory.is_symlink():
                directory.unlink()
                return
            # First, so that half a checkpoint is never complete.
            self._progress_file(step).unlink(missing_ok=True)
            shutil.rmtree(directory)


class Lock(io.FileIO):
    """Lock on a file, held by this process only.

    flock belongs to the open file description, which a forked child shares. Children that a
    reward's process pool has forked, and that outlive a killed rank, would keep its lock. So a
    forked child closes its copy at once. Processes that are started with exec (spawn, subprocess)
    get none, because the descriptor is closed on exec.

    fcntl.lockf belongs to the process, but ends when any descriptor of the file is closed, for
    example after the run's directory was copied.

    A lock that no variable holds any more is closed, so that it cannot lock a run for ever.
    """

    def __init__(self, path: Path) -> None:
        # Not through a link, which could lead to a file of the user; and without blocking, because
        # opening a pipe could wait forever.
        flags = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        super().__init__(path, "r+", opener=lambda name, mode: os.open(name, mode | flags, 0o666))
        _LOCKS.add(self)
        if not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
            self.close()
            raise ValueError("it is not a regular file")

    def take(self, owner: str) -> str | None:
        """Lock the file and write `owner` into it.

        If another process holds the lock, return the owner that it wrote, and close this lock.
        """
        try:
            fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.truncate(0)
            self.write(owner.encode())
        except BlockingIOError:
            text = self.read(200).decode(errors="replace")
            self.close()
            return clipped(text.strip())
        except BaseException:
            self.close()
            raise
        return None

    def __del__(self) -> None:
        self.close()


_LOCKS: WeakSet[Lock] = WeakSet()


def _close_inherited_locks() -> None:
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited_locks)


def _line_of(row: Row, path: Path) -> str:
    """Return a row as a line of JSON. Raises FileError about `path` if it is too long to read."""
    line = json.dumps(row) + "\n"
    if len(line) >= _MAX_ROW_NBYTES:
        raise FileError(
            f"writing {path}: the row has {len(line)} bytes, and at most {_MAX_ROW_NBYTES - 1} "
            "can be read again. Return fewer or shorter columns from `evaluate` and `reward`",
            code="row-too-long",
        )
    return line
