"""Construction of a GPT, its DDP wrapper and its optimizer from one configuration.

    initialize_parallel_state    creates Megatron's groups and seeds its generators
    build_model                  specs (specs.py, model_variants.py) -> chunks on the device
    build_actor                  the same -> DDP in elastic memory -> optimizer
    end_training                 undoes build_actor
    destroy_parallel_state       ends Megatron's groups

Teams with a Megatron script create these objects themselves.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
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
    train_sizes,
)
from hybrid_engine.backends.megatron.model_tensors import (
    ModelTensors,
    keep_router_buffers_in_float32,
    move_loose_parameters,
    move_published_buffers,
)
from hybrid_engine.backends.training_side import Modules
from hybrid_engine.config import ActorConfig
from hybrid_engine.config.loading import broken_rules
from hybrid_engine.config.rules import TrainingContext
from hybrid_engine.errors import (
    ModelError,
    StateError,
    require_none,
)
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.groups import end_groups
from hybrid_engine.trainer.learning_rate import param_scheduler
from hybrid_engine.trainer.megatron.model_variants import ValueHead, finish_model, rank_groups
from hybrid_engine.trainer.megatron.specs import layer_spec_for, mtp_spec_for
from megatron_patches.buffers import buffer_allocator


def initialize_parallel_state(actor: ActorConfig, world_size: int, timeout_seconds: float) -> None:
    """Create Megatron's process groups and seed its generators, after torch.distributed's setup.

    `timeout_seconds`, the longest wait for a peer, is rounded up to minutes, Megatron's unit.
    """
    sizes = train_sizes(actor, world_size)
    parallel_state.initialize_model_parallel(
        **named(sizes, "groups"),
        get_embedding_ranks=_embedding_ranks(sizes),
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
        # only megatron-core's checkpoints use them: see training_state.py
        create_gloo_process_groups=False,
    )
    # as in Megatron-LM: equal on tensor and data parallel ranks, different on every pipeline stage
    seed = actor.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def require_no_groups() -> None:
    """Raise StateError if Megatron has process groups: it supports those of one model at a time."""
    if parallel_state.model_parallel_is_initialized():
        raise StateError(
            "Megatron's process groups are in use in this process: shut down the worker that "
            "created them first, or add vLLM to your own model with hybrid_engine.attach",
            code="megatron-groups-in-use",
        )


def destroy_parallel_state() -> None:
    """End Megatron's process groups."""
    # `destroy_model_parallel` only deletes its references to them
    end_groups(*process_groups())
    parallel_state.destroy_model_parallel()


def _embedding_ranks(sizes: TrainParallelism) -> Callable[[list[int]], list[int]] | None:
    """Return a function from a pipeline's ranks to those that keep equal embeddings.

    None: Megatron's default, the first and the last. Multi-token prediction has a copy of the
    embedding, which an explicit layout may put on another stage.
    """
    stages = PipelineParallelLayerLayout.parse_str_to_list(sizes.pipeline_layout or "")
    mtp_stages = [index for index, layers in enumerate(stages) if LayerType.mtp in layers]
    if not mtp_stages:
        return None
    # the layout lists virtual stages, which go round the ranks of the pipeline
    # Of 4 virtual stages on 2 ranks, number 2 is on rank 0 of the pipeline.
    stage = mtp_stages[0] % sizes.pipeline
    return None if stage == sizes.pipeline - 1 else lambda ranks: [ranks[0], ranks[stage]]


@dataclass(frozen=True)
class Actor:
    """A Megatron model with its optimizer, on one rank.

    Attributes:
        chunks: DDP-wrapped model chunks in virtual-pipeline order.
        optimizer: None for a model without training (the reference).
        transformer_config: shared by all chunks.
        noop_layers: positions of layers that return their input.
        scheduler: of learning rate and weight decay; None if both are constant.
    """

    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer | None
    transformer_config: TransformerConfig
    noop_layers: tuple[int, ...] = ()
    scheduler: OptimizerParamScheduler | None = None


