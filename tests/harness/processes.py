"""Inspection of other processes."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybrid_engine.tools.launching import children_of

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Fail if `condition` does not become true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition still false after {seconds:g} s"
        time.sleep(0.05)


def listening_addresses(pid: int) -> dict[int, set[Address]]:
    """Return addresses of listening TCP sockets of a process and its descendants, by process."""
    pids = [pid]
    for parent in pids:
        pids += children_of(parent)
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS:
                addresses[f"socket:[{words[9]}]"] = _address(words[1].partition(":")[0])
    return {
        pid: {addresses[name] for name in _descriptors(pid) if name in addresses} for pid in pids
    }


_LISTENS = "0A"


def _address(words: str) -> Address:
    """Return an address of /proc/net/tcp, written as 32-bit words in host byte order."""
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return ipaddress.ip_address(packed)


def _descriptors(pid: int) -> set[str]:
    names = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                names.add(os.readlink(entry.path))
    return names
