"""Kill a process at every step of what it does to files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

STEPS = frozenset({"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "ctypes.dlsym"})
"""Audit events before calls that change a file system; dlsym is for what Python itself cannot call (renameat2)."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def kill_at_every_step(act: Callable[[], object], prepare: Callable[[], object]) -> Iterator[int]:
    """For k = 0, 1, ...: `prepare()`, then `act()` in a forked process that is killed by SIGKILL before its k-th step.

    Yields k, for the caller to look at what is there; ends after the first `act` that came to its end.
    """
    step, is_finished = 0, False
    while not is_finished:
        prepare()
        status = _run_and_kill(act, step)
        is_finished = os.WIFEXITED(status)
        assert not is_finished or os.WEXITSTATUS(status) == 0, "the function failed, see its output"
        yield step
        step += 1


def _run_and_kill(act: Callable[[], object], step: int) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        left = step

        def count(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if event in STEPS or (event == "open" and args[2] & _WRITING):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        status = 1
        try:
            sys.addaudithook(count)
            act()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]
