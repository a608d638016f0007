"""vLLM's parameters as its own loader wants them: for contenders that write there without the engine."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.resharding.measuring import ALLOCATE, COMMIT, Clock, Digests, digesting_vllm
from hybrid_engine import HybridEngine
from hybrid_engine.trainer.worker import ActorHybridWorker

Engines = ActorHybridWorker | HybridEngine[Any]
"""Who trains and who generates, with the switch between them."""


class LoaderTarget:
    """This rank's vLLM model between `allocate` and `commit`: every parameter in loader layout, zeroed.

    Uses the adaptor's own means to get there, also private ones, so that all contenders write into the same memory.
    """

    def __init__(self, worker: Engines, keeps_memory: bool = False) -> None:
        """`keeps_memory`: from one fill to the next."""
        self._keeps_memory = keeps_memory
        self._adaptor = worker.inference.adaptor
        if self._adaptor.staged:
            raise ValueError(
                f"{len(self._adaptor.staged)} tensors only go through vLLM's own loader"
            )
        self.layout = self._adaptor.layout()
        self.rank = worker.job.rank
        self._groups = list(dict.fromkeys(buffer.group for buffer in self.layout.buffers.values()))

    @property
    def model(self) -> torch.nn.Module:
        return self._adaptor.model

    def release(self) -> None:
        """Give up the weights and, unless it is kept, their memory."""
        if self._keeps_memory:
            self._adaptor.void(self._groups)
        else:
            self._adaptor.release()

    def allocate(self, clock: Clock) -> dict[str, torch.Tensor]:
        """Fresh parameters, bound in the model; their flat buffers by name. Timed as the allocation."""
        with clock.phase(ALLOCATE):
            flats = dict(self._adaptor.allocate(self._groups))
            for group, tensors in self._adaptor._filling.items():
                self._adaptor._processed.bind(group, tensors)
        return flats

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """vLLM's `load_weights`."""
        with torch.no_grad(), self._adaptor._processed.context():
            self.model.load_weights(weights)

    def commit(self, clock: Clock) -> None:
        """vLLM's repacking of all that was written; timed as the commit."""
        with clock.phase(COMMIT):
            self._adaptor.commit(self._groups)
            if not self._keeps_memory:
                self._adaptor.finish_fill()

    def digesting(self) -> AbstractContextManager[Digests]:
        return digesting_vllm(self._adaptor)


class IntoLoader:
    """Base of contenders that write vLLM's parameters themselves: the methods of `Contender` but for `run`."""

    def __init__(self, worker: Engines) -> None:
        self._target = LoaderTarget(worker)

    def prepare(self) -> None:
        self._target.release()

    def digesting(self) -> AbstractContextManager[Digests]:
        return self._target.digesting()

    def close(self) -> None:
        self._target.release()


def timed(
    items: Iterator[tuple[str, torch.Tensor]], clock: Clock, phase: str
) -> Generator[tuple[str, torch.Tensor]]:
    """The same items; the time that making each of them takes goes to `phase`."""
    while True:
        started = time.perf_counter()
        item = next(items, None)
        clock.add(phase, time.perf_counter() - started)
        if item is None:
            return
        yield item
