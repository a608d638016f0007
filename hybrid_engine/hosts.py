"""Which processes can see each other, and whether one of them still lives."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_id() -> str:
    """Equal for two processes exactly when they can see each other under /proc: boot id and process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or only waits for its parent to take note."""
    return _state(pid) in (None, "Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process of this host was stopped by a signal or a debugger."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str | None:
    """The letter of /proc/<pid>/stat, see proc(5); None when there is no such process."""
    try:
        # the name before it is in brackets and may hold spaces and brackets
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
