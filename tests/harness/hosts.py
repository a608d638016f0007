"""Two hosts on one machine, for what must not rely on a shared file, socket or piece of memory.

    with two_hosts() as (one, other):           # 10.77.0.1 and 10.77.0.2
        with one.entered(): ...                 # this thread is there: network, files, shared memory
        with one.network(): ...                 # its network alone
        subprocess.run([*other.command(), "program"])
        other.path("/tmp/model")                # what is there at /tmp/model, as this process finds it
        one.link_nbytes()                       # over the link so far, by direction

Each has a network of its own, /tmp and /dev/shm of its own, and System V memory of its own. The two networks are one
veth pair, and lead nowhere else. Both have this machine's /etc/hosts, in which its name is the loopback's, as on many
machines: whoever listens at its host's name is not found from the other one.

Needs root, and the commands of util-linux and iproute2. What is made here ends with the processes that hold it.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from hybrid_engine.memory.host_pages import libc, raise_errno
from hybrid_engine.tools.launching import end_with_parent

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "veth0"
"""Name of the interface, on both."""

_MTU = 65535
"""Packets as large as they can be: the link counts their headers, too, which take 5 % of those of 1,500 bytes."""
_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x200, 0x20000, 0x40000000  # <linux/sched.h>
_KINDS = {"net": _CLONE_NEWNET, "mnt": _CLONE_NEWNS}
_LISTENING = "0A"


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        pid: of the process that holds it.
        address: on the link.
    """

    pid: int
    address: str

    def command(self) -> list[str]:
        """What a command begins with to run there."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--ipc", "--"]

    def path(self, inside: str | Path) -> Path:
        """A path of its own, as processes elsewhere name it."""
        return Path(f"/proc/{self.pid}/root/{inside}")

    @contextmanager
    def network(self) -> Iterator[None]:
        """This thread has its network, and so have the sockets, threads and processes that it makes meanwhile."""
        with _moved(self.pid, ["net"]):
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread has its network and files, and so have the threads and processes that it starts meanwhile."""
        with _moved(self.pid, ["net", "mnt"]):
            yield

    def link_nbytes(self) -> dict[str, int]:
        """Bytes that the link has "received" and "sent" there so far, with all headers."""
        (line,) = [each for each in self._net("dev") if each.strip().startswith(f"{LINK}:")]
        counts = line.partition(":")[2].split()
        return {"received": int(counts[0]), "sent": int(counts[8])}

    def set_link(self, state: Literal["up", "down"]) -> None:
        """Where it is down, the other host sends and nothing answers."""
        _run(f"ip link set {LINK} {state}", self)

    def limit_link(self, gbit: float) -> None:
        """It sends no more than so many Gbit/s from here on, by a token bucket of a millisecond's bytes, or 1 MB."""
        bits = round(gbit * 1e9)
        burst = max(1_000_000, bits // 8000)
        _run(f"tc qdisc add dev {LINK} root tbf rate {bits}bit burst {burst}b limit {8 * burst}b", self)

    def listeners(self) -> set[str]:
        """ADDRESS:PORT of all that listens for TCP there."""
        found = set()
        for table in ("tcp", "tcp6"):
            for line in self._net(table)[1:]:
                place, state = line.split()[1], line.split()[3]
                if state == _LISTENING:
                    address, _, port = place.partition(":")
                    found.add(f"{_address_of(address)}:{int(port, 16)}")
        return found

    def _net(self, table: str) -> list[str]:
        return Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()


def _address_of(digits: str) -> str:
    """An address as the kernel's tables have it: words of 4 bytes, each in the machine's order."""
    raw = bytes.fromhex(digits)
    words = (raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    return str(ipaddress.ip_address(b"".join(words)))


@contextmanager
def _moved(pid: int, kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as ends:
        for kind in kinds:
            own = ends.enter_context(open(f"/proc/thread-self/ns/{kind}", "rb"))
            with open(f"/proc/{pid}/ns/{kind}", "rb") as there:
                _set(there.fileno(), kind)
            ends.callback(_set, own.fileno(), kind)
        yield


def _set(descriptor: int, kind: str) -> None:
    # files are a thread's own only where it has a working directory of its own
    if kind == "mnt" and libc().unshare(_CLONE_FS) != 0:
        raise_errno("unshare(CLONE_FS)")
    if libc().setns(descriptor, _KINDS[kind]) != 0:
        raise_errno(f"setns({kind})")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where they cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("namespaces of the network need root")
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        pytest.skip(f"there is no command {', '.join(missing)}")
    with ExitStack() as ends:
        one, other = (Host(ends.enter_context(_holder()), address) for address in ADDRESSES)
        ends_of_link = [f"netns {host.pid} mtu {_MTU}" for host in (one, other)]
        _run(f"ip link add {LINK} {ends_of_link[0]} type veth peer name {LINK} {ends_of_link[1]}")
        for host in (one, other):
            for command in (f"addr add {host.address}/24 dev {LINK}", f"link set {LINK} up", "link set lo up"):
                _run(f"ip {command}", host)
            for place in ("/tmp", "/dev/shm"):
                _run(f"mount -t tmpfs -o mode=1777 tmpfs {place}", host)
        yield one, other


@contextmanager
def _holder() -> Iterator[int]:
    """The id of a process in namespaces of its own, which last as long as it or another process in them."""
    command = ["unshare", "--net", "--mount", "--ipc", "--", "sh", "-c", "echo made; exec cat"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=functools.partial(end_with_parent, os.getpid()),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != b"made\n":
            pytest.skip(f"namespaces are refused here: {process.stderr.read().decode().strip()}")
        try:
            yield process.pid
        finally:
            process.kill()


def _run(command: str, host: Host | None = None) -> None:
    """Skips the test where this is not permitted, or the kernel has no such links. Raises AssertionError."""
    ended = subprocess.run([*(host.command() if host else ()), *command.split()], capture_output=True, text=True)
    if any(reason in ended.stderr for reason in ("not permitted", "not supported", "Unknown device type")):
        pytest.skip(f"{command}: refused here: {ended.stderr.strip()}")
    assert ended.returncode == 0, f"{command}: {ended.stderr}"
