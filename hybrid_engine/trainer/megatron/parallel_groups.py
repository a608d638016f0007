"""Megatron's process groups and generators: made for a configuration, and ended."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from hybrid_engine.backends.megatron.internals import process_groups
from hybrid_engine.backends.megatron.megatron_config import train_sizes
from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import StateError
from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.ranks.process_groups import end_groups


def initialize_parallel_state(actor: ActorConfig, world_size: int, timeout_seconds: float) -> None:
    """Create Megatron's process groups and seed its generators. torch.distributed is initialised already.

    `timeout_seconds`, the longest wait for a peer, is rounded up to whole minutes, which is what Megatron takes.
    """
    sizes = train_sizes(actor, world_size)
    parallel_state.initialize_model_parallel(
        **named(sizes, "groups"),
        get_embedding_ranks=_embedding_ranks(sizes),
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
        create_gloo_process_groups=False,  # only megatron-core's own checkpoints use them: see rank_checkpoint.py
    )
    # as in Megatron-LM: equal on tensor and data parallel ranks, different on every pipeline stage
    seed = actor.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def require_none() -> None:
    """Raise StateError where Megatron has process groups already: it has room for those of one model's ranks."""
    if parallel_state.model_parallel_is_initialized():
        raise StateError(
            "Megatron's process groups are in use in this process: shut down the worker that made them first, or put "
            "vLLM beside a model of your own with hybrid_engine.attach"
        )


def destroy_parallel_state() -> None:
    """End Megatron's process groups."""
    # Megatron only forgets them
    end_groups(*process_groups())
    parallel_state.destroy_model_parallel()


def _embedding_ranks(sizes: TrainParallelism) -> Callable[[list[int]], list[int]] | None:
    """Which ranks of a pipeline keep equal embeddings; None: Megatron's choice, the first and the last.

    Multi-token prediction has a copy of the embedding, wherever it is.
    """
    stage = _mtp_stage(sizes)
    if stage is None or stage == sizes.pipeline - 1:
        return None
    return lambda ranks: [ranks[0], ranks[stage]]


def _mtp_stage(sizes: TrainParallelism) -> int | None:
    """The pipeline stage to which an explicit layout gives the MTP layers."""
    stages = PipelineParallelLayerLayout.parse_str_to_list(sizes.pipeline_layout or "")
    found = [index for index, layers in enumerate(stages) if LayerType.mtp in layers]
    return found[0] % sizes.pipeline if found else None
