"""The floor: a plain copy of the same bytes, a lower bound for every contender."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
import torch.distributed as dist

from benchmarks.resharding.loading import Engines
from benchmarks.resharding.measuring import Clock, Digests, gather
from hybrid_engine.memory.elastic import export_tensor, reading


class Floor:
    """Copies as many elements as an inference shard has from the training weights of the next rank.

    The copies are contiguous, from mapped memory into memory that was used before. If the next rank
    has fewer elements, its memory is read again from the start.

    Args:
        worker: both engines.
        source: dtype of the training weights.
        destination: dtype of vLLM's weights, to which the copy converts. By default, both are
            bytes.
    """

    def __init__(
        self,
        worker: Engines,
        source: torch.dtype = torch.uint8,
        destination: torch.dtype = torch.uint8,
    ) -> None:
        buffers = [
            flat
            for flat in worker.train.weights.buffers().values()
            if export_tensor(flat) is not None
        ]
        handles = gather([export_tensor(flat) for flat in buffers])
        peer = (dist.get_rank() + 1) % dist.get_world_size()
        device = worker.job.device
        with ExitStack() as ends:  # keeps the mappings of the peer until `close`
            sources = [
                ends.enter_context(reading(handle, device)).view(source) for handle in handles[peer]
            ]
            for flat in sources:
                flat.sum()  # maps its pages into this process
            self._ends = ends.pop_all()
        numel = worker.inference.adaptor.nbytes // destination.itemsize
        target = torch.empty(numel, dtype=destination, device=device).fill_(1)
        self._copies = list(_pairs(sources, target))

    def prepare(self) -> None:
        pass

    def run(self, clock: Clock) -> None:
        with clock.phase("transfer"):
            for destination, source in self._copies:
                destination.copy_(source)

    def digesting(self) -> AbstractContextManager[Digests]:
        return nullcontext({})

    def close(self) -> None:
        self._copies.clear()
        self._ends.close()


def _pairs(
    sources: list[torch.Tensor], destination: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of equal size; sources repeat until the destination is covered."""
    start = 0
    while start < destination.numel():
        for source in sources:
            size = min(source.numel(), destination.numel() - start)
            if size:
                yield destination[start : start + size], source[:size]
            start += size
