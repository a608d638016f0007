"""Looks at other processes, and waits for what they do."""

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


def listening_addresses(pid: int) -> dict[int, set[Address]]:
    """By process, of this one and all below it: the addresses at which it listens by TCP."""
    pids = [pid]
    for each in pids:
        pids += children_of(each)
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS:
                addresses[f"socket:[{words[9]}]"] = _address(words[1].partition(":")[0])
    return {each: {addresses[name] for name in _descriptors(each) if name in addresses} for each in pids}


_LISTENS = "0A"


def _address(words: str) -> Address:
    """Of /proc/net/tcp: 32-bit words in the order of this host's bytes."""
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return ipaddress.ip_address(packed)


def _descriptors(pid: int) -> set[str]:
    names = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                names.add(os.readlink(entry.path))
    return names
