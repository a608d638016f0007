"""Our contenders: a fill of the inference weights by the engine's container."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack

import torch
import torch.distributed as dist

from benchmarks.resharding.loading import Engines, LoaderTarget
from benchmarks.resharding.measuring import Clock, Digests, digesting_vllm
from hybrid_engine.planning.plan import Costs
from hybrid_engine.ports import InferenceWeights, TrainingWeights
from hybrid_engine.switch import setup
from hybrid_engine.switch.setup import Connection
from hybrid_engine.switch.weight_container import ContainerState, WeightContainer
from hybrid_engine.trainer.worker import ActorHybridWorker


def fill(container: WeightContainer, training: TrainingWeights, clock: Clock) -> None:
    """Fill the empty container; add its phases to `clock`."""
    container.begin()
    report = container.fill(training.buffers())
    for name, seconds in report.seconds.items():
        clock.add(name, seconds)


def connect(
    worker: ActorHybridWorker, destination: InferenceWeights, owner: ExitStack
) -> Connection:
    """Connect the training weights with another destination, until `owner` closes. Collective."""
    config = worker.config.generate_config
    return setup.connect(worker.job, worker.train, destination, config, owner, Costs())


class Ours:
    """Writes training weights to vLLM's parameters bucket by bucket, in state TRAIN."""

    def __init__(self, worker: Engines) -> None:
        self._training = worker.sharding.training
        self._container = worker.sharding.container
        self._adaptor = worker.inference.adaptor

    def prepare(self) -> None:
        self._container.release()
        self._training.prepare()

    def run(self, clock: Clock) -> None:
        fill(self._container, self._training, clock)

    def digesting(self) -> AbstractContextManager[Digests]:
        return digesting_vllm(self._adaptor)

    def close(self) -> None:
        """Release the memory of the weights."""
        if self._container.state is not ContainerState.EMPTY:
            self._container.release()


class OursCopies:
    """The copies alone: vLLM's parameters already have memory, and are repacked at the end.

    So the repacking of a rank never slows down the copies of another rank on the same cores.
    """

    def __init__(self, worker: ActorHybridWorker) -> None:
        self._sharding = worker.sharding
        self._training = worker.sharding.training
        self._target = LoaderTarget(worker, keeps_memory=True)
        self._adaptor = worker.inference.adaptor
        self._flats: Mapping[str, torch.Tensor] = {}

    def prepare(self) -> None:
        self._target.release()
        self._flats = self._target.allocate(Clock())
        self._training.prepare()

    def run(self, clock: Clock) -> None:
        source = self._training.buffers()
        with clock.phase("transfer"):
            for bucket in self._sharding.plan.buckets:
                self._sharding.router.run(bucket, source, self._flats)
            dist.barrier()
        self._flats = {}
        self._target.commit(clock)

    def digesting(self) -> AbstractContextManager[Digests]:
        return self._target.digesting()

    def close(self) -> None:
        """Release the memory."""
        self._flats = {}
        self._adaptor.release()
