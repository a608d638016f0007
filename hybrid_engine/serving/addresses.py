"""Which addresses a host has, and which of them are open to anybody."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def addresses_of(host: str) -> list[Address]:
    """Addresses of a host's name, or an address itself. Raises OSError, and ValueError for what is not a name."""
    found = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)}
    return sorted(map(_as_sent, found), key=str)


def public_ones(addresses: Iterable[Address]) -> list[str]:
    """Those that others than this host and its private networks can reach."""
    return [str(each) for each in addresses if each.is_global]


def _as_sent(address: str) -> Address:
    """Where packets go: an IPv4 address that is mapped into IPv6 counts as private, whatever it is."""
    read = ipaddress.ip_address(address)
    return read.ipv4_mapped or read if isinstance(read, ipaddress.IPv6Address) else read
