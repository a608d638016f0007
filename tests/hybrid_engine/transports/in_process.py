"""In-process twin of the pulling transports; all ranks live in one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.copies import BatchedCopies, FlatOf
from hybrid_engine.transports.pull import PullTransport


class InProcessTransport(PullTransport):
    name = "in_process"

    def __init__(self, rank: int, sources: Mapping[BufferId, torch.Tensor]) -> None:
        super().__init__(rank)
        self._sources = sources

    def _open_sources(
        self,
        bucket: int,
        copies: BatchedCopies,
        source: Mapping[str, torch.Tensor],
        readings: ExitStack,
    ) -> FlatOf:
        return lambda transfer: self._sources[transfer.src.buffer]
