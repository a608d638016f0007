"""The load format of a server's workers: a fresh model is traced and processed, and no file is read."""

from __future__ import annotations

from typing import Any
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

_found: WeakKeyDictionary[torch.nn.Module, ProcessedModel] = WeakKeyDictionary()
"""What was captured, until the model's receiver takes it."""

_SECONDS_TO_PROCESS = 300.0
"""For which workers wait for each other where vLLM processes weights in collectives."""


def take_captured(model: torch.nn.Module) -> ProcessedModel | None:
    """What was captured of a model, once; None for one that was loaded in another format."""
    return _found.pop(model, None)


def register_loader(name: str) -> None:
    """Register the load format."""
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(name)(loader_class(_trace, _inspect, _found.__setitem__))


def _trace(model: torch.nn.Module, config: Any) -> TracedModel:
    from vllm.config import get_current_vllm_config

    table = table_for(config.hf_config.to_dict())
    dtypes = dict.fromkeys(table.shapes, config.dtype)
    dtypes |= {name: getattr(torch, dtype) for name, dtype in (table.dtypes or {}).items()}
    traced = trace_model(model, table.shapes, dtypes, internals.WORLD_GROUP.load()().rank)
    if traced.staged and get_current_vllm_config().lora_config is not None:
        raise ModelError(
            f"{', '.join(traced.staged)} can only be written by the model's own loader, which does not know the layers "
            "that LoRA wraps: start the server without --enable-lora"
        )
    return traced


def _inspect(traced: TracedModel, context: Context, dtype: torch.dtype, is_collective: bool) -> ProcessedModel:
    from vllm.config import get_current_vllm_config

    keeps_addresses = next(iter(traced.storages.values())).device.type != "cpu"
    with context():
        has_graphs = keeps_addresses and not get_current_vllm_config().model_config.enforce_eager
    return inspect_model(traced, context, dtype, keeps_addresses, _barrier(is_collective), has_graphs)


def _barrier(is_collective: bool) -> ProcessingBarrier:
    """Of all workers where vLLM's processing is collective in any."""
    workers = internals.WORLD_GROUP.load()()
    if workers.world_size == 1:
        return ProcessingBarrier()
    is_any = torch.tensor([is_collective], dtype=torch.int64)
    dist.all_reduce(is_any, dist.ReduceOp.MAX, group=workers.cpu_group)
    if not is_any:
        return ProcessingBarrier()
    world = World.of_default_group()
    group = RankGroup(world, "processing", range(world.size), _SECONDS_TO_PROCESS)
    return ProcessingBarrier(world.rank, group)
