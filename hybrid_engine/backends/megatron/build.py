"""Builds Megatron's parallel state, a GPT, its DDP wrapper and its optimizer from one configuration.

Teams with a Megatron script of their own bring these objects; the example and the tests build them here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ModelError
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.models.table import ModelTable
from megatron_patches.buffers import buffer_allocator

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
"""Activation functions by the names that the tables use."""


@dataclass(frozen=True)
class Actor:
    """A Megatron model with what trains it, on one rank.

    Attributes:
        chunks: DDP-wrapped model chunks in virtual-pipeline order.
        optimizer: None for a model that is only read (the reference).
        transformer_config: shared by all chunks.
    """

    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer | None
    transformer_config: TransformerConfig


def initialize_parallel_state(actor: ActorConfig, timeout_seconds: float) -> None:
    """Create Megatron's process groups and seed its generators. torch.distributed is initialised already.

    `timeout_seconds`, the longest wait for a peer, is rounded up to whole minutes, which is what Megatron takes.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=actor.tensor_model_parallel_size,
        pipeline_model_parallel_size=actor.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=actor.virtual_pipeline_model_parallel_size,
        context_parallel_size=actor.context_parallel_size,
        expert_model_parallel_size=actor.expert_model_parallel_size,
        expert_tensor_parallel_size=actor.expert_tensor_parallel_size,
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
    )
    # as Megatron-LM: equal on tensor and data parallel ranks, another one on every pipeline stage
    seed = actor.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy_parallel_state() -> None:
    """End Megatron's process groups."""
    parallel_state.destroy_model_parallel()


def build_actor(actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any]) -> Actor:
    """Model, DDP and optimizer; parameters and gradients live in elastic buffers that peers on the host can map."""
    chunks, config = build_model(actor, table, hf_config)
    with buffer_allocator(allocate_elastic):
        chunks = [_wrap_ddp(actor, config, chunk, index) for index, chunk in enumerate(chunks)]
    if not actor.use_distributed_optimizer:
        _move_to_elastic_buffers(chunks)
    optimizer = get_megatron_optimizer(_optimizer_config(actor), chunks)
    for group in optimizer.param_groups:  # Megatron leaves this to its scheduler: norms and biases do not decay
        group["weight_decay"] = actor.optimizer.weight_decay * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if actor.overlap_grad_reduce:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in chunks])
    if actor.overlap_param_gather:
        config.param_sync_func = _one_or_list([chunk.start_param_sync for chunk in chunks])
    return Actor(chunks, optimizer, config)


def build_reference(actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any]) -> Actor:
    """The same model without DDP and optimizer, for reading only."""
    chunks, config = build_model(actor, table, hf_config)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    return Actor(chunks, None, config)


def build_model(
    actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any]
) -> tuple[list[torch.nn.Module], TransformerConfig]:
    """This rank's model chunks on its device, in the training dtype, without DDP.

    Raises ModelError for settings of the config that the model would not have.
    """
    if table.not_built:
        raise ModelError(f"not built here: {'; '.join(table.not_built)}. Bring your own Megatron model")
    config = _transformer_config(actor, table)
    num_chunks = actor.virtual_pipeline_model_parallel_size or 1
    chunks = [_build_chunk(actor, table, hf_config, config, stage, num_chunks) for stage in range(num_chunks)]
    if torch.cuda.is_available():
        chunks = [chunk.cuda() for chunk in chunks]
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return chunks, config


def padded_vocab_size(actor: ActorConfig, vocab_size: int) -> int:
    """Rows of the training embedding: vocab_size up to a multiple of `make_vocab_size_divisible_by` times TP."""
    multiple = actor.make_vocab_size_divisible_by * actor.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def _build_chunk(
    actor: ActorConfig,
    table: ModelTable,
    hf_config: Mapping[str, Any],
    config: TransformerConfig,
    stage: int,
    num_chunks: int,
) -> GPTModel:
    vp_stage = stage if num_chunks > 1 else None
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(config),
        vocab_size=padded_vocab_size(actor, table.dims.vocab_size),
        max_sequence_length=max(actor.seq_length, int(hf_config.get("max_position_embeddings", 0))),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=table.dims.tied_embeddings,
        **table.gpt,
        vp_stage=vp_stage,
    )


def _layer_spec(config: TransformerConfig):
    """Transformer Engine's layers where a GPU and the package are there, megatron-core's own otherwise."""
    if torch.cuda.is_available() and find_spec("transformer_engine") is not None:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)


def _transformer_config(actor: ActorConfig, table: ModelTable) -> TransformerConfig:
    dtype = getattr(torch, actor.params_dtype)
    has_virtual_stages = actor.virtual_pipeline_model_parallel_size is not None
    settings = dict(table.transformer)
    settings["activation_func"] = ACTIVATIONS[settings["activation_func"]]
    return TransformerConfig(
        **settings,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=actor.tensor_model_parallel_size,
        pipeline_model_parallel_size=actor.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=actor.virtual_pipeline_model_parallel_size,
        context_parallel_size=actor.context_parallel_size,
        # batched sends of two interleaved stages would meet each other's receives: previous and next rank are one
        overlap_p2p_comm=has_virtual_stages,
        batch_p2p_comm=not has_virtual_stages,
        sequence_parallel=actor.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=not torch.cuda.is_available(),
        # megatron-core's fused kernels are CUDA only
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )


def _wrap_ddp(
    actor: ActorConfig, config: TransformerConfig, chunk: torch.nn.Module, index: int
) -> DistributedDataParallel:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=actor.overlap_grad_reduce,
        overlap_param_gather=actor.overlap_param_gather,
        use_distributed_optimizer=actor.use_distributed_optimizer,
    )
    return DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)


def _move_to_elastic_buffers(chunks: list[torch.nn.Module]) -> None:
    """Without the distributed optimizer DDP leaves parameters where they are; move them into one elastic buffer.

    Done before the optimizer is built, so nothing refers to the old storage.
    """
    for chunk in chunks:
        parameters = list(chunk.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        flat = allocate_elastic(sum(sizes), parameters[0].dtype, parameters[0].device, "param")
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            part.copy_(parameter.data.reshape(-1))
            parameter.data = part.view(parameter.shape)


def _optimizer_config(actor: ActorConfig) -> OptimizerConfig:
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


def _one_or_list(functions: list[Any]) -> Any:
    """Megatron's schedules take one function for one chunk and a list for several."""
    return functions[0] if len(functions) == 1 else functions
