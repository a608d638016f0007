"""A run's files, from which the same call goes on where it stopped.

    OUT/lock                        locked by the job that writes here
    OUT/run.json                    the settings that a resumed run must share
    OUT/metrics.jsonl               a row per step
    OUT/events.out.tfevents.*       the same for TensorBoard
    OUT/metrics.1.jsonl, ...        rows of attempts that ended before their first checkpoint
    OUT/metrics.1.events.*, ...     their events, under a name that TensorBoard does not read
    OUT/first-checkpoint            written after the first checkpoint, which is its step; it stays
    OUT/checkpoints/step-000050/    weights/ and, with PPO, critic/, by the engine; progress.json, by us

progress.json is written last and in one go: a checkpoint without it does not count, and is removed when the run is
resumed. Rows of steps after the newest checkpoint are dropped then: those steps are repeated. Before the first
checkpoint all steps are repeated, and the rows are set aside. A run whose checkpoints went missing is refused.

All files are read as if a stranger had put them there: damage is a FileError that names the file.
"""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import json
import logging
import os
import re
import shutil
import socket
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self
from weakref import WeakSet

import pydantic

from hybrid_engine.errors import ConfigError, FileError, Violation, clipped, first_of, shortened
from hybrid_engine.files.durable import append_text, naming, sync, write_text
from hybrid_engine.files.reading import open_regular, read_regular

logger = logging.getLogger("hybrid_engine")

Row = dict[str, Any]

_EVENTS = "events.out.tfevents."
_MOST_ROW_NBYTES = 1 << 20
_MOST_JSON_NBYTES = 1 << 24
_REMEDY = "Restore it from a copy, or begin a new run in another directory"
_CHECKPOINT_REMEDY = "Remove its directory to go on from the checkpoint before it, or begin a new run elsewhere"

# All that is there when the first attempt ended before it had anything to keep.
_BEFORE_THE_FIRST_ROW = re.compile(r"lock|log-rank\d+\.txt")


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))
class Progress:
    """Where a run is.

    Attributes:
        step: steps done.
        row: the metrics of that step as far as they were known when the checkpoint was written; "step" is its number.
        reference: digest of the weights from which the run measures its KL; None where it measures none.
    """

    step: Annotated[int, pydantic.Field(ge=0)]
    row: Row
    reference: str | None = None

    @pydantic.model_validator(mode="after")
    def _require_row_of_step(self) -> Self:
        step = self.row.get("step")
        if type(step) is not int or step != self.step:
            raise ValueError(f"its row is of step {shortened(step)}")
        return self


_PROGRESS = pydantic.TypeAdapter(Progress)


