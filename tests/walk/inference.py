"""Inference sides: vLLM, and a substitute where every rank holds all whole tensors in memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from hybrid_engine import HybridEngine
from hybrid_engine.config import HybridConfig
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.regions import Shapes
from tests.hybrid_engine.switch.fakes import FakeInference, Script
from tests.zoo import workers

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine


class MemoryInference(FakeInference):
    """Substitute for an `InferenceEngine` of `HybridEngine` that supports switches only.

    Args:
        job: the job of all ranks.
        tensors: shapes by canonical name.
        dtype: name of the dtype in which tensors arrive.
    """

    def __init__(self, job: Job, tensors: Shapes, dtype: str) -> None:
        super().__init__(Script(), job.rank, tensors)
        self.job = job
        self.adaptor = self
        self.dtype = dtype

    def whole(self) -> TensorDict:
        return {
            name: flat.view(self.tensors[name])
            for name, flat in self.live.items()
            if name in self.in_force
        }


class Served:
    """vLLM with the attributes of `MemoryInference` that a walk needs; its output is
    log-probabilities."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.dtype = "float32"
        self.tensors: Shapes = {}

    def spoil(self) -> None:
        """Corrupt a live weight of vLLM."""
        with torch.no_grad():
            self.engine.adaptor.model.get_submodule("model.norm").weight.data[:4] *= 2

    def whole(self) -> TensorDict:
        return {
            "log-probabilities": torch.stack(
                self.engine.prompt_logprobs(scored_batch()["tokens"].tolist())
            )
        }


def scored_batch() -> TensorDict:
    return workers.batch(seed=0)


def build_engine(
    train: Any, config: HybridConfig, table: ModelTable, job: Job, ends: ExitStack, *, serve: bool
) -> tuple[HybridEngine, MemoryInference | Served]:
    """Build an engine in state TRAIN; return also what the walk inspects of its inference side."""
    if serve:
        with job.agreement.building():
            engine = HybridEngine.beside(train, config, table, job, ends)
        return engine, Served(engine.inference)
    shapes = {name: tuple(shape) for name, shape in table.shapes.items() if table.is_served(name)}
    inference = MemoryInference(job, shapes, config.actor_config.params_dtype)
    with (
        mock.patch("hybrid_engine.assembly.build_inference_engine", return_value=inference),
        mock.patch(
            "hybrid_engine.assembly.quantised_table", lambda config, weights, table, job: table
        ),
        job.agreement.building(),
    ):
        return HybridEngine.beside(train, config, table, job, ends), inference
