"""Temporary directories that are removed when their process ends or, if it was killed, by the next process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybrid_engine.errors import FileError


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """A new directory below the system's temporary one, removed at the end of the block.

    Its process holds a lock on it, which the kernel releases however the process ends. This also removes unlocked
    directories of this user and prefix, whose processes were killed.

    Raises FileError where the file system has no locks.
    """
    _remove_abandoned(prefix)
    path, lock = _locked_directory(prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


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


def _locked_directory(prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        # Until it is locked, another process may consider it abandoned and remove it.
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            os.close(lock)
            path.rmdir()
            remedy = "Set TMPDIR to a directory on a file system with flock(2)"
            raise FileError(f"locking {path}: {error.strerror}. {remedy}") from error
        if path.is_dir():
            return path, lock
        os.close(lock)


def _remove_abandoned(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is gone already, locked (BlockingIOError) or another user's
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
