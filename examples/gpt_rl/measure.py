"""What an iteration took: seconds by phase, switches, memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hybrid_engine import ReshardReport

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Tally:
    """One rank's record of the iteration under way."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    switches: list[ReshardReport] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to the seconds of `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def share(self) -> dict[str, float]:
        """This rank's numbers, to be combined with `combine`."""
        return {
            "reshard_seconds": sum(report.seconds for report in self.switches),
            "bytes_received": sum(report.bytes_received for report in self.switches),
            "bytes_least": sum(report.bytes_least for report in self.switches),
            "peak_bytes": max((report.peak_bytes for report in self.switches), default=0),
            "rss_bytes": resident_nbytes(),
        }


def combine(shares: Sequence[dict[str, float]], iteration_seconds: float) -> dict[str, Any]:
    """All ranks' shares as one: bytes moved are totals; seconds and memory are those of the worst rank."""
    row: dict[str, Any] = {
        name: max(share[name] for share in shares) for name in ("reshard_seconds", "peak_bytes", "rss_bytes")
    }
    row.update({name: sum(share[name] for share in shares) for name in ("bytes_received", "bytes_least")})
    row["iteration_seconds"] = iteration_seconds
    row["reshard_share"] = row["reshard_seconds"] / iteration_seconds
    return row


def resident_nbytes() -> int:
    """Physical memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_NBYTES
