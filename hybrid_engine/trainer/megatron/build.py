"""Builds a GPT, its DDP wrapper and its optimizer from one configuration.

    initialize_parallel_state    Megatron's groups and generators
    build_model                  specs -> chunks on the device        (megatron_config.py, specs.py, model_variants.py)
    build_actor                  ... -> DDP in elastic memory -> optimizer
    end_training                 ... and back
    destroy_parallel_state       Megatron's groups end

Teams with a Megatron script bring these objects themselves.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from hybrid_engine.backends.megatron.forward_probe import model_device
from hybrid_engine.backends.megatron.internals import process_groups
from hybrid_engine.backends.megatron.lora_layers import add_lora
from hybrid_engine.backends.megatron.megatron_config import (
    MegatronConfigs,
    has_transformer_engine,
    megatron_configs,
    param_scheduler,
    train_sizes,
)
from hybrid_engine.backends.megatron.model_tensors import (
    ModelTensors,
    keep_expert_bias_in_float32,
    move_loose_parameters,
    move_published_buffers,
)
from hybrid_engine.config import ActorConfig
from hybrid_engine.config.loading import broken_rules
from hybrid_engine.config.rules import TrainingContext
from hybrid_engine.errors import ConfigError, ModelError, StateError
from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.groups import end_groups
from hybrid_engine.trainer.megatron.model_variants import finish_model, put_value_head, rank_groups
from hybrid_engine.trainer.megatron.specs import layer_spec_for, mtp_spec_for
from megatron_patches.buffers import buffer_allocator


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


@dataclass(frozen=True)
class Actor:
    """A Megatron model with what trains it, on one rank.

    Attributes:
        chunks: DDP-wrapped model chunks in virtual-pipeline order.
        optimizer: None for a model that is only read (the reference).
        transformer_config: shared by all chunks.
        noop_layers: positions of layers that pass their input on.
        scheduler: of learning rate and weight decay; None where these stay.
    """

    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer | None
    transformer_config: TransformerConfig
    noop_layers: tuple[int, ...] = ()
    scheduler: OptimizerParamScheduler | None = None


def build_actor(
    actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any], world_size: int, *, weights_only: bool = False
) -> Actor:
    """Model, DDP and optimizer; parameters and gradients live in elastic buffers that peers on the host can map.

    Args and errors as in `build_model`.
    """
    configs = checked_configs(actor, table, world_size, weights_only=weights_only)
    config = configs.transformer
    models = _build_chunks(actor, table, hf_config, world_size, config)
    with buffer_allocator(allocate_elastic):
        chunks = [
            DistributedDataParallel(config, configs.ddp, model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
    move_loose_parameters(chunks)
    move_published_buffers(chunks, table)
    optimizer = get_megatron_optimizer(configs.optimizer, chunks, use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # Megatron leaves this to its scheduler: norms and biases do not decay
        group["weight_decay"] = actor.optimizer.weight_decay * group["wd_mult"]
        group["lr"] = group["max_lr"]  # another where decoupled_lr is
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if actor.overlap_grad_reduce:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in chunks])
    if actor.overlap_param_gather:
        config.param_sync_func = _one_or_list([chunk.start_param_sync for chunk in chunks])
    scheduler = param_scheduler(optimizer, actor.optimizer)
    return Actor(list(chunks), optimizer, config, actor.sizes(world_size).noop_layers, scheduler)


def end_training(actor: Actor) -> None:
    """Break the reference cycles around model and optimizer, so that both can be freed; no step afterwards.

    Python's collector sees neither cycle. The model refers to the optimizer by its configuration, the optimizer to the
    model by slices of float32 parameters and the hooks that autograd keeps for them. The other one is of the hooks of
    overlapped gathers.
    """
    actor.transformer_config.grad_scale_func = None
    for chunk in actor.chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)


def build_reference(actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any], world_size: int) -> Actor:
    """The same model without DDP and optimizer, for reading only. Args and errors as in `build_model`."""
    actor = actor.model_copy(update={"lora": None, "frozen_parameters": ()})
    chunks, config = build_model(actor, table, hf_config, world_size)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    return Actor(chunks, None, config, actor.sizes(world_size).noop_layers)


def build_model(
    actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any], world_size: int, *, weights_only: bool = False
) -> tuple[list[torch.nn.Module], TransformerConfig]:
    """This rank's model chunks on its device, in the training dtype, without DDP.

    Args:
        actor: layout, dtype, LoRA and frozen parameters.
        table: of the architecture.
        hf_config: config.json of the model.
        world_size: number of ranks.
        weights_only: the model holds weights and need not compute; with context parallelism it does not.

    Raises:
        ConfigError: for every broken rule of `config/loading.py`, and for what this megatron-core lacks.
        ModelError: for a pattern of `frozen_parameters` that matches nothing, or LoRA on layers that cannot have it.
    """
    config = checked_configs(actor, table, world_size, weights_only=weights_only).transformer
    return _build_chunks(actor, table, hf_config, world_size, config), config


def checked_configs(
    actor: ActorConfig, table: ModelTable, world_size: int, *, weights_only: bool = False
) -> MegatronConfigs:
    """What a model, its DDP and its optimizer are configured by. Args and errors as in `build_model`."""
    context = TrainingContext(actor, table, world_size)
    if violations := broken_rules(context, weights_only=weights_only):
        raise ConfigError(violations)
    return megatron_configs(actor, train_sizes(actor, world_size), table)


def _build_chunks(
    actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any], world_size: int, config: TransformerConfig
) -> list[torch.nn.Module]:
    sizes = train_sizes(actor, world_size)
    max_length = max(actor.seq_length, int(hf_config.get("max_position_embeddings", 0)))
    num_chunks = sizes.virtual_pipeline or 1
    vp_stages: Sequence[int | None] = range(num_chunks) if num_chunks > 1 else [None]
    chunks: list[torch.nn.Module] = [_build_chunk(sizes, table, config, max_length, stage) for stage in vp_stages]
    if actor.lora is not None:
        for chunk in chunks:
            add_lora(chunk, actor.lora)
    _freeze(chunks, table, actor.frozen_parameters, sizes.noop_layers)
    if config.recompute_granularity is not None:
        _let_gradients_begin(chunks)
    if torch.cuda.is_available():
        chunks = [chunk.cuda() for chunk in chunks]
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
        keep_expert_bias_in_float32(chunks)
    return chunks


def _let_gradients_begin(chunks: Sequence[torch.nn.Module]) -> None:
    """Have a frozen embedding's output ask for a gradient: what is computed again gets none where its input asks for
    none, however many weights of it are trained."""

    def ask(_embedding: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    for chunk in chunks:
        if (embedding := getattr(chunk, "embedding", None)) is not None:
            embedding.register_forward_hook(ask)


def _build_chunk(
    sizes: TrainParallelism, table: ModelTable, config: TransformerConfig, max_length: int, vp_stage: int | None
) -> LanguageModule:
    with_te = has_transformer_engine()
    settings: dict[str, Any] = {
        "config": config,
        "vocab_size": sizes.padded_vocabulary(table.dims.vocab_size),
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "share_embeddings_and_output_weights": table.dims.tied_embeddings,
        "max_sequence_length": max_length,
        **table.gpt,
        "vp_stage": vp_stage,
    }
    model: LanguageModule
    if sizes.hybrid_layer_pattern is None:
        model = GPTModel(
            transformer_layer_spec=layer_spec_for(table, config, with_te, vp_stage, sizes.noop_layers),
            mtp_block_spec=mtp_spec_for(table, config, with_te, vp_stage),
            **settings,
        )
    else:
        # here, because megatron-core 0.16 does not have it
        from hybrid_engine.trainer.megatron.hybrid_layers import HybridModel, stack_spec_for

        stack_spec = stack_spec_for(config, with_te)
        model = HybridModel(hybrid_stack_spec=stack_spec, hybrid_layer_pattern=sizes.hybrid_layer_pattern, **settings)
    if table.head == "value":
        put_value_head(model)
    rank_groups(model, table.extras)
    return finish_model(model, table.extras)


def _freeze(
    chunks: list[torch.nn.Module], table: ModelTable, patterns: Sequence[str], noop_layers: Sequence[int]
) -> None:
    """Take what `patterns` name out of training. Collective; raises ModelError for a pattern of nothing."""
    if not patterns:
        return
    parameters = list(ModelTensors(chunks, table, noop_layers).named_parameters())
    num_found = torch.zeros(len(patterns), dtype=torch.int64)
    for index, pattern in enumerate(patterns):
        for parameter in (parameter for name, parameter in parameters if fnmatch.fnmatchcase(name, pattern)):
            parameter.requires_grad_(False)
            num_found[index] += 1
    num_found = num_found.to(model_device())
    torch.distributed.all_reduce(num_found)
    unknown = [pattern for pattern, count in zip(patterns, num_found, strict=True) if not count]
    if unknown:
        raise ModelError(f"actor_config.frozen_parameters: no parameter matches {', '.join(unknown)}")


def _one_or_list(functions: list[Callable[..., Any]]) -> Callable[..., Any] | list[Callable[..., Any]]:
    """Megatron's schedules take one function for one chunk and a list for several."""
    return functions[0] if len(functions) == 1 else functions
