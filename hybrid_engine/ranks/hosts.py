"""Which processes can see each other, and whether one of them still lives."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_id() -> str:
    """Equal for two processes exactly when they can see each other under /proc: boot id and process namespace.

    Where /proc does not say, the host's name, by which processes of two containers look alike.
    """
    return process_space() or socket.gethostname()


def process_space() -> str | None:
    """`host_id`, or None where process ids of others cannot be relied on."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def state_of(pid: int) -> str | None:
    """What keeps a process of this host from going on, in words: it has ended or is stopped. None: nothing seen."""
    if has_ended(pid):
        return f"has ended (process {pid})"
    return f"is stopped (process {pid})" if _letter(pid) in _STOPPED else None


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or only waits for its parent to take note."""
    return _letter(pid) in _ENDED


_ENDED, _STOPPED = ("Z", "X"), ("T", "t")  # states of proc(5)


def _letter(pid: int) -> str:
    """The state of /proc/<pid>/stat: X where there is no such process, "" where that cannot be read."""
    try:
        # the name before it is in brackets and may hold spaces and brackets
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except (OSError, IndexError):  # no descriptor left, for instance: that says nothing about the other process
        return ""
