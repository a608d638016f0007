"""Temporary directories, and termination by SIGTERM that removes them."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """Create a temporary directory that is removed at the end of the block.

    SIGKILL leaves it behind.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
        yield Path(path)


@contextlib.contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Raise SystemExit(143) on SIGTERM within the block, so that `finally` blocks run.

    Time limits send SIGTERM. Call it from the main thread. SIGINT raises KeyboardInterrupt anyway.
    """

    def leave(number: int, frame: object) -> None:
        # A shell reports a process that a signal ended as 128 + the signal's number.
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
