"""Looks at other processes, and waits for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process is there; one that has ended and that nobody has asked how is not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Fail where it does not become so in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.05)
