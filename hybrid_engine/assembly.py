"""Puts an inference engine beside a live training model.

Shared by those who bring the training model: `ActorHybridWorker` builds one, `megatron_script` finds one running.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid_engine.config import HybridConfig
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.models import table_for
from hybrid_engine.models.lora_tensors import VLLM_LORA_RANKS, adapted_modules, adapter_shapes
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.holdings import holdings_of
from hybrid_engine.records.layout import Layout

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings


def build_inference_engine(
    config: HybridConfig, table: ModelTable, training_layouts: Sequence[Layout], job: Job
) -> InferenceEngine:
    """vLLM in the ranks that train, each with the shard that suits what it holds for training. Collective.

    vLLM looks at the memory that is free while it starts: training state is best off the device meanwhile.
    `training_layouts`: of all ranks (`rendezvous.gather_layouts`).
    """
    with job.agreement.phase("choosing the order of ranks"):
        order = _choose_rank_order(config, table, training_layouts, job)
    with job.agreement.phase("building the inference engine", SHORT_PATIENCE):
        from hybrid_engine.backends.vllm import InferenceEngine

        settings = inference_settings(config, job.world_size, order)
        return InferenceEngine(settings, table.shapes, job, dtypes=table.dtypes)


def _choose_rank_order(
    config: HybridConfig, table: ModelTable, training_layouts: Sequence[Layout], job: Job
) -> tuple[int, ...]:
    """Which rank takes which inference shard, from what the ranks hold; the same on all of them."""
    kind = config.generate_config.infer_rank_order
    if kind == "sequential":
        return tuple(range(job.world_size))
    sizes = config.generate_config.sizes(job.world_size)
    return rank_order(
        kind,
        holdings_of(Layout.merge(training_layouts), job.world_size),
        inference_side(table, sizes, config.actor_config.params_dtype).holdings,
        job.hosts,
        sizes.tensor,
    )


def inference_settings(
    config: HybridConfig, world_size: int, rank_order: tuple[int, ...] | None = None
) -> InferenceSettings:
    """vLLM's settings from a checked configuration.

    `rank_order`: global rank at each inference position; None counts them in order.
    """
    from hybrid_engine.backends.vllm import InferenceSettings

    generate = config.generate_config
    return InferenceSettings(
        model_dir=str(config.model),
        sizes=generate.sizes(world_size, rank_order),
        dtype=config.wire_dtype,
        release_weights=generate.release_weights,
        quantization=generate.quantization,
        **_adapter_settings(config),
        max_model_len=generate.max_model_len,
        max_num_seqs=generate.max_num_seqs,
        seed=generate.seed,
        timeout_seconds=generate.timeout_seconds,
        enforce_eager=generate.enforce_eager,
        kv_cache_bytes=generate.kv_cache_mb * 1024**2 if generate.kv_cache_mb else None,
        gpu_memory_utilization=generate.gpu_memory_utilization,
    )


def _adapter_settings(config: HybridConfig) -> dict[str, Any]:
    """vLLM's settings for adapters, where they are delivered by themselves."""
    lora = config.actor_config.lora
    if config.generate_config.lora_delivery != "adapter" or lora is None:
        return {}
    shapes = adapter_shapes(table_for(config.hf_config()), lora.target_modules, lora.rank)
    return {
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= lora.rank),
        "lora_target_modules": adapted_modules(shapes),
    }
