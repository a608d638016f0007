"""Temporary directories, and an end by SIGTERM that removes them."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """A new directory below the system's temporary one, removed at the end of the block. SIGKILL leaves it there."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
        yield Path(path)


@contextlib.contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM (of a time limit, for example) raises SystemExit(143), so that `finally` blocks run.

    For the main thread. SIGINT raises KeyboardInterrupt anyway.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
