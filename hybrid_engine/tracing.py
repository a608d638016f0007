"""`generate_config.trace`: one timeline of every switch over all ranks, for https://ui.perfetto.dev.

    with span("commit", bucket=3):             anywhere inside a switch; nothing where none is recorded
    with timeline.switch("train->infer"):      records the spans of the block, on all ranks; rank 0 writes them

Each rank is a process of the trace; its slices lie in each other as the calls did:

    train->infer  >  fill  >  bucket  >  allocate | shared_memory > read, transfer, write | verify | fence |
                                         offload bucket | commit
                     wait: from the rank's arrival at the end of a phase until all ranks are there

Phases have the names of `ReshardReport.seconds_by_phase`. A torch.profiler that runs meanwhile sees the same names.

Gathering is not part of the switch and of its report. A switch that fails is written too, once the state before is
restored; only after a lost rank there is nobody to gather from. What cannot be written is dropped with one warning.

The file is one JSON array of Chrome's trace events, whose end is overwritten by what is added ("Trace Event Format",
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). It is valid JSON whenever nothing is being
written; readers of the format accept an array without its end, too, so a kill costs nothing that was there. A file that
has grown to its bound becomes FILE.1, in place of the one before, and so does a trace that is there at the start. What
does not begin as ours do is neither moved nor replaced.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import ConfigError, HybridEngineError, Violation

if TYPE_CHECKING:
    from hybrid_engine.ranks.job import Job

logger = logging.getLogger("hybrid_engine")

Event = dict[str, Any]

MOST_EVENTS = 100_000
"""Of one switch on one rank; what comes after is counted only."""

_MOST_OF_ALL = 2_000_000
"""Events of all ranks together, each with as many as the one with most: some 80 bytes each."""


@dataclass
class Recording:
    """Of one switch on one rank.

    Attributes:
        events: in order of their ends, "ts" by this process's clock.
        num_dropped: events beyond `MOST_EVENTS`.
        met_at: microseconds of this process's clock when it left a collective after the switch, as all ranks did.
    """

    events: list[Event] = field(default_factory=list)
    num_dropped: int = 0
    met_at: float = 0.0

    def add(self, **event: Any) -> None:
        """Record an event if there is room; else count it."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        else:
            self.num_dropped += 1


_current: ContextVar[Recording | None] = ContextVar("hybrid_engine_recording", default=None)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Within this context spans and counts are recorded."""
    recording = Recording()
    token = _current.set(recording)
    try:
        yield recording
    finally:
        _current.reset(token)


def microseconds() -> float:
    """This process's clock, which the processes of a host share."""
    return time.perf_counter_ns() / 1000


def span(name: str, **arguments: int | float | str) -> AbstractContextManager[object]:
    """The time of a `with` block; of one that fails, too, with the error's class."""
    recording = _current.get()
    return nullcontext() if recording is None else _timed(recording, name, arguments)


@contextmanager
def timed_span(seconds: dict[str, float], name: str) -> Iterator[None]:
    """A span whose time is added to that of others of its name, also where it fails."""
    start = time.perf_counter()
    try:
        with span(name):
            yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def count(name: str, **values: int) -> None:
    """What there is of something at this moment, e.g. bytes by what they are for."""
    if (recording := _current.get()) is not None:
        recording.add(ph="C", name=name, ts=microseconds(), args=values)


@contextmanager
def _timed(recording: Recording, name: str, arguments: dict[str, int | float | str]) -> Iterator[None]:
    from torch.profiler import record_function

    start = microseconds()
    try:
        with record_function(name):
            yield
    except BaseException as error:
        arguments["error"] = type(error).__name__
        raise
    finally:
        recording.add(ph="X", name=name, ts=start, dur=microseconds() - start, tid=0, args=arguments)


MOST_NBYTES = 64 * 1024**2
"""Of the file; FILE.1 has at most as much, and one switch more."""

_START, _END = b"[", b"\n]\n"
FIRST: dict[str, Any] = {"ph": "M", "name": "process_name", "pid": 0}
"""Beginning of the first event of a header, by which a trace is known as ours."""