class MetricsFile:
    """Rows of metrics as JSON lines, in the order of the number that each has under `key`."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

    def rows(self) -> list[Row]:
        """The rows so far. A last line that was cut off does not count. Raises FileError naming a damaged line."""
        return [row for row, _ in self._read()]

    def check(self) -> None:
        """Raise FileError naming a damaged line, if there is one."""
        for _ in self._read():
            pass

    def has(self, number: int) -> bool:
        """Whether there is a row with this number."""
        return any(row[self.key] == number for row, _ in self._read())

    def _read(self) -> Iterator[tuple[Row, int]]:
        """Yield each row and the offset of the byte behind it, one line in memory at a time."""
        if not os.path.lexists(self.path):
            return
        previous, end = -1, 0
        with naming("reading", self.path, _REMEDY), open_regular(self.path) as file:
            for number in itertools.count(1):
                line = file.readline(_MOST_ROW_NBYTES)
                if not line.endswith(b"\n") and len(line) < _MOST_ROW_NBYTES:
                    return
                end += len(line)
                try:
                    row = self._row_in(line, previous)
                except (ValueError, RecursionError) as error:
                    remedy = "Remove or correct it"
                    raise FileError(f"line {number} of {self.path}: {clipped(str(error))}. {remedy}") from error
                previous = row[self.key]
                yield row, end

    def _row_in(self, line: bytes, previous: int) -> Row:
        """The row that a line is. Raises ValueError unless its number is more than the `previous` one."""
        if len(line) == _MOST_ROW_NBYTES:
            raise ValueError(f"it is longer than {_MOST_ROW_NBYTES} bytes")
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"a row is a mapping, found {shortened(row)}")
        number = row.get(self.key)
        if type(number) is not int or number <= previous:
            raise ValueError(f"{self.key} is a whole number above {previous}, found {shortened(number)}")
        return row

    def append(self, row: Row) -> None:
        """Add a row, whole or not at all. Raises FileError, also for a row that could not be read again."""
        append_text(self.path, _line_for(self.path, row))

    def cut_after(self, last: int) -> None:
        """Keep the rows whose number is at most `last`. Raises FileError."""
        kept = max((end for row, end in self._read() if row[self.key] <= last), default=0)
        if self.path.exists():
            with naming("cutting", self.path):
                os.truncate(self.path, kept)
                sync(self.path)

    def set_aside(self, events: Iterable[Path]) -> Path | None:
        """Give the file and the events of its rows other names; return the file's. None without a file.

        Raises FileError.
        """
        if not os.path.lexists(self.path):
            return None
        names = (self.path.with_suffix(f".{number}{self.path.suffix}") for number in itertools.count(1))
        aside = next(path for path in names if not os.path.lexists(path))
        for path in events:  # first: after a kill, the file that is still there has the rest renamed with it
            with naming("renaming", path):
                path.rename(aside.with_suffix(path.name.replace(_EVENTS, ".events.", 1)))
        with naming("renaming", self.path):
            self.path.rename(aside)
        return aside

    def remove(self) -> None:
        """Remove the rows, those set aside and their events too. Raises FileError."""
        set_aside = re.compile(
            rf"{re.escape(self.path.stem)}\.\d+({re.escape(self.path.suffix)}|\.events\..+)", re.ASCII
        )
        with naming("removing", self.path):
            self.path.unlink(missing_ok=True)
            for path in self.path.parent.iterdir():
                if set_aside.fullmatch(path.name):
                    path.unlink()


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
        """Write the figures of a row; what an interrupted run wrote for its number and later ones is hidden.

        Raises FileError.
        """
        with self._naming():
            if self._writer is None and importlib.util.find_spec("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._out), purge_step=number)
            if self._writer is not None:
                for name, value in row.items():
                    if value is not None and name not in self._left_out:
                        self._writer.add_scalar(self.tag(name), value, number)
                self._writer.flush()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn errors of TensorBoard's writer, whose thread raises them from then on, into one FileError."""
        try:
            with naming("writing TensorBoard's events in", self._out):
                yield
        except FileError:
            self._writer = None  # it would raise the same again when it is closed
            raise

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
        """End the file. Raises FileError."""
        with self._naming():
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
        self._first_checkpoint_file = out / "first-checkpoint"

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
        self,
        settings: Mapping[str, Any],
        resume: bool = True,
        defaults: Mapping[str, Any] | None = None,
        unrecorded: Collection[str] = (),
        free: Collection[str] = (),
    ) -> None:
        """Raise ConfigError unless this directory is new, or has a run that may be resumed or, else, started over.

        Args:
            settings: those that a resumed run must share.
            resume: whether the run is to go on.
            defaults: of these settings, as far as they have any. A run that began before there was an option goes on
                with its default.
            unrecorded: sections of the settings that older runs did not write down. Such a run goes on with any.
            free: dotted names of settings that may change, though older runs wrote them down.

        Raises FileError about a file of the run that cannot be read.
        """
        with naming("reading the run in", self.out, _REMEDY):
            if not os.path.lexists(self._settings_file):
                names = sorted(path.name for path in self.out.iterdir()) if os.path.lexists(self.out) else []
                if foreign := [name for name in names if not _BEFORE_THE_FIRST_ROW.fullmatch(name)]:
                    raise self._not_a_run(f"holds {', '.join(map(clipped, foreign[:3]))} but no run.json")
                return
            before = self._settings()
            settings = {key: value for key, value in settings.items() if key in before or key not in unrecorded}
            known = flat(defaults or {})
            new = settings.keys() - before.keys()
            if before.keys() - settings.keys() or new - _at_defaults(settings, known):
                sections = [first_of([clipped(name) for name in sorted(each)], 5) for each in (before, settings)]
                raise self._not_a_run(
                    f"has a run.json of {sections[0] or 'nothing'}, not of {sections[1]}", " of this kind"
                )
            if resume and self.progress() is not None:
                self.metrics.check()
                self._require_same(before, settings, known, free)
                return
            # an older run has no file of its first checkpoint, but a model once it is finished
            signs = [path for path in (self._first_checkpoint_file, self.out / "model") if os.path.lexists(path)]
            if resume and signs:
                problem = f"{self.out} has no complete checkpoint, but had one: {signs[0].name} is there"
                remedy = "Put its checkpoint back, or begin a new run in another directory"
                raise ConfigError([Violation("out", problem, remedy)])

    def _settings(self) -> dict[str, Any]:
        """Those of the run that is here. Raises FileError."""
        with naming("reading", self._settings_file, _REMEDY):
            found = json.loads(read_regular(self._settings_file, _MOST_JSON_NBYTES))
        if not isinstance(found, dict):
            raise self._not_a_run("has a run.json that is not a mapping")
        return found

    def _not_a_run(self, why: str, kind: str = "") -> ConfigError:
        return ConfigError([Violation("out", f"{self.out} {why}, so it is not a run{kind}", "Use another directory")])

    def _require_same(
        self,
        found: Mapping[str, Any],
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        free: Collection[str],
    ) -> None:
        """Raise ConfigError naming every setting in which the run found here differs; `defaults` are flat.

        What has a default, but is not among the settings, may change.
        """
        before, now = flat(found), flat(settings)
        # a section that is None is no option that the run did not have
        missing = {key for key in now.keys() - before.keys() if not before.keys() & set(_sections_of(key))}
        before |= {key: defaults[key] for key in missing & defaults.keys()}
        free = before.keys() - now.keys() & {*free, *defaults}  # settings that a run had to share once
        violations = [
            Violation(
                key,
                f"the run in {self.out} has {shortened(before.get(key))}, this one {shortened(now.get(key))}",
                "Use the old value, or another directory for a new run",
            )
            for key in sorted((before.keys() | now.keys()) - free)
            if before.get(key) != now.get(key)
        ]
        if violations:
            raise ConfigError(violations)

    def progress(self) -> Progress | None:
        """That of the newest checkpoint; None when there is none. Raises FileError."""
        complete = self._complete()
        if not complete:
            return None
        path = self._progress_file(complete[-1])
        with naming("reading", path, _CHECKPOINT_REMEDY):
            try:
                progress = _PROGRESS.validate_json(read_regular(path, _MOST_JSON_NBYTES))
            except pydantic.ValidationError as error:
                (first, *_) = error.errors(include_url=False)
                place = ".".join(str(part) for part in first["loc"])
                raise ValueError(clipped(f"{place}: {first['msg']}".removeprefix(": "))) from error
            if progress.step != complete[-1]:
                raise ValueError(f"it is of step {progress.step}")
        return progress

    def _progress_file(self, step: int) -> Path:
        return self.checkpoint(step) / "progress.json"

    def _steps(self) -> list[int]:
        """Those with a checkpoint, complete or not, in their order. What else is there is somebody else's, and stays.

        Raises FileError where the place of a checkpoint is taken by a file, or by a link that leads nowhere.
        """
        name_of_step = re.compile(re.escape(self.metrics.key) + r"-(\d{6,})", re.ASCII)
        steps = []
        with naming("reading the checkpoints in", self.checkpoints, _REMEDY):
            for path in self.checkpoints.iterdir() if os.path.lexists(self.checkpoints) else ():
                match = name_of_step.fullmatch(path.name)
                if match is None or self.checkpoint(int(match[1])).name != path.name:
                    continue
                if not path.is_dir():
                    raise FileError(f"reading {path}: it is not a directory. Put the checkpoint back, or remove this")
                steps.append(int(match[1]))
        return sorted(steps)

    def _complete(self) -> list[int]:
        return [step for step in self._steps() if os.path.lexists(self._progress_file(step))]

    # -- writing ------------------------------------------------------------------------------------------------------

    def lock(self) -> Lock:
        """Keep other jobs out until the lock is closed, at the latest when this process ends.

        Raises ConfigError when another job is writing here, FileError where this one cannot.
        """
        with naming("locking", self.out / "lock", "Remove it"):
            self.out.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.out / "lock")
            if (holder := lock.take(f"process {os.getpid()} on {socket.gethostname()}\n")) is not None:
                problem = f"another job is writing {self.out}: {holder}"
                raise ConfigError([Violation("out", problem, "Wait until it has ended, or use another one")])
        return lock

    def begin(self, settings: Mapping[str, Any], resume: bool = True) -> None:
        """Clear away what is not continued: of a run that is, steps after its newest checkpoint; else all of it.

        Rows and events of a run that was to go on, but has no checkpoint yet, are set aside, and a warning says where.
        Files that are no run's stay. Call `check` before. Raises FileError.
        """
        progress = self.progress() if resume else None
        complete = [] if progress is None else self._complete()
        if progress is None:  # it goes before the checkpoints of a run that is started over, and comes after the first
            with naming("removing", self._first_checkpoint_file):
                self._first_checkpoint_file.unlink(missing_ok=True)
        for step in set(self._steps()) - set(complete):
            self._remove(step)
        if progress is not None:
            self.metrics.cut_after(progress.step)
            self._write(settings)  # with options that are new, as they are now: a default may change
            return
        events = list(self.out.glob(f"{_EVENTS}*"))
        if not resume:
            self.metrics.remove()
        elif (aside := self.metrics.set_aside(events)) is not None:
            events = []
            problem = "%s has rows of metrics, but no complete checkpoint: it begins again, and these rows are now %s"
            logger.warning(problem, self.out, aside.name)
        with naming("clearing", self.out):
            for path in [*map(self.out.joinpath, self._others), *events]:
                path.unlink(missing_ok=True)
        self._write(settings)

    def _write(self, settings: Mapping[str, Any]) -> None:
        write_text(self._settings_file, json.dumps(settings, indent=2) + "\n")

    def complete(self, progress: Progress) -> None:
        """Call when the weights are written: makes the checkpoint count, and removes older ones."""
        _line_for(self._progress_file(progress.step), progress.row)
        write_text(self._progress_file(progress.step), json.dumps(asdict(progress)) + "\n")
        if not os.path.lexists(self._first_checkpoint_file):
            write_text(self._first_checkpoint_file, f"{progress.step}\n")
        for step in self._complete()[: -self._num_kept]:
            if step:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; of one that is a link, the link: what it leads to was put elsewhere to be kept."""
        place = self.checkpoint(step)
        with naming("removing", place):
            if place.is_symlink():
                place.unlink()
                return
            self._progress_file(step).unlink(missing_ok=True)  # first: half a checkpoint must not count
            shutil.rmtree(place)


class Lock:
    """A lock on a file, held by this process alone.

    flock belongs to the open file, of which a fork has a copy: processes that a reward's pool has forked, and that
    outlive a killed rank, would hold its lock. So a forked child closes its copy at once. One that is started anew
    (spawn, subprocess) gets none, since the descriptor is closed on exec. fcntl.lockf belongs to the process, but ends
    with the first close of any descriptor of the file, as that of a copy of the run's directory.
    """

    def __init__(self, path: Path) -> None:
        # a link would lead to a file that is somebody else's, and opening a pipe could wait
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o666)
        _LOCKS.add(self)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.close()
            raise ValueError("it is not a regular file")

    def take(self, owner: str) -> str | None:
        """Take the lock and write the owner into the file; return the present owner, and close, where there is one."""
        assert self._descriptor is not None, "it was closed"
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, owner.encode(), 0)
        except BlockingIOError:
            holder = clipped(os.pread(self._descriptor, 200, 0).decode(errors="replace").strip())
            self.close()
            return holder
        except BaseException:
            self.close()
            raise
        return None

    def close(self) -> None:
        """Give the lock up. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_LOCKS: WeakSet[Lock] = WeakSet()


def _close_inherited_locks() -> None:
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited_locks)


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


def _line_for(path: Path, row: Row) -> str:
    """A row as a line of JSON. Raises FileError about `path` where it is too long to be read again."""
    line = json.dumps(row) + "\n"
    if len(line) >= _MOST_ROW_NBYTES:
        problem = f"the row has {len(line)} bytes, and no more than {_MOST_ROW_NBYTES - 1} can be read again"
        remedy = "Return fewer or shorter columns from `evaluate` and `reward`"
        raise FileError(f"writing {path}: {problem}. {remedy}")
    return line


def _at_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Sections in which every setting has its default; `defaults` are flat."""
    return {
        section
        for section, values in settings.items()
        if all(key in defaults and defaults[key] == value for key, value in flat({section: values}).items())
    }


def _sections_of(key: str) -> list[str]:
    """Dotted names of the sections that a dotted key is in."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted keys."""
    by_key: dict[str, Any] = {}
    for key, value in values.items():
        by_key.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return by_key
