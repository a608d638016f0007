"""Inference sides: one without an engine, where every rank holds every tensor whole in memory, and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.assembly import build_inference_engine
from hybrid_engine.config import HybridConfig
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.setup import gather_side
from tests.hybrid_engine.switch.fakes import FakeInference, Script
from tests.zoo import workers

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine


class MemoryInference(FakeInference):
    """What `HybridEngine` takes for an `InferenceEngine`, as far as switches go.

    Args:
        job: of all ranks.
        tensors: canonical tensors and their shapes.
        dtype: name of the one in which they come.
    """

    def __init__(self, job: Job, tensors: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        super().__init__(Script(), job.rank, tensors)
        self.job, self.adaptor, self.dtype = job, self, dtype
        self.near_end: object = None

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: flat.view(self.tensors[name]) for name, flat in self.live.items() if name in self.in_force}


class Served:
    """vLLM, of which log-probabilities are seen. As much of `MemoryInference` as a walk asks for.

    Args:
        engine: built for this job.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine, self.dtype = engine, "float32"
        self.tensors: Mapping[str, tuple[int, ...]] = {}

    def spoil(self) -> None:
        """Change one weight as nobody should, in what vLLM computes with."""
        with torch.no_grad():
            self.engine.adaptor.model.get_submodule("model.norm").weight.data[:4] *= 2

    def whole(self) -> dict[str, torch.Tensor]:
        return {"log-probabilities": torch.stack(self.engine.prompt_logprobs(scored_batch()["tokens"].tolist()))}


def scored_batch() -> dict[str, torch.Tensor]:
    return workers.batch(seed=0)


def inference_for(
    train: Any, config: HybridConfig, table: ModelTable, job: Job, ends: ExitStack, *, serve: bool
) -> tuple[Any, MemoryInference | Served]:
    """What the engine gets, and what the walk looks at."""
    if not serve:
        shapes = {name: tuple(shape) for name, shape in table.shapes.items() if table.is_served(name)}
        inference = MemoryInference(job, shapes, config.actor_config.params_dtype)
        return inference, inference
    engine = build_inference_engine(config, table, gather_side(job, train.weights), job)
    ends.callback(engine.shutdown)
    return engine, Served(engine)
