"""vLLM's parameters in loader layout, for contenders that write them without the engine."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager

import torch

from benchmarks.resharding.measuring import ALLOCATE, COMMIT, Clock, Digests, digesting_vllm
from hybrid_engine import HybridEngine
from hybrid_engine.trainer.worker import ActorHybridWorker

Engines = ActorHybridWorker | HybridEngine
"""Objects with both engines and the switch between them."""


class LoaderTarget:
    """vLLM model of this rank; from `allocate` to `commit` its parameters are in loader layout.

    Uses private methods of the adaptor, so that all contenders write into the same memory.
    """

    def __init__(self, worker: Engines, keeps_memory: bool = False) -> None:
        """Set up the target; with `keeps_memory`, its memory stays allocated between fills."""
        self._keeps_memory = keeps_memory
        self._adaptor = worker.inference.adaptor
        if self._adaptor.staged:
            raise ValueError(
                f"{len(self._adaptor.staged)} tensors can only be loaded by vLLM's loader"
            )
        self.layout = self._adaptor.layout()
        self.rank = worker.job.rank
        self._groups = list(dict.fromkeys(buffer.group for buffer in self.layout.buffers.values()))

    @property
    def model(self) -> torch.nn.Module:
        return self._adaptor.model

    def release(self) -> None:
        """Discard the weights and, without `keeps_memory`, release their memory."""
        if self._keeps_memory:
            self._adaptor.void(self._groups)
        else:
            self._adaptor.release()

    def allocate(self, clock: Clock) -> dict[str, torch.Tensor]:
        """Bind new parameters in the model; return their flat buffers. Timed as ALLOCATE."""
        with clock.phase(ALLOCATE):
            flats = dict(self._adaptor.allocate(self._groups))
            # loaders write the parameters of the model, not flat buffers
            for group, tensors in self._adaptor._filling.items():
                self._adaptor._processed.bind(group, tensors)
        return flats

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Call vLLM's `load_weights`."""
        with torch.no_grad(), self._adaptor._processed.context():
            self.model.load_weights(weights)

    def commit(self, clock: Clock) -> None:
        """Let vLLM repack the weights. Timed as COMMIT."""
        with clock.phase(COMMIT):
            self._adaptor.commit(self._groups)
            if not self._keeps_memory:
                self._adaptor.finish_fill()

    def digesting(self) -> AbstractContextManager[Digests]:
        return digesting_vllm(self._adaptor)


class IntoLoader:
    """Base of contenders that write vLLM's parameters: the methods of `Contender` except `run`."""

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
    """Yield the items; the time to produce each item is added to `phase`."""
    while True:
        started = time.perf_counter()
        item = next(items, None)
        clock.add(phase, time.perf_counter() - started)
        if item is None:
            return
        yield item
