"""What happens during a switch on one rank, as Chrome's trace events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

MOST_EVENTS = 100_000
"""Of one switch on one rank; what comes after is counted only."""


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
