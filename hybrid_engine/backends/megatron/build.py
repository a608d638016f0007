"""Builds Megatron's parallel state, a GPT, its DDP wrapper and its optimizer from one configuration.

Teams with a Megatron script of their own bring these objects; the example and the tests build them here.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.lora_layers import add_adapters
from hybrid_engine.backends.megatron.model_variants import finish_model
from hybrid_engine.backends.megatron.routing import rank_groups
from hybrid_engine.backends.megatron.specs import layer_spec_for, mtp_spec_for
from hybrid_engine.config import ActorConfig
from hybrid_engine.config.constraints import broken_rules
from hybrid_engine.config.rules import TrainingContext
from hybrid_engine.errors import ConfigError, ModelError, Violation
from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.process_groups import end_groups
from megatron_patches.buffers import buffer_allocator, iter_buffers

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Activation functions by the names that the tables use."""


@dataclass(frozen=True)
class Actor:
    """A Megatron model with what trains it, on one rank.

    Attributes:
        chunks: DDP-wrapped model chunks in virtual-pipeline order.
        optimizer: None for a model that is only read (the reference).
        transformer_config: shared by all chunks.
        noop_layers: positions of no-op layers.
    """

    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer | None
    transformer_config: TransformerConfig
    noop_layers: tuple[int, ...] = ()


def initialize_parallel_state(actor: ActorConfig, timeout_seconds: float) -> None:
    """Create Megatron's process groups and seed its generators. torch.distributed is initialised already.

    `timeout_seconds`, the longest wait for a peer, is rounded up to whole minutes, which is what Megatron takes.
    """
    sizes = _sizes_of(actor)
    parallel_state.initialize_model_parallel(
        **named(sizes, "groups"),
        get_embedding_ranks=_embedding_ranks(sizes),
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
    )
    # as Megatron-LM: equal on tensor and data parallel ranks, another one on every pipeline stage
    seed = actor.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _sizes_of(actor: ActorConfig) -> TrainParallelism:
    """The parallel sizes, with the virtual stages that a layout says by itself."""
    sizes = actor.sizes(torch.distributed.get_world_size())
    return replace(sizes, virtual_pipeline=_num_virtual_stages(sizes))


def _embedding_ranks(sizes: TrainParallelism) -> Callable[[list[int]], list[int]] | None:
    """Which ranks of a pipeline keep the embedding alike: Megatron's choice, unless multi-token prediction, which has a
    copy of it, is on another stage than the last."""
    stage = _mtp_stage(sizes)
    return None if stage in (None, sizes.pipeline - 1) else lambda ranks: [ranks[0], ranks[stage]]


def _mtp_stage(sizes: TrainParallelism) -> int | None:
    """The stage to which a layout that is written out gives multi-token prediction."""
    stages = PipelineParallelLayerLayout.parse_str_to_list(sizes.pipeline_layout or "")
    found = [index for index, layers in enumerate(stages) if LayerType.mtp in layers]
    return found[0] % sizes.pipeline if found else None


def end_training(actor: Actor) -> None:
    """Part model and optimizer, so that both can be freed; no step afterwards.

    The model refers to the optimizer by its configuration, the optimizer to the model by slices of float32 parameters
    and the hooks that autograd keeps for them: a circle that Python's collector does not see. Hooks of overlapped
    gathers close another one.
    """
    actor.transformer_config.grad_scale_func = None
    for chunk in actor.chunks:
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            chunk.disable_forward_pre_hook(param_sync=False)


def destroy_parallel_state() -> None:
    """End Megatron's process groups, which Megatron itself only forgets but for those of gloo beside NCCL."""
    end_groups(*(parallel_state._global_process_group_list or ()))
    parallel_state.destroy_model_parallel()


def build_actor(
    actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any], *, weights_only: bool = False
) -> Actor:
    """Model, DDP and optimizer; parameters and gradients live in elastic buffers that peers on the host can map.

    `weights_only`: see `build_model`.
    """
    chunks, config = build_model(actor, table, hf_config, weights_only=weights_only)
    with buffer_allocator(allocate_elastic):
        chunks = [_wrap_ddp(actor, config, chunk, index) for index, chunk in enumerate(chunks)]
    move_loose_parameters(chunks)
    move_published_buffers(chunks, table)
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
    return Actor(chunks, optimizer, config, _sizes_of(actor).noop_layers)


def build_reference(actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any]) -> Actor:
    """The same model without DDP and optimizer, for reading only."""
    chunks, config = build_model(actor.model_copy(update={"lora": None, "frozen_parameters": ()}), table, hf_config)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    return Actor(chunks, None, config, _sizes_of(actor).noop_layers)


def build_model(
    actor: ActorConfig, table: ModelTable, hf_config: Mapping[str, Any], *, weights_only: bool = False
) -> tuple[list[torch.nn.Module], TransformerConfig]:
    """This rank's model chunks on its device, in the training dtype, without DDP.

    `weights_only`: the model is there to hold weights and need not run; with context parallelism it does not.

    Raises ConfigError for settings of the config that the model would not have, and for what else breaks a rule of
    `config/constraints.py`.
    """
    context = TrainingContext(actor, table, torch.distributed.get_world_size())
    if violations := broken_rules(context, weights_only=weights_only):
        raise ConfigError(violations)
    sizes = _sizes_of(actor)
    config = _transformer_config(actor, sizes, table)
    num_chunks = sizes.virtual_pipeline or 1
    chunks = [_build_chunk(actor, sizes, table, hf_config, config, stage) for stage in range(num_chunks)]
    if actor.lora is not None:
        for chunk in chunks:
            add_adapters(chunk, actor.lora)
    _freeze(chunks, table, actor)
    if torch.cuda.is_available():
        chunks = [chunk.cuda() for chunk in chunks]
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
        keep_expert_bias_in_float32(chunks)
    return chunks, config


