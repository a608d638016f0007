"""The engine itself: a fill of vLLM's weights by the worker's own container."""

from __future__ import annotations

from contextlib import AbstractContextManager

from benchmarks.resharding.measuring import Clock, Digests, digesting_vllm
from hybrid_engine.memory.weight_container import ContainerState
from hybrid_engine.sharding_manager import ShardingManager
from hybrid_engine.worker import ActorHybridWorker


def fill(sharding: ShardingManager, clock: Clock) -> None:
    """One fill of the empty container; its phases go to `clock`. The only place that knows how a fill is called."""
    report = sharding.container.fill(sharding.training.buffers())
    for name, seconds in report.seconds.items():
        clock.add(name, seconds)


class Ours:
    """Training weights to vLLM's parameters, bucket by bucket, in state TRAIN."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        self._sharding = worker.sharding
        self._adaptor = worker.inference.adaptor

    def prepare(self) -> None:
        self._sharding.container.release()
        self._sharding.training.prepare()

    def run(self, clock: Clock) -> None:
        fill(self._sharding, clock)

    def digesting(self) -> AbstractContextManager[Digests]:
        return digesting_vllm(self._adaptor)

    def close(self) -> None:
        if self._sharding.container.state is not ContainerState.EMPTY:
            self._sharding.container.release()
