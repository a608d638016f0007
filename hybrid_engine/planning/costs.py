"""Speeds of known devices, and the least seconds that the links of two layouts allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_engine.planning.plan import Link

DEVICE_GBPS: Mapping[str, Mapping[Link, float]] = {
    "NVIDIA H100 80GB HBM3": {Link.SELF: 1495, Link.DEVICE: 1495, Link.HOST: 450},
    "NVIDIA H200": {Link.SELF: 2145, Link.DEVICE: 2145, Link.HOST: 450},
}
"""Name of a device in torch -> 10^9 bytes per second in each direction, each byte counted once.

Measured, but for NVLink's nominal rate. A device does not tell the speed of its host's network."""


def link_seconds(nbytes: Mapping[Link, Any], gbps: Mapping[Link, float]) -> Any:
    """Return the seconds of bytes by link, one link after another; numbers or arrays."""
    return sum(moved / gbps[link] for link, moved in nbytes.items()) / 1e9
