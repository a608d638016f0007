"""The timeline of a job's switches: recorded on every rank, gathered when a switch ends, written by rank 0.

    with timeline.switch("train->infer"):
        ...                                  spans of the block, on all ranks

Gathering is not part of the switch and of its report. A switch that fails is written too, once the state before is
restored; only after a lost rank there is nobody to gather from. What cannot be written is dropped with one warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, HybridEngineError, Violation
from hybrid_engine.ranks.job import Job
from hybrid_engine.tracing.recording import Event, Recording, microseconds, recorded, span
from hybrid_engine.tracing.trace_file import FIRST, TraceFile

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
        self._job.agreement.gather(None, "trace")
        recording.met_at = microseconds()
        recordings: list[Recording] = self._job.agreement.gather(recording, "trace")
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
