"""Disturb the work on files: kills at every step, also in half of a file, and flipped bits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid_engine.errors import HybridEngineError

STEPS = frozenset(
    {"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "ctypes.dlsym"}
)
"""Audit events of changes to a file system; dlsym stands for renameat2, called through ctypes."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def kill_at_every_step(act: Callable[[], object], prepare: Callable[[], object]) -> Iterator[int]:
    """Run `act()` in forked processes, the k-th of which is killed (SIGKILL) before its k-th step.

    `prepare()` runs before each. Yields k, so that the caller can inspect the files; ends once
    `act` completes.
    """
    step = 0
    is_finished = False
    while not is_finished:
        prepare()
        status = _run_and_kill(act, step)
        is_finished = os.WIFEXITED(status)
        assert not is_finished or os.WEXITSTATUS(status) == 0, "`act` failed, see its output"
        yield step
        step += 1


def _run_and_kill(act: Callable[[], object], step: int) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kill_before(step, [os.getpid()])
            act()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def kill_before(step: int, pids: Iterable[int]) -> Callable[[], int]:
    """Kill processes (SIGKILL) before this one's step number `step` from now on, 0 being the first.

    Returns a function that returns the number of steps so far. Changes `os` for good.
    """
    remaining = step
    real_write = os.write

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal remaining
        if event in STEPS or (event == "open" and args[2] & _WRITING):
            if remaining == 0:
                for pid in sorted(pids, key=os.getpid().__eq__):  # this one last
                    os.kill(pid, signal.SIGKILL)
            remaining -= 1

    def write(descriptor: int, data: bytes) -> int:
        count("os.remove", ())
        half = real_write(descriptor, data[: len(data) // 2])
        count("os.remove", ())
        return half + real_write(descriptor, data[half:])

    def fsync(descriptor: int) -> None:
        with suppress(OSError):  # a directory, or open for reading
            contents = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            os.truncate(descriptor, len(contents) // 2)
            count("os.remove", ())
            os.pwrite(descriptor, contents, 0)
        count("os.remove", ())

    os.write, os.fsync = write, fsync  # type: ignore[assignment]
    sys.addaudithook(count)
    return lambda: step - remaining


def accepted_flips(
    paths: Iterable[Path], read: Callable[[], object], *, every: int
) -> list[tuple[str, int]]:
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
