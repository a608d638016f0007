"""The transports there are, and which of them carries a transfer.

To add one: a class that implements `RegisteredTransport`; its place in `REGISTRY`, before those that it is better than;
its name in `generate_config.transport` if it can be asked for; a case in the contract tests.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.ports import Transport
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.pull import LocalTransport
from hybrid_engine.transports.shared_memory import SharedMemoryTransport
from hybrid_engine.transports.wiring import Wiring

CONFIG_KEY = "generate_config.transport"


class RegisteredTransport(Transport, Protocol):
    """A transport that says by itself what it is for."""

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """Why it cannot carry a transfer, given the buffers that peers can map; "" if it can."""
        ...

    @classmethod
    def connect(cls, wiring: Wiring) -> Transport | None:
        """This rank's; None where the job has not got what it needs. No collective."""
        ...


REGISTRY: tuple[type[RegisteredTransport], ...] = (LocalTransport, SharedMemoryTransport, CollectiveTransport)
"""Best first; a bucket's transfers run in this order too. The last carries everything."""

PREFERENCES = ("auto", *(transport.name for transport in REGISTRY if transport is not LocalTransport))


def choose_transport(transfer: Transfer, exported: Set[BufferId], preference: str = "auto") -> str:
    """Name of the transport for a transfer.

    auto: the first of the registry that can carry it. With another preference everything between two ranks goes that
    way (`obstacle_of` says whether it can). Raises ConfigError for an unknown preference.
    """
    if preference not in PREFERENCES:
        problem = f"unknown transport {preference!r}"
        raise ConfigError([Violation(CONFIG_KEY, problem, f"Choose one of {', '.join(PREFERENCES)}")])
    for transport in REGISTRY:
        if not transport.obstacle(transfer, exported):
            return transport.name if preference == "auto" or transport is LocalTransport else preference
    raise AssertionError("the last transport of the registry carries everything")


def obstacle_of(name: str, transfer: Transfer, exported: Set[BufferId]) -> str:
    """Why the transport of this name cannot carry a transfer; "" if it can, or is not of the registry."""
    return next((each.obstacle(transfer, exported) for each in REGISTRY if each.name == name), "")
