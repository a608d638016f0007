"""The load format of a server's workers: a new model is traced and processed; no file is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.loader import loader_class
from hybrid_engine.backends.vllm.weights.processed_model import ProcessedModel, inspect_model
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.backends.vllm.weights.traced_model import Context, TracedModel, trace_model
from hybrid_engine.errors import ModelError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.world import World

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_captured: WeakKeyDictionary[torch.nn.Module, tuple[ProcessedModel, VllmConfig]] = (
    WeakKeyDictionary()
)
"""Captured models with the configurations of their engines, until their receivers take them."""

_SECONDS_TO_PROCESS = 300.0
"""Timeout of workers that wait for each other before a collective processing of weights."""


def take_captured(model: torch.nn.Module) -> tuple[ProcessedModel, VllmConfig]:
    """Return and forget the captured form of a model, and its engine's configuration."""
    return _captured.pop(model)


def _keep(model: torch.nn.Module, captured: ProcessedModel) -> None:
    from vllm.config import get_current_vllm_config

    _captured[model] = captured, get_current_vllm_config()


def register_loader(name: str) -> None:
    """Register the load format with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader

    register = register_model_loader(name)
    register(loader_class(_trace, _inspect, _keep))


def _trace(model: torch.nn.Module, config: Any) -> TracedModel:
    from vllm.config import get_current_vllm_config

    table = table_for(config.hf_config.to_dict())
    dtypes = dict.fromkeys(table.shapes, config.dtype)
    for name, dtype in (table.dtypes or {}).items():
        dtypes[name] = getattr(torch, dtype)
    workers = internals.WORLD_GROUP.load()()
    # The rank is provisional: each job assigns another one, see `VllmAdaptor.take_place`.
    traced = trace_model(model, table.shapes, dtypes, workers.rank)
    if traced.staged and get_current_vllm_config().lora_config is not None:
        raise ModelError(
            f"{', '.join(traced.staged)} can only be written by the model's own loader, which does "
            "not know the layers that LoRA wraps: start the server without --enable-lora",
            code="staged-with-lora",
        )
    return traced


def _inspect(
    traced: TracedModel, context: Context, dtype: torch.dtype, is_collective: bool
) -> ProcessedModel:
    from vllm.config import get_current_vllm_config

    device = next(iter(traced.storages.values())).device
    keeps_addresses = device.type != "cpu"
    with context():
        is_eager = get_current_vllm_config().model_config.enforce_eager
    # vLLM captures no graphs on a CPU.
    has_graphs = keeps_addresses and not is_eager
    barrier = _barrier(is_collective)
    return inspect_model(traced, context, dtype, keeps_addresses, barrier, has_graphs)


def _barrier(is_collective: bool) -> ProcessingBarrier:
    """Return a barrier, with a group of all workers if vLLM's processing is collective in any."""
    workers = internals.WORLD_GROUP.load()()
    if workers.world_size == 1:
        return ProcessingBarrier()
    is_any = torch.tensor([is_collective], dtype=torch.int64)
    # All workers must use the same barrier, even if only some of them communicated.
    dist.all_reduce(is_any, dist.ReduceOp.MAX, group=workers.cpu_group)
    if not is_any:
        return ProcessingBarrier()
    world = World.of_default_group()
    group = RankGroup(world, "processing", range(world.size), _SECONDS_TO_PROCESS)
    return ProcessingBarrier(world.rank, group)
