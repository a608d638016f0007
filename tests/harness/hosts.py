"""Two simulated hosts on one machine, to test code that must not rely on shared files, sockets or
memory.

    with two_hosts() as (first, second):        # 10.77.0.1 and 10.77.0.2
        with first.entered(): ...               # this thread uses its network and its files
        with first.network(): ...               # this thread uses its network alone
        subprocess.run([*second.command(), "program"])
        second.path("/tmp/model")               # its /tmp/model, as a path of this process
        first.link_nbytes()                     # bytes over the link so far, by direction

Each host has a separate network, /tmp, /dev/shm and System V memory. The networks are the two ends
of a veth pair and are connected to nothing else. Both hosts share this machine's /etc/hosts, where
the machine's name resolves to the loopback, as on many machines: a server that listens at its
host's name is unreachable from the other host.

Requires root, util-linux and iproute2. The namespaces end with the processes that hold them.
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
from hybrid_engine.ranks.signals_and_forks import end_with_parent

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "veth0"
"""Name of the network interface on both hosts."""

# The largest packets: the link also counts headers, which are 5 % of a packet of 1,500 bytes.
_MTU = 65535
_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x200, 0x20000, 0x40000000  # <linux/sched.h>
_KINDS = {"net": _CLONE_NEWNET, "mnt": _CLONE_NEWNS}
_LISTENING = "0A"


@dataclass(frozen=True)
class Host:
    """A simulated host.

    Attributes:
        pid: process that holds its namespaces.
        address: its IP address on the link.
    """

    pid: int
    address: str

    def command(self) -> list[str]:
        """Return the prefix that runs a command on this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--ipc", "--"]

    def path(self, inside: str | Path) -> Path:
        """Return the path by which processes outside reach the path `inside` of this host."""
        return Path(f"/proc/{self.pid}/root/{inside}")

    @contextmanager
    def network(self) -> Iterator[None]:
        """Move this thread to the host's network, with sockets, threads and processes it makes."""
        with _moved(self.pid, ["net"]):
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread to the host's network and files, with the processes it starts."""
        with _moved(self.pid, ["net", "mnt"]):
            yield

    def link_nbytes(self) -> dict[str, int]:
        """Return bytes "received" and "sent" over the link so far, headers included."""
        (line,) = [line for line in self._net("dev") if line.strip().startswith(f"{LINK}:")]
        counts = line.partition(":")[2].split()
        return {"received": int(counts[0]), "sent": int(counts[8])}

    def set_link(self, state: Literal["up", "down"]) -> None:
        """Set the link up or down; packets to a host whose link is down get no reply."""
        _run(f"ip link set {LINK} {state}", self)

    def limit_link(self, gbit: float) -> None:
        """Limit this host's sending to `gbit` Gbit/s, with bursts of 1 ms or 1 MB."""
        bits = round(gbit * 1e9)
        burst = max(1_000_000, bits // 8000)
        _run(
            f"tc qdisc add dev {LINK} root tbf rate {bits}bit burst {burst}b limit {8 * burst}b",
            self,
        )

    def listeners(self) -> set[str]:
        """Return ADDRESS:PORT of every listening TCP socket of this host."""
        listeners = set()
        for table in ("tcp", "tcp6"):
            for line in self._net(table)[1:]:
                columns = line.split()
                if columns[3] == _LISTENING:
                    address, _, port = columns[1].partition(":")
                    listeners.add(f"{_address_of(address)}:{int(port, 16)}")
        return listeners

    def _net(self, table: str) -> list[str]:
        return Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()


def _address_of(digits: str) -> str:
    """Decode an address in a table of the kernel: 4-byte words in the machine's order, in hex."""
    raw = bytes.fromhex(digits)
    words = (raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    return str(ipaddress.ip_address(b"".join(words)))


@contextmanager
def _moved(pid: int, kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as ends:
        for kind in kinds:
            previous = ends.enter_context(open(f"/proc/thread-self/ns/{kind}", "rb"))
            with open(f"/proc/{pid}/ns/{kind}", "rb") as target:
                _set(target.fileno(), kind)
            ends.callback(_set, previous.fileno(), kind)
        yield


def _set(descriptor: int, kind: str) -> None:
    # A thread may change its mount namespace only if it shares no working directory with another.
    if kind == "mnt" and libc().unshare(_CLONE_FS) != 0:
        raise_errno("unshare(CLONE_FS)")
    if libc().setns(descriptor, _KINDS[kind]) != 0:
        raise_errno(f"setns({kind})")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts; skip the test where that is impossible."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces require root")
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        pytest.skip(f"commands not installed: {', '.join(missing)}")
    with ExitStack() as ends:
        first, second = (Host(ends.enter_context(_holder()), address) for address in ADDRESSES)
        ends_of_link = [f"netns {host.pid} mtu {_MTU}" for host in (first, second)]
        _run(f"ip link add {LINK} {ends_of_link[0]} type veth peer name {LINK} {ends_of_link[1]}")
        for host in (first, second):
            for command in (
                f"addr add {host.address}/24 dev {LINK}",
                f"link set {LINK} up",
                "link set lo up",
            ):
                _run(f"ip {command}", host)
            for place in ("/tmp", "/dev/shm"):
                _run(f"mount -t tmpfs -o mode=1777 tmpfs {place}", host)
        yield first, second


@contextmanager
def _holder() -> Iterator[int]:
    """Start a process in new namespaces, which last as long as it does; yield its id."""
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
            pytest.skip(f"cannot create namespaces: {process.stderr.read().decode().strip()}")
        try:
            yield process.pid
        finally:
            process.kill()


def _run(command: str, host: Host | None = None) -> None:
    """Run a command; skip the test if it is not permitted or the kernel lacks such links."""
    prefix = host.command() if host else []
    result = subprocess.run([*prefix, *command.split()], capture_output=True, text=True)
    if any(
        reason in result.stderr
        for reason in ("not permitted", "not supported", "Unknown device type")
    ):
        pytest.skip(f"{command}: {result.stderr.strip()}")
    assert result.returncode == 0, f"{command}: {result.stderr}"
