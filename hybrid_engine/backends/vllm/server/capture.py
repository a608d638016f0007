"""The load format of a server's workers: a new model is traced and processed; no file is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.config_reads import is_of_vllm
from hybrid_engine.backends.vllm.weights.drafter import join, trace_new
from hybrid_engine.backends.vllm.weights.loader import loader_class
from hybrid_engine.backends.vllm.weights.processed_model import ProcessedModel
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.backends.vllm.weights.traced_model import TracedModel
from hybrid_engine.backends.vllm.weights.tracing import dtypes_of
from hybrid_engine.compute_check.config_reads import ReadRecorder, Reads
from hybrid_engine.config.keys import TRAINED_DRAFT
from hybrid_engine.errors import StateError
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.world import World

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_captured: WeakKeyDictionary[torch.nn.Module, tuple[ProcessedModel, VllmConfig]] = (
    WeakKeyDictionary()
)
"""Captured models with the configurations of their engines, until their receivers take them."""
_reads: WeakKeyDictionary[torch.nn.Module, Reads] = WeakKeyDictionary()
"""Captured models with the keys of config.json that they have read."""

_PROCESSING_TIMEOUT = 300.0
"""Timeout of workers that wait for each other before a collective processing of weights."""


def take_captured(model: torch.nn.Module) -> tuple[ProcessedModel, VllmConfig, Reads]:
    """Return and forget a model, joined with its drafter, its engine's configuration, and reads."""
    main, config = _captured.pop(model)
    others = list(_captured.items())
    drafters = [drafter for drafter, (_, of) in others if of.model_config is config.model_config]
    joined = reduce(join, [_captured.pop(drafter)[0] for drafter in drafters], main)
    return joined, config, _reads.pop(model)


def _keep(model: torch.nn.Module, captured: ProcessedModel) -> None:
    from vllm.config import get_current_vllm_config

    _captured[model] = captured, get_current_vllm_config()


def register_loader(name: str) -> None:
    """Register the load format with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader

    class RecordingLoader(loader_class(_trace, _inspecting, _keep)):  # type: ignore[misc]
        """A loader that records which keys of config.json the model reads."""

        def load_model(
            self,
            vllm_config: Any,
            model_config: Any,
            prefix: str = "",
        ) -> torch.nn.Module:
            recorder = ReadRecorder(is_of_vllm)
            recorder.watch(model_config.hf_config)
            try:
                model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
                recorder.scan(model)
            finally:
                recorder.stop()
            _reads[model] = recorder.reads
            return model

    register_model_loader(name)(RecordingLoader)


def _trace(model: torch.nn.Module, config: Any) -> TracedModel:
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    # Of the main model, also for a drafter.
    table = table_for(vllm_config.model_config.hf_config.to_dict())
    _require_filled_drafter(vllm_config, table)
    dtypes = dtypes_of(table.shapes, config.dtype, table.dtypes)
    has_lora = vllm_config.lora_config is not None
    without_lora = "start the server without --enable-lora" if has_lora else ""
    # The rank is provisional: each job assigns another one, see `VllmAdaptor.take_place`.
    rank = internals.WORLD_GROUP().rank
    return trace_new(model, config, table.shapes, dtypes, rank, without_lora)


def _require_filled_drafter(vllm_config: Any, table: ModelTable) -> None:
    """Raise StateError for speculative decoding, except with MTP layers on one pipeline stage."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return
    is_filled = speculation.method == TRAINED_DRAFT and table.dims.num_mtp_layers
    if not is_filled or vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise StateError(
            f"--speculative-config with method {speculation.method}: trainers fill no drafter but "
            f"the MTP layers of the model ({TRAINED_DRAFT}), on one pipeline stage. Start the "
            "server without it",
            code="speculative-decoding",
        )


@contextmanager
def _inspecting(is_collective: bool) -> Iterator[ProcessingBarrier]:
    """Yield a barrier, with a group of all workers if vLLM's processing is collective in any."""
    workers = internals.WORLD_GROUP()
    # All workers must use the same barrier, even if only some of them communicated.
    is_any = torch.tensor([is_collective], dtype=torch.int64)
    if workers.world_size > 1:
        dist.all_reduce(is_any, dist.ReduceOp.MAX, group=workers.cpu_group)
    if workers.world_size == 1 or not is_any:
        yield ProcessingBarrier()
        return
    world = World.of_default_group()
    group = RankGroup(world, "processing", range(world.size), _PROCESSING_TIMEOUT)
    yield ProcessingBarrier(world.rank, group)
