"""The in-process twin of the transports: every rank's sources at hand in one process. For tests and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.planning.layout import BufferId
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.transports.copies import PhaseClock, copy_straight


class InProcessTransport:
    """Plays one of several ranks that live in one process; reads the other ranks' buffers directly."""

    name = "in_process"

    def __init__(self, rank: int, sources: Mapping[BufferId, torch.Tensor]) -> None:
        """`sources`: flat source buffers of all ranks."""
        self.rank = rank
        self._sources = sources
        self.clock = PhaseClock()

    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the transfers that write to this rank; see `ports.Transport`. `source` is not needed."""
        pulls = [transfer for transfer in transfers if transfer.dst_rank == self.rank]
        with self.clock.phase("transfer"):
            copy_straight(self.name, bucket, pulls, lambda transfer: self._sources[transfer.src.buffer], destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Nothing to do: no rank waits for another."""

    def close(self) -> None:
        """Nothing is held."""
