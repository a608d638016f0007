"""Transfers whose source and destination are on one rank: a strided copy, no other rank involved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.planning.plan import Transfer
from hybrid_engine.transports.copies import PhaseClock, copy_straight


class LocalTransport:
    """Copies within a rank, on any device. Waits for nobody."""

    name = "local"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.clock = PhaseClock()

    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the transfers from this rank to itself; see `ports.Transport`."""
        own = [transfer for transfer in transfers if transfer.src_rank == transfer.dst_rank == self.rank]
        with self.clock.phase("transfer"):
            copy_straight(self.name, bucket, own, lambda transfer: source[transfer.src.buffer.name], destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Nothing to do: no rank waits for another."""

    def close(self) -> None:
        """Nothing is held."""