class TraceFile:
    """Appends events.

    Args:
        path: of the file.
        header: events that every file begins with, the first as `FIRST` does.
        most_nbytes: of a file.

    Raises OSError, here and when it is written.
    """

    def __init__(self, path: Path, header: Iterable[Event], most_nbytes: int = MOST_NBYTES) -> None:
        self.path, self._header, self._most_nbytes = path, list(header), most_nbytes
        if path.exists() and not (path.is_file() and path.stat().st_size == 0):
            self._put_aside()
        self._begin()

    def append(self, events: Iterable[Event]) -> None:
        """Add events; they are in the file when this returns."""
        if self.path.stat().st_size >= self._most_nbytes:
            self._put_aside()
            self._begin()
        if lines := _lines(events):
            with self.path.open("r+b") as file:
                file.seek(-len(_END), os.SEEK_END)
                file.write(b"," + lines + _END)

    def _begin(self) -> None:
        self.path.write_bytes(_START + _lines(self._header) + _END)

    def _put_aside(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.1")
        for path in (self.path, aside):
            if path.exists() and not _is_ours(path):
                raise FileExistsError(errno.EEXIST, f"{path.name} is there, and is not a trace of ours", str(path))
        self.path.replace(aside)


def _lines(events: Iterable[Event]) -> bytes:
    return ",".join("\n" + json.dumps(event, separators=(",", ":")) for event in events).encode()


def _is_ours(path: Path) -> bool:
    begin = _START + _lines([FIRST]).removesuffix(b"}")
    if not path.is_file():  # a pipe, say, which would be waited for
        return False
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


CONFIG_KEY = "generate_config.trace"


class Timeline:
    """Of one job; made and used by all ranks together.

    Args:
        path: of the file; on rank 0's host.
        job: of all ranks.

    Raises ConfigError on rank 0 when the file cannot be written.
    """

    def __init__(self, path: Path, job: Job) -> None:
        self._job = job
        self._origin = microseconds()
        self._file = _opened(path, job) if job.rank == 0 else None

    @contextmanager
    def switch(self, name: str) -> Iterator[None]:
        """Record the block under this name. Collective. What it raises passes."""
        with recorded() as recording:
            try:
                with span(name):
                    yield
            except Exception as error:
                self._collect_after(error, recording)
                raise
        self._collect(recording)

    def _collect_after(self, error: Exception, recording: Recording) -> None:
        if self._job.agreement.lost is not None:
            return
        try:
            self._collect(recording)
        except HybridEngineError as another:  # the switch's own error is what counts
            logger.warning("%s: a failed switch is missing (%s): %s", CONFIG_KEY, error, another)

    def _collect(self, recording: Recording) -> None:
        self._job.agreement.conclude("trace")
        recording.met_at = microseconds()
        most = _MOST_OF_ALL // self._job.world_size
        own = recording.events[:most], recording.num_dropped + len(recording.events[most:]), recording.met_at
        told = self._job.agreement.gather(own, tuple[list[Event], int, float], "trace", sys.maxsize)
        recordings = [Recording(*each) for each in told]
        if self._file is None:
            return
        try:
            self._file.append(merged(recordings, self._job.hosts, self._origin))
        except OSError as error:
            logger.warning("%s: the trace ends here, %s cannot be written: %s", CONFIG_KEY, self._file.path, error)
            self._file = None


def merged(recordings: Sequence[Recording], hosts: Sequence[str], origin: float) -> Iterator[Event]:
    """The events of all ranks, in microseconds since `origin` by rank 0's clock; a span is before those in it.

    Clocks of other hosts are set by the moment at which all ranks had met: right to the time that a collective takes.
    """
    for rank, recording in enumerate(recordings):
        shift = (recordings[0].met_at - recording.met_at if hosts[rank] != hosts[0] else 0) - origin
        events = sorted(recording.events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        for event in events:
            yield {**event, "ts": event["ts"] + shift, "pid": rank}
        if recording.num_dropped:
            at, known = recording.met_at + shift, {"dropped": recording.num_dropped}
            yield {"ph": "i", "s": "p", "name": "recorded", "ts": at, "pid": rank, "args": known}


def timeline_of(path: Path | None, job: Job) -> Timeline | None:
    """The timeline of a job, if one is asked for. Collective.

    Raises ConfigError on all ranks unless all or none of them ask, and where rank 0 cannot write the file.
    """
    asking = job.agreement.gather(path is not None, bool, "trace")
    with job.agreement.phase("trace"):
        if len(set(asking)) > 1:
            missing = ", ".join(str(rank) for rank, asks in enumerate(asking) if not asks)
            problem = f"not set on rank(s) {missing} of {job.world_size}"
            raise ConfigError([Violation(CONFIG_KEY, problem, "Set it on all ranks, or on none")])
        return None if path is None else Timeline(path, job)


def check_path(path: Path) -> None:
    """Raise ConfigError when a trace cannot be written there; changes nothing. For the rank that writes."""
    if path.is_dir():
        raise _unwritable(path, "it is a directory")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _unwritable(path, "it is not writable, or has no directory")


def _unwritable(path: Path, problem: object) -> ConfigError:
    return ConfigError([Violation(CONFIG_KEY, f"{path}: {problem}", "Name a file in a directory that can be written")])


def _opened(path: Path, job: Job) -> TraceFile:
    header: list[dict[str, Any]] = []
    for rank, host in enumerate(job.hosts):
        header.append({**FIRST, "pid": rank, "args": {"name": f"rank {rank} on {host}"}})
        header.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    header.append({"ph": "i", "s": "g", "name": f"started {started}", "ts": 0, "pid": 0, "tid": 0})
    try:
        return TraceFile(path, header)
    except OSError as error:
        raise _unwritable(path, error.strerror or error) from error
