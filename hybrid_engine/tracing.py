"""`generate_config.trace`: a timeline of every switch, one file per rank, for ui.perfetto.dev.

    with span("commit", bucket=3):          in a switch; no effect unless a timeline is recorded
    with timeline.switch("train->infer"):   records the spans of the block in this rank's file

Perfetto opens the files of several ranks together. Each rank is a process of the trace; its slices
are nested as the calls were:

    train->infer  >  fill  >  bucket  >  allocate | shared_memory > read, transfer, write | verify |
                                         fence | offload bucket | commit
                     wait: from the rank's arrival at the end of a phase until all ranks are there

Phases have the names of `ReshardReport.seconds_by_phase`. A torch.profiler that runs meanwhile sees
the same names. Times are microseconds of the host's monotonic clock, so ranks of one host are
aligned and those of different hosts are not.

Writing is not part of the switch or its report. A failed switch is written too. If the file cannot
be written, the trace ends with one warning.

The file is a JSON array of Chrome trace events, whose end is overwritten by new events ("Trace
Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). It is valid
JSON except during a write; readers of the format also accept an array without its end, so a killed
process loses no earlier events. A file that reaches its size limit becomes FILE.1, replacing the
previous one, and so does a trace that exists at the start. A file that does not begin with our
header is neither moved nor replaced.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_engine.ranks.job import Job

logger = logging.getLogger("hybrid_engine")

Event = dict[str, Any]

MAX_EVENTS = 100_000
"""Maximum number of events of one switch on one rank; further events are only counted."""


@dataclass
class Recording:
    """Events of one switch on one rank.

    Attributes:
        events: in order of their ends, "ts" in microseconds of this process's clock.
        num_dropped: events beyond `MAX_EVENTS`.
    """

    events: list[Event] = field(default_factory=list)
    num_dropped: int = 0

    def add(self, **event: Any) -> None:
        """Record an event, or count it if the recording is full."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.num_dropped += 1


_current: ContextVar[Recording | None] = ContextVar("hybrid_engine_recording", default=None)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Return a context in which spans and counts are recorded."""
    recording = Recording()
    token = _current.set(recording)
    try:
        yield recording
    finally:
        _current.reset(token)


def microseconds() -> float:
    """Return the time of a clock that all processes of a host share."""
    return time.perf_counter_ns() / 1000


def span(name: str, **arguments: int | float | str) -> AbstractContextManager[object]:
    """Return a context that records its duration, with the class of the error if it raises."""
    recording = _current.get()
    return nullcontext() if recording is None else _timed(recording, name, arguments)


def count(name: str, **values: int) -> None:
    """Record present amounts of something, e.g. bytes by purpose."""
    recording = _current.get()
    if recording is not None:
        recording.add(ph="C", name=name, ts=microseconds(), args=values)


@contextmanager
def _timed(
    recording: Recording,
    name: str,
    arguments: dict[str, int | float | str],
) -> Iterator[None]:
    from torch.profiler import record_function

    start = microseconds()
    try:
        with record_function(name):
            yield
    except BaseException as error:
        arguments["error"] = type(error).__name__
        raise
    finally:
        recording.add(
            ph="X",
            name=name,
            ts=start,
            dur=microseconds() - start,
            tid=0,
            args=arguments,
        )


MAX_NBYTES = 64 * 1024**2
"""Size in bytes at which a file is rotated; FILE and FILE.1 exceed it by at most one switch."""

_START, _END = b"[", b"\n]\n"
FIRST: Event = {"ph": "M", "name": "process_name"}
"""Beginning of the first event of a header; identifies our trace files."""


class TraceFile:
    """Trace file to which events are appended.

    Args:
        path: path of the file.
        header: first events of every file; the first one begins with `FIRST`.
        most_nbytes: size in bytes at which the file is rotated.

    The constructor and `append` raise OSError.
    """

    def __init__(self, path: Path, header: Iterable[Event], most_nbytes: int = MAX_NBYTES) -> None:
        self.path = path
        self._header = list(header)
        self._most_nbytes = most_nbytes
        if path.exists() and not (path.is_file() and path.stat().st_size == 0):
            self._put_aside()
        self._begin()

    def append(self, events: Iterable[Event]) -> None:
        """Append events to the file, and write them out."""
        if self.path.stat().st_size >= self._most_nbytes:
            self._put_aside()
            self._begin()
        lines = _lines(events)
        if lines:
            with self.path.open("r+b") as file:
                # Over the end of the list, so that the file is valid JSON after every switch.
                file.seek(-len(_END), os.SEEK_END)
                file.write(b"," + lines + _END)

    def _begin(self) -> None:
        self.path.write_bytes(_START + _lines(self._header) + _END)

    def _put_aside(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.1")
        for path in (self.path, aside):
            if path.exists() and not _is_ours(path):
                raise FileExistsError(
                    errno.EEXIST, f"{path.name} is there, and is not a trace of ours", str(path)
                )
        self.path.replace(aside)


def _lines(events: Iterable[Event]) -> bytes:
    return ",".join("\n" + json.dumps(event, separators=(",", ":")) for event in events).encode()


def _is_ours(path: Path) -> bool:
    begin = _START + _lines([FIRST]).removesuffix(b"}")
    if not path.is_file():  # opening a pipe would block
        return False
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


CONFIG_KEY = "generate_config.trace"


class Timeline:
    """Timeline of one rank's switches, in a file.

    Args:
        path: file for rank 0; see `path_of_rank`.
        job: job of all ranks.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path, job: Job) -> None:
        self._job = job
        self._file: TraceFile | None = _opened(path_of_rank(path, job.rank), job)

    @contextmanager
    def switch(self, name: str) -> Iterator[None]:
        """Record the block under this name, and write it, also if the block raises.

        No collective.
        """
        with recorded() as recording:
            try:
                with span(name):
                    yield
            finally:
                self._write(recording)

    def _write(self, recording: Recording) -> None:
        if self._file is None:
            return
        try:
            self._file.append(sorted_events(recording, self._job.rank))
        except OSError as error:
            logger.warning(
                "%s: the trace ends here, %s cannot be written: %s",
                CONFIG_KEY,
                self._file.path,
                error,
            )
            self._file = None


