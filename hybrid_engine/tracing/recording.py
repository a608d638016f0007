"""What happens during a switch on one rank, as spans of time that lie in each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

Argument = int | float | str

MOST_RECORDS = 100_000
"""Spans and counts of one switch on one rank; what comes after is counted only."""


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` to `stop`, nanoseconds of this process's `time.perf_counter_ns`."""

    name: str
    start: int
    stop: int
    arguments: Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class Count:
    """Values at a moment, e.g. bytes by what they are for."""

    name: str
    at: int
    values: Mapping[str, int]


@dataclass
class Recording:
    """Of one switch on one rank.

    Attributes:
        spans, counts: in order of their ends.
        meetings: (entered, left) of moments at which all ranks were inside; as many on every rank, in the same order.
        num_dropped: spans and counts beyond `MOST_RECORDS`.
    """

    spans: list[Span] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    meetings: list[tuple[int, int]] = field(default_factory=list)
    num_dropped: int = 0

    def has_room(self) -> bool:
        """Whether one more is recorded; else it is counted."""
        is_full = len(self.spans) + len(self.counts) >= MOST_RECORDS
        self.num_dropped += is_full
        return not is_full


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


def span(name: str, **arguments: Argument) -> AbstractContextManager[object]:
    """The time of a `with` block; of one that fails, too, with the error's class."""
    recording = _current.get()
    return nullcontext() if recording is None else _timed(recording, name, arguments)


def meeting() -> AbstractContextManager[object]:
    """A span "wait": entered by each rank when it arrives, and left when all have."""
    recording = _current.get()
    return nullcontext() if recording is None else _met(recording)


def count(name: str, **values: int) -> None:
    """What there is of something at this moment."""
    recording = _current.get()
    if recording is not None and recording.has_room():
        recording.counts.append(Count(name, time.perf_counter_ns(), values))


@contextmanager
def _timed(recording: Recording, name: str, arguments: dict[str, Argument]) -> Iterator[None]:
    start = time.perf_counter_ns()
    try:
        yield
    except BaseException as error:
        arguments["error"] = type(error).__name__
        raise
    finally:
        if recording.has_room():
            recording.spans.append(Span(name, start, time.perf_counter_ns(), arguments))


@contextmanager
def _met(recording: Recording) -> Iterator[None]:
    entered = time.perf_counter_ns()
    with _timed(recording, "wait", {}):
        yield
    recording.meetings.append((entered, time.perf_counter_ns()))
