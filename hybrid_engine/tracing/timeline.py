"""The timeline of a job's switches: recorded on every rank, gathered when a switch ends, written by rank 0.

    with timeline.switch("train->infer"):
        ...                                  spans of the block, on all ranks

Gathering is not part of the switch and of its report. A switch that fails is written too, once the state before is
restored; only after a lost rank there is nobody to gather from. What cannot be written is dropped with one warning.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, HybridEngineError, Violation
from hybrid_engine.ranks.job import Job
from hybrid_engine.tracing.clocks import ClockOffset, clock_offsets
from hybrid_engine.tracing.recording import Recording, recorded, span
from hybrid_engine.tracing.trace_file import FIRST, Event, TraceFile

logger = logging.getLogger("hybrid_engine")

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
        self._origin = time.perf_counter_ns()
        self._offsets = [ClockOffset(0, 0)] * job.world_size
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
        recordings: list[Recording] = self._job.agreement.gather(recording, "trace")
        if self._file is None:
            return
        if len({len(each.meetings) for each in recordings}) == 1 and recording.meetings:
            self._offsets = clock_offsets([each.meetings for each in recordings])
        try:
            self._file.append(self._events(recordings))
        except OSError as error:
            logger.warning("%s: the trace ends here, %s cannot be written: %s", CONFIG_KEY, self._file.path, error)
            self._file = None

    def _events(self, recordings: Sequence[Recording]) -> Iterator[Event]:
        for rank, (recording, offset) in enumerate(zip(recordings, self._offsets, strict=True)):
            yield from self._events_of(rank, recording, offset)

    def _events_of(self, rank: int, recording: Recording, offset: ClockOffset) -> Iterator[Event]:
        """Microseconds since the timeline was made; a span is before those that lie in it."""
        shift = offset.nanoseconds - self._origin
        for each in sorted(recording.spans, key=lambda each: (each.start, -each.stop)):
            times = {"ts": (each.start + shift) / 1000, "dur": (each.stop - each.start) / 1000}
            yield {"ph": "X", "name": each.name, **times, "pid": rank, "tid": 0, "args": dict(each.arguments)}
        for count in recording.counts:
            values = dict(count.values)
            yield {"ph": "C", "name": count.name, "ts": (count.at + shift) / 1000, "pid": rank, "args": values}
        if recording.num_dropped or offset.error:
            last = max((each.stop for each in recording.spans), default=self._origin)
            known = {"clock error (us)": offset.error / 1000, "dropped": recording.num_dropped}
            yield {"ph": "i", "s": "p", "name": "recorded", "ts": (last + shift) / 1000, "pid": rank, "args": known}


def timeline_of(path: Path | None, job: Job) -> Timeline | None:
    """The timeline of a job, if one is asked for. Collective.

    Raises ConfigError on all ranks unless all or none of them ask, and where rank 0 cannot write the file.
    """
    asking = job.agreement.gather(path is not None, "trace")
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