def build_actor(
    actor: ActorConfig,
    table: ModelTable,
    hf_config: HfConfig,
    world_size: int,
    *,
    weights_only: bool = False,
) -> Actor:
    """Build model, DDP and optimizer. Arguments and errors as in `build_model`.

    Parameters and gradients are in elastic buffers, which peers on the host can map.
    """
    configs = _checked_configs(actor, table, world_size, weights_only=weights_only)
    config = configs.transformer
    models = _build_chunks(actor, table, hf_config, world_size, config)
    with buffer_allocator(allocate_elastic):
        # as in Megatron-LM: communication of later chunks overlaps with computation without buckets
        chunks = [
            DistributedDataParallel(config, configs.ddp, model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
    move_loose_parameters(chunks)
    move_published_buffers(chunks, table)
    optimizer = get_megatron_optimizer(configs.optimizer, chunks, use_gloo_process_groups=False)
    # Megatron leaves this to its scheduler: norms and biases do not decay (wd_mult 0), and
    # embeddings may have their own learning rate (decoupled_lr)
    for group in optimizer.param_groups:
        group["weight_decay"] = actor.optimizer.weight_decay * group["wd_mult"]
        group["lr"] = group["max_lr"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if actor.overlap_grad_reduce:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in chunks])
    if actor.overlap_param_gather:
        config.param_sync_func = _one_or_list([chunk.start_param_sync for chunk in chunks])
    scheduler = param_scheduler(optimizer, actor.optimizer)
    return Actor(list(chunks), optimizer, config, actor.sizes(world_size).noop_layers, scheduler)


def _one_or_list(
    functions: list[Callable[..., Any]],
) -> Callable[..., Any] | list[Callable[..., Any]]:
    """Return what Megatron's schedules expect: a function for one chunk, a list for several."""
    return functions[0] if len(functions) == 1 else functions


def end_training(actor: Actor) -> None:
    """Break the reference cycles of model and optimizer, so that both can be freed.

    No step is possible afterwards. Python's garbage collector finds neither of the two cycles:

    1. The model's configuration refers to the optimizer, which refers to the model by slices of
       float32 parameters and by hooks that autograd keeps for them.
    2. The hooks of overlapped parameter gathers refer to their model.
    """
    actor.transformer_config.grad_scale_func = None
    for chunk in actor.chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)


def build_reference(
    actor: ActorConfig,
    table: ModelTable,
    hf_config: HfConfig,
    world_size: int,
) -> Actor:
    """Build the same model without LoRA, DDP and optimizer, as a copy that is not trained.

    Arguments and errors as in `build_model`.
    """
    actor = actor.model_copy(update={"lora": None, "frozen_parameters": ()})
    chunks, config = build_model(actor, table, hf_config, world_size)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    return Actor(chunks, None, config, actor.sizes(world_size).noop_layers)


def build_model(
    actor: ActorConfig,
    table: ModelTable,
    hf_config: HfConfig,
    world_size: int,
    *,
    weights_only: bool = False,
) -> tuple[list[torch.nn.Module], TransformerConfig]:
    """Build this rank's model chunks on its device, in the training dtype, without DDP.

    Args:
        actor: layout, dtype, LoRA and frozen parameters.
        table: of the architecture.
        hf_config: config.json of the model.
        world_size: number of ranks.
        weights_only: the model only holds weights. It need not be able to compute: with context
            parallelism it is not.

    Raises:
        ConfigError: for every broken rule of `config/loading.py`, and for features that this
            megatron-core lacks.
        ModelError: for a pattern of `frozen_parameters` that matches nothing, or for LoRA on layers
            that do not support it.
    """
    configs = _checked_configs(actor, table, world_size, weights_only=weights_only)
    chunks = _build_chunks(actor, table, hf_config, world_size, configs.transformer)
    return chunks, configs.transformer


def _checked_configs(
    actor: ActorConfig,
    table: ModelTable,
    world_size: int,
    *,
    weights_only: bool,
) -> MegatronConfigs:
    """Return the configurations of a model, its DDP and its optimizer. Raises ConfigError."""
    context = TrainingContext(actor, table, world_size)
    require_none(broken_rules(context, weights_only=weights_only))
    return megatron_configs(actor, train_sizes(actor, world_size), table)