def sorted_events(recording: Recording, rank: int) -> Iterator[Event]:
    """Yield the events by time; a span precedes the spans inside it."""
    # Spans are recorded at their ends, so inner ones precede those around them.
    for event in sorted(recording.events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        yield {**event, "pid": rank}
    if recording.num_dropped:
        dropped = {"dropped": recording.num_dropped}
        now = microseconds()
        yield {"ph": "i", "s": "p", "name": "recorded", "ts": now, "pid": rank, "args": dropped}


def path_of_rank(path: Path, rank: int) -> Path:
    """Return a rank's file: `path` on rank 0, else with the rank in its name (trace.rank3.json)."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def timeline_of(path: Path | None, job: Job) -> Timeline | None:
    """Return this rank's timeline; None without `path`.

    Collective; raises ConfigError if a file cannot be written.
    """
    with job.agreement.phase("trace"):
        return None if path is None else Timeline(path, job)


def check_path(path: Path) -> None:
    """Raise ConfigError if a trace cannot be written to `path`. Changes nothing."""
    if path.is_dir():
        raise _unwritable(path, "it is a directory")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _unwritable(path, "it is not writable, or has no directory")


def _unwritable(path: Path, problem: object) -> ConfigError:
    return ConfigError.of(
        CONFIG_KEY,
        f"{path}: {problem}",
        "Name a file in a directory that can be written",
        code="not-writable",
    )


def _opened(path: Path, job: Job) -> TraceFile:
    """Create the file. Its header names the rank, and sorts it among the files of other ranks."""
    rank = job.rank
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    header: list[Event] = [
        {**FIRST, "pid": rank, "args": {"name": f"rank {rank} on {job.hosts[rank]}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        {
            "ph": "i",
            "s": "g",
            "name": f"started {started}",
            "ts": microseconds(),
            "pid": rank,
            "tid": 0,
        },
    ]
    try:
        return TraceFile(path, header)
    except OSError as error:
        raise _unwritable(path, error.strerror or error) from error
