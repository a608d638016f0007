"""Transports in which the destination rank copies straight from where the source lies. No packing, no staging.

    LocalTransport          the source is on the same rank
    SharedMemoryTransport   the source is a peer's mapped memory (shared_memory.py)

The source rank does nothing while it is read, so nobody waits for anybody. The caller fences: before the first bucket,
until all sources hold final values; before an owner releases what a bucket reads (switch/release_fence.py), or, after
the last one, overwrites its buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack

import torch

from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.batched_copies import BatchedCopies
from hybrid_engine.transports.copies import SourceOf, copy_straight
from hybrid_engine.transports.phase_clock import PhaseClock
from hybrid_engine.transports.wiring import Wiring


class PullTransport:
    """What they share; a subclass says where the sources are."""

    name: str

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._clock = PhaseClock()
        self._copies: dict[object, tuple[Sequence[Transfer], BatchedCopies]] = {}  # by bucket and first transfer

    def start(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor] | None,
        reason: str = "",
    ) -> None:
        """Nothing to do: no rank waits for another."""

    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the transfers that write to this rank; see `ports.Transport`."""
        if not transfers:
            return
        with ExitStack() as readings:
            with self._clock.phase("read"):
                copies = self._copies_of(bucket, transfers)
                source_of = self._open_sources(bucket, copies.transfers, source, readings)
            with self._clock.phase("transfer"):
                copy_straight(self.name, bucket, copies, source_of, destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Nothing to do: no rank waits for another."""

    def tell(self, bucket: int, phase: str, listeners: Iterable[int], speakers: Iterable[int], reason: str = "") -> str:
        """Nothing to say or hear: there are no messages."""
        return ""

    def take_seconds(self) -> dict[str, float]:
        """As `ports.Transport`."""
        return self._clock.take()

    def trim(self) -> int:
        """Nothing is staged."""
        return 0

    def close(self) -> None:
        """Forget what was made for the buckets; idempotent."""
        self._copies.clear()

    def _copies_of(self, bucket: int, transfers: Sequence[Transfer]) -> BatchedCopies:
        """Those that write to this rank. The same object comes at every switch, and what is read of relays apart."""
        known, copies = self._copies.get((bucket, transfers[0]), (None, None))
        if copies is None or known is not transfers:
            copies = BatchedCopies(transfer for transfer in transfers if transfer.dst_rank == self.rank)
            self._copies[bucket, transfers[0]] = transfers, copies
        return copies

    def _open_sources(
        self, bucket: int, pulls: Sequence[Transfer], source: Mapping[str, torch.Tensor], readings: ExitStack
    ) -> SourceOf:
        """What gives each transfer its flat source; `readings` is closed after the copies. Raises TransportError."""
        raise NotImplementedError


class LocalTransport(PullTransport):
    """Copies within a rank, on any device."""

    name = "local"

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """As `registry.RegisteredTransport`."""
        return "" if transfer.src_rank == transfer.dst_rank else "another rank"

    @classmethod
    def connect(cls, wiring: Wiring) -> LocalTransport:
        """As `registry.RegisteredTransport`."""
        return cls(wiring.rank)

    def _open_sources(
        self, bucket: int, pulls: Sequence[Transfer], source: Mapping[str, torch.Tensor], readings: ExitStack
    ) -> SourceOf:
        return lambda transfer: source[transfer.src.buffer.name]