def _num_virtual_stages(sizes: TrainParallelism) -> int | None:
    """Model chunks per pipeline stage; a layout that is written out says it itself. None without virtual stages."""
    if sizes.pipeline_layout is None:
        return sizes.virtual_pipeline
    num_chunks = PipelineParallelLayerLayout.get_num_stages_from_str(sizes.pipeline_layout) // sizes.pipeline
    return num_chunks if num_chunks > 1 else None


def _build_chunk(
    actor: ActorConfig,
    sizes: TrainParallelism,
    table: ModelTable,
    hf_config: Mapping[str, Any],
    config: TransformerConfig,
    stage: int,
) -> GPTModel:
    vp_stage = stage if (sizes.virtual_pipeline or 1) > 1 else None
    with_te = _has_transformer_engine()
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec_for(table, config, with_te, vp_stage, sizes.noop_layers),
        vocab_size=sizes.padded_vocabulary(table.dims.vocab_size),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=table.dims.tied_embeddings,
        **{"max_sequence_length": max(actor.seq_length, int(hf_config.get("max_position_embeddings", 0))), **table.gpt},
        mtp_block_spec=mtp_spec_for(table, config, with_te, vp_stage),
        vp_stage=vp_stage,
    )
    rank_groups(model, table.extras)
    return finish_model(model, table.extras)


def _has_transformer_engine() -> bool:
    """Transformer Engine's layers are built where a GPU and the package are there, megatron-core's own otherwise."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def _transformer_config(actor: ActorConfig, sizes: TrainParallelism, table: ModelTable) -> TransformerConfig:
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
        # megatron-core's fused kernels are CUDA only
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )


def _require_known(settings: Mapping[str, Any], config_class: type[TransformerConfig]) -> None:
    """Raise ConfigError for what the model needs and this megatron-core cannot do."""
    unknown = sorted(settings.keys() - {field.name for field in fields(config_class)})
    if unknown:
        problem = f"needs {', '.join(unknown)}, which megatron-core {megatron.core.__version__} does not have"
        raise ConfigError([Violation("model", problem, "install a later megatron-core")])


def _size_settings(sizes: TrainParallelism, table: ModelTable) -> dict[str, Any]:
    """How the model is spread over ranks."""
    return {
        **named(sizes, "model"),
        "num_layers": table.dims.num_layers + len(sizes.noop_layers),
        "mtp_num_layers": table.dims.num_mtp_layers or None,
        # batched sends of two interleaved stages would meet each other's receives: previous and next rank are one
        "overlap_p2p_comm": sizes.virtual_pipeline is not None,
        "batch_p2p_comm": sizes.virtual_pipeline is None,
    }


def _expert_settings(sizes: TrainParallelism, table: ModelTable) -> dict[str, Any]:
    """Which layers have experts and how these run; nothing for a dense model."""
    if not table.dims.num_experts:
        return {}
    has_experts = iter(table.transformer["moe_layer_freq"])
    num_positions = table.dims.num_layers + len(sizes.noop_layers)
    return {
        "moe_layer_freq": [0 if p in sizes.noop_layers else next(has_experts) for p in range(num_positions)],
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": _has_transformer_engine(),
    }


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


def _freeze(chunks: list[torch.nn.Module], table: ModelTable, actor: ActorConfig) -> None:
    """Take what `frozen_parameters` names out of training. Collective; raises ModelError for a pattern of nothing."""
    if not actor.frozen_parameters:
        return
    parameters = list(MegatronAdaptor(chunks, table, _sizes_of(actor).noop_layers).named_parameters())
    num_found = torch.zeros(len(actor.frozen_parameters), dtype=torch.int64)
    for index, pattern in enumerate(actor.frozen_parameters):
        for parameter in (parameter for name, parameter in parameters if fnmatch.fnmatchcase(name, pattern)):
            parameter.requires_grad_(False)
            num_found[index] += 1
    torch.distributed.all_reduce(num_found)
    unknown = [pattern for pattern, count in zip(actor.frozen_parameters, num_found, strict=True) if not count]
    if unknown:
        raise ModelError(f"actor_config.frozen_parameters: no parameter is called {', '.join(unknown)}")


def move_loose_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Move parameters that are outside of DDP's buffers into elastic ones, where peers on the host can map them.

    Those are the frozen ones and, without the distributed optimizer, all. Done before the optimizer is built, so
    nothing refers to the old storage.
    """
    records = [record for record in iter_buffers(chunks) if record.param_data is not None]
    in_buffers = {slot.param for record in records for slot in record.slots}
    for chunk in chunks:
        _move_together([parameter for parameter in chunk.parameters() if parameter not in in_buffers])


def _move_together(tensors: Sequence[torch.Tensor]) -> None:
    """Move tensors into one elastic buffer per dtype: each buffer takes whole pages and a file descriptor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        sizes = [tensor.numel() for tensor in same]
        flat = allocate_elastic(sum(sizes), dtype, same[0].device, "param")
        for tensor, part in zip(same, flat.split(sizes), strict=True):
            part.copy_(tensor.data.reshape(-1))
            tensor.data = part.view(tensor.shape)


def keep_expert_bias_in_float32(chunks: Sequence[torch.nn.Module]) -> None:
    """Float16Module rounds the routers' biases; Megatron undoes that at the first forward pass, with new storage."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module._maintain_float32_expert_bias()


def move_published_buffers(chunks: Sequence[torch.nn.Module], table: ModelTable) -> None:
    """Persistent buffers that go to vLLM, where its ranks on this host can map them."""
    for chunk in chunks:
        buffers = unwrap_model(chunk).named_buffers()
        _move_together([tensor for name, tensor in buffers if table.match(name) is not None])


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
