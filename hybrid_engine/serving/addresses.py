"""Which addresses a host has, which of them are open to anybody, and at which ports a process of it listens."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

from hybrid_engine.errors import ConfigError, Violation

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def addresses_of(host: str) -> list[Address]:
    """Addresses of a host's name, or an address itself. Raises OSError, and ValueError for what is not a name."""
    found = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)}
    return sorted(map(_as_sent, found), key=str)


def public_ones(addresses: Iterable[Address]) -> list[str]:
    """Those that others than this host and its private networks can reach."""
    return [str(each) for each in addresses if each.is_global]


def require_ports(ports: str | None) -> None:
    """Raise ConfigError unless whoever asks this host's kernel for any port gets one of `ports`, FIRST-LAST.

    torch's store could be given a port, but gloo, which carries the weights, asks for any.
    """
    if ports is None:
        return
    first, last = map(int, ports.split("-"))
    lowest, highest = map(int, _PORTS_OF_THE_KERNEL.read_text().split())
    if not first <= lowest <= highest <= last:
        problem = f"{ports}, but the kernel of {socket.gethostname()} chooses ports of {lowest}-{highest}"
        remedy = f'sysctl -w net.ipv4.ip_local_port_range="{first} {last}" there (in a pod, securityContext.sysctls)'
        raise ConfigError([Violation("generate_config.server_ports", problem, remedy)])


_PORTS_OF_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of this process's network namespace; for IPv6 too."""


def _as_sent(address: str) -> Address:
    """Where packets go: an IPv4 address that is mapped into IPv6 counts as private, whatever it is."""
    read = ipaddress.ip_address(address)
    return read.ipv4_mapped or read if isinstance(read, ipaddress.IPv6Address) else read