def _build_chunks(
    actor: ActorConfig,
    table: ModelTable,
    hf_config: HfConfig,
    world_size: int,
    config: TransformerConfig,
) -> list[torch.nn.Module]:
    sizes = train_sizes(actor, world_size)
    # rows of a table of learned positions, as many as in the checkpoint
    max_length = max(actor.seq_length, int(hf_config.get("max_position_embeddings", 0)))
    num_chunks = sizes.virtual_pipeline or 1
    # without virtual stages Megatron expects None, not 0
    vp_stages: Sequence[int | None] = range(num_chunks) if num_chunks > 1 else [None]
    chunks: list[torch.nn.Module] = [
        _build_chunk(sizes, table, config, max_length, stage) for stage in vp_stages
    ]
    if actor.lora is not None:
        for chunk in chunks:
            add_lora(chunk, actor.lora)
    _freeze(chunks, table, actor.frozen_parameters, sizes.noop_layers)
    if config.recompute_granularity is not None:
        _start_gradients_at_embedding(chunks)
    if torch.cuda.is_available():
        chunks = [chunk.cuda() for chunk in chunks]
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
        keep_router_buffers_in_float32(chunks)
    return chunks


def _start_gradients_at_embedding(chunks: Modules) -> None:
    """Make the output of a frozen embedding require a gradient.

    Recomputed layers get no gradients if their input requires none, even if their weights are
    trained.
    """

    def require_gradient(
        _embedding: torch.nn.Module,
        _inputs: Any,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if torch.is_grad_enabled() and not output.requires_grad:
            return output.requires_grad_()
        return output

    for chunk in chunks:
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(require_gradient)


def _build_chunk(
    sizes: TrainParallelism,
    table: ModelTable,
    config: TransformerConfig,
    max_length: int,
    vp_stage: int | None,
) -> LanguageModule:
    # optional; its fused modules are used if it is installed
    with_te = has_transformer_engine()
    settings: dict[str, Any] = {
        "config": config,
        "vocab_size": sizes.padded_vocabulary(table.dims.vocab_size),
        "pre_process": parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "post_process": parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "share_embeddings_and_output_weights": table.dims.tied_embeddings,
        "max_sequence_length": max_length,
        **table.gpt,
        "vp_stage": vp_stage,
    }
    model: LanguageModule
    if sizes.hybrid_layer_pattern is None:
        model = GPTModel(
            transformer_layer_spec=layer_spec_for(
                table, config, with_te, vp_stage, sizes.noop_layers
            ),
            mtp_block_spec=mtp_spec_for(table, config, with_te, vp_stage),
            **settings,
        )
    else:
        # here, because megatron-core 0.16 does not have it
        from hybrid_engine.trainer.megatron.hybrid_layers import HybridModel, stack_spec_for

        model = HybridModel(
            hybrid_stack_spec=stack_spec_for(config, with_te),
            hybrid_layer_pattern=sizes.hybrid_layer_pattern,
            **settings,
        )
    if table.head == "value" and model.post_process:
        model.output_layer = ValueHead(model.config)
    rank_groups(model, table.extras)
    return finish_model(model, table.extras)


def _freeze(
    chunks: list[torch.nn.Module],
    table: ModelTable,
    patterns: Sequence[str],
    noop_layers: Sequence[int],
) -> None:
    """Exclude the parameters that match `patterns` from training. Collective.

    Raises ModelError if a pattern matches no parameter on any rank.
    """
    if not patterns:
        return
    parameters = list(ModelTensors(chunks, table, noop_layers).named_parameters())
    counts = torch.zeros(len(patterns), dtype=torch.int64)
    for index, pattern in enumerate(patterns):
        for name, parameter in parameters:
            if fnmatch.fnmatchcase(name, pattern):
                parameter.requires_grad_(False)
                counts[index] += 1
    # a pattern may match parameters of other stages only
    counts = counts.to(model_device())
    torch.distributed.all_reduce(counts)
    unmatched = [pattern for pattern, count in zip(patterns, counts, strict=True) if not count]
    if unmatched:
        raise ModelError(
            f"actor_config.frozen_parameters: no parameter matches {', '.join(unmatched)}; use "
            "Megatron's parameter names, with numbers of layers in the whole model",
            code="pattern-without-parameter",
        )
