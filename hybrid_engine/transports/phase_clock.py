"""Where the time of a transport goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hybrid_engine.tracing.recording import span

PHASES = ("read", "transfer", "write")


@dataclass
class PhaseClock:
    """Seconds by phase, summed up until `take`.

    read: find the sources, pack them; transfer: bytes cross from rank to rank, and copies that go straight from
    source to destination; write: unpack into destinations. On CUDA a phase that only queues work ends before the work
    does, and the next phase that waits has its time.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to phase `name`."""
        start = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The sums since the last call, which start again at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken
