"""Flip each bit of files, and see whether a reader accepts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hybrid_engine.errors import HybridEngineError


def accepted_flips(paths: Iterable[Path], read: Callable[[], object], *, every: int) -> list[tuple[str, int]]:
    """Flip every n-th bit, one at a time; return the names and bits that `read` accepts.

    Only errors of this package refuse a file: others are raised here.
    """
    accepted = []
    for path in paths:
        written = path.read_bytes()
        for bit in range(0, 8 * len(written), every):
            path.write_bytes((int.from_bytes(written) ^ 1 << bit).to_bytes(len(written)))
            with suppress(HybridEngineError):
                read()
                accepted.append((path.name, bit))
        path.write_bytes(written)
    return accepted
