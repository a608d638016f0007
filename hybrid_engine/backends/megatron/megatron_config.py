"""Megatron's configuration objects from ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import megatron.core
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from packaging.version import Version

from hybrid_engine.backends.megatron.fusions import fusion_settings
from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.hybrid_pattern import has_experts, is_latent, num_hybrid_chunks
from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.models.table import ModelTable

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Activation functions by the names that the tables use."""


def has_transformer_engine() -> bool:
    """Whether layers are built of Transformer Engine's modules: with a GPU and the package; else of megatron-core's."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def train_sizes(actor: ActorConfig, world_size: int) -> TrainParallelism:
    """The parallel sizes, with the virtual stages that an explicit layout or a hybrid pattern implies."""
    sizes = actor.sizes(world_size)
    if sizes.pipeline_layout is not None:
        num_chunks = PipelineParallelLayerLayout.get_num_stages_from_str(sizes.pipeline_layout) // sizes.pipeline
    elif sizes.hybrid_layer_pattern is not None:
        num_chunks = num_hybrid_chunks(sizes.hybrid_layer_pattern, sizes.pipeline)
    else:
        return sizes
    return replace(sizes, virtual_pipeline=num_chunks if num_chunks > 1 else None)


def transformer_config(actor: ActorConfig, sizes: TrainParallelism, table: ModelTable) -> TransformerConfig:
    """Of the model in this layout. Raises ConfigError for what the model needs and this megatron-core lacks."""
    if sizes.hybrid_layer_pattern is not None:
        _require_hybrid_model(sizes.hybrid_layer_pattern)
    dtype = getattr(torch, actor.params_dtype)
    settings = {**table.transformer, **_size_settings(sizes, table), **_expert_settings(sizes, table)}
    settings["activation_func"] = ACTIVATIONS[settings["activation_func"]]
    config_class = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    _require_known(settings, config_class)
    return config_class(
        **settings,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # what a rank holds does not depend on it, and megatron-core's own attention refuses more: config/constraints.py
        context_parallel_size=1,
        sequence_parallel=actor.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=not torch.cuda.is_available(),
        **fusion_settings(settings, is_cuda=torch.cuda.is_available(), with_te=has_transformer_engine()),
    )


def ddp_config(actor: ActorConfig) -> DistributedDataParallelConfig:
    """Of the flat buffers: gradients are reduced in float32."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=actor.overlap_grad_reduce,
        overlap_param_gather=actor.overlap_param_gather,
        use_distributed_optimizer=actor.use_distributed_optimizer,
    )


def optimizer_config(actor: ActorConfig) -> OptimizerConfig:
    """Of Adam in the training dtype."""
    dtype = getattr(torch, actor.params_dtype)
    return OptimizerConfig(
        optimizer="adam",
        lr=actor.optimizer.lr,
        weight_decay=actor.optimizer.weight_decay,
        adam_beta1=actor.optimizer.adam_beta1,
        adam_beta2=actor.optimizer.adam_beta2,
        adam_eps=actor.optimizer.adam_eps,
        clip_grad=actor.optimizer.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_distributed_optimizer=actor.use_distributed_optimizer,
        overlap_param_gather=actor.overlap_param_gather,
    )


def _require_hybrid_model(pattern: str) -> None:
    since, what = ("0.19", "HybridModel with latent attention") if is_latent(pattern) else ("0.18", "HybridModel")
    installed = megatron.core.__version__
    if Version(installed) < Version(since):
        problem = f"megatron-core {installed} has no {what}"
        raise ConfigError([Violation("actor_config.hybrid_layer_pattern", problem, f"Install {since} or later")])


def _require_known(settings: Mapping[str, Any], config_class: type[TransformerConfig]) -> None:
    unknown = sorted(settings.keys() - {field.name for field in fields(config_class)})
    if unknown:
        problem = f"needs {', '.join(unknown)}, which megatron-core {megatron.core.__version__} does not have"
        raise ConfigError([Violation("model", problem, "install a later megatron-core")])


def _size_settings(sizes: TrainParallelism, table: ModelTable) -> dict[str, Any]:
    """How the model is spread over ranks."""
    return {
        **named(sizes, "model"),
        "num_layers": _num_positions(sizes, table),
        "mtp_num_layers": table.dims.num_mtp_layers or None,
        # with two stages the previous and the next rank are one, and batched sends of interleaved stages would be
        # matched with each other's receives
        "overlap_p2p_comm": sizes.virtual_pipeline is not None,
        "batch_p2p_comm": sizes.virtual_pipeline is None,
    }


def _num_positions(sizes: TrainParallelism, table: ModelTable) -> int:
    """Layers as Megatron counts them."""
    if sizes.hybrid_layer_pattern is not None:
        return 2 * table.dims.num_layers
    return table.dims.num_layers + len(sizes.noop_layers)


def _expert_settings(sizes: TrainParallelism, table: ModelTable) -> dict[str, Any]:
    """Which layers have experts and how these run; nothing for a dense model."""
    if not table.dims.num_experts:
        return {}
    if sizes.hybrid_layer_pattern is not None:
        with_experts = [int(has) for has in has_experts(sizes.hybrid_layer_pattern)]
    else:
        by_layer = iter(table.transformer["moe_layer_freq"])  # of the checkpoint; Megatron counts no-op layers
        positions = range(_num_positions(sizes, table))
        with_experts = [0 if position in sizes.noop_layers else next(by_layer) for position in positions]
    return {
        "moe_layer_freq": with_experts,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": has_transformer_engine(),
    }
