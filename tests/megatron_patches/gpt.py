"""A small Llama-like GPT on real megatron-core, for every test that needs a training model.

    with running(spec) as gpt:          # process group, parallel state, model, DDP, optimizer
        losses = [gpt.train_step() for _ in range(3)]

Runs on the ranks of `tests.harness.launch.launch`. What a model computes depends on its `GptSpec` sizes and
seed only, not on how it is sharded: weights are filled from one generator per full tensor (found by
megatron's own `sharded_state_dict`), and each rank takes its part. So losses of two layouts can be
compared.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    model_parallel_cuda_manual_seed,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_patches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GptSpec:
    """Everything a test can choose. Sizes in elements, batches in sequences.

    Layout: `tp`, `pp`, `vpp` (model chunks per pipeline rank), `ep`, `etp` (None: as tp); data
    parallel is what remains of the world size. `sequence_parallel` None: on when megatron demands it
    (MoE with tp > 1). `config_overrides` are further fields of TransformerConfig by name, such as
    ``num_layers_in_first_pipeline_stage``, `ddp_overrides` of DistributedDataParallelConfig; they win.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool | None = None

    dtype: str = "fp32"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True
    bucket_size: int | None = None
    lr: float = 1e-2
    initial_loss_scale: float = 2.0**8
    recompute: bool = False

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_groups: int = 2
    head_dim: int = 16
    ffn_size: int = 96
    vocab_size: int = 128
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    num_experts: int | None = None
    expert_ffn_size: int = 48
    topk: int = 2
    moe_first_dense_layers: int = 0

    seq_length: int = 16
    micro_batch_size: int = 1
    global_batch_size: int = 4
    seed: int = 1234

    config_overrides: dict[str, Any] = field(default_factory=dict)
    ddp_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {sorted(DTYPES)}")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs distributed_optimizer and overlap_grad_reduce")

    @property
    def uses_sequence_parallel(self) -> bool:
        if self.sequence_parallel is None:
            return self.num_experts is not None and self.tp > 1
        return self.sequence_parallel

    @property
    def params_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def transformer_config(spec: GptSpec) -> TransformerConfig:
    """Megatron's configuration for `spec`, for CPU: fusions off, CPU initialisation.

    Interleaved stages use unbatched sends: with two pipeline ranks each is the other's previous and
    next one, and batched sends would be matched to the wrong receives (on NCCL as well).
    """
    moe: dict[str, Any] = {}
    if spec.num_experts is not None:
        sparse = spec.num_layers - spec.moe_first_dense_layers
        moe = {
            "num_moe_experts": spec.num_experts,
            "moe_ffn_hidden_size": spec.expert_ffn_size,
            "moe_layer_freq": [0] * spec.moe_first_dense_layers + [1] * sparse,
            "moe_router_topk": spec.topk,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    fields: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_groups,
        "kv_channels": spec.head_dim,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "hidden_dropout": spec.dropout,
        "attention_dropout": spec.dropout,
        "bf16": spec.dtype == "bf16",
        "fp16": spec.dtype == "fp16",
        "params_dtype": spec.params_dtype,
        "pipeline_dtype": spec.params_dtype,
        "tensor_model_parallel_size": spec.tp,
        "pipeline_model_parallel_size": spec.pp,
        "virtual_pipeline_model_parallel_size": spec.vpp,
        "expert_model_parallel_size": spec.ep,
        "expert_tensor_parallel_size": spec.etp,
        "sequence_parallel": spec.uses_sequence_parallel,
        "overlap_p2p_comm": spec.vpp is not None,
        "batch_p2p_comm": spec.vpp is None,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**fields, **moe, **(recompute if spec.recompute else {}), **spec.config_overrides})


def start(spec: GptSpec) -> None:
    """Apply the patches, join the gloo process group and build megatron's parallel state."""
    megatron_patches.apply()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=spec.tp,
        pipeline_model_parallel_size=spec.pp,
        virtual_pipeline_model_parallel_size=spec.vpp,
        expert_model_parallel_size=spec.ep,
        expert_tensor_parallel_size=spec.etp,
    )
    torch.manual_seed(spec.seed)
    model_parallel_cuda_manual_seed(spec.seed)


def stop() -> None:
    """Undo `start`'s parallel state; the process group stays for the next `start` of this process."""
    for group in filter(None, parallel_state._global_process_group_list or ()):  # Megatron only forgets them
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def build_chunks(spec: GptSpec, config: TransformerConfig) -> list[GPTModel]:
    """This rank's bare model chunks, one per virtual stage, filled with the weights of `spec`."""
    chunks = []
    for vp_stage in range(spec.vpp) if spec.vpp else [None]:
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage),
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        fill_weights(model, spec.seed)
        chunks.append(model)
    return chunks


def fill_weights(model: GPTModel, seed: int) -> None:
    """Set every weight from its full tensor's own generator, so that all layouts hold the same model.

    Norm weights lie around 1, all others around 0.
    """
    for tensor in sharded_tensors(model):
        generator = torch.Generator().manual_seed(seed + zlib.crc32(tensor.key.encode()))
        full = torch.randn(tensor.global_shape, generator=generator) * 0.1
        if "norm" in tensor.key:
            full += 1.0
        lengths = [1] * tensor.prepend_axis_num + list(tensor.local_shape)
        region = full[tuple(slice(o, o + n) for o, n in zip(tensor.global_offset, lengths, strict=True))]
        tensor.data.detach().copy_(region.reshape(tensor.local_shape))


def sharded_tensors(model: torch.nn.Module) -> Iterator[ShardedTensor]:
    """What Megatron itself says of this rank's part of every weight: global shape, offset, replica, live values."""
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    yield from _sharded_tensors_in(sharded)


def _sharded_tensors_in(tree: Any) -> Iterator[ShardedTensor]:
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _sharded_tensors_in(value)


def wrap_ddp(spec: GptSpec, config: TransformerConfig, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Chunks in half precision (when asked for) inside Megatron's DDP, which owns the flat buffers."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=spec.grad_reduce_in_fp32,
        overlap_grad_reduce=spec.overlap_grad_reduce,
        overlap_param_gather=spec.overlap_param_gather,
        use_distributed_optimizer=spec.distributed_optimizer,
        bucket_size=spec.bucket_size,
        **spec.ddp_overrides,
    )
    if spec.dtype != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(spec: GptSpec, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Adam by way of `get_megatron_optimizer`, gradients clipped to norm 1."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.lr,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=spec.dtype == "bf16",
        fp16=spec.dtype == "fp16",
        params_dtype=spec.params_dtype,
        initial_loss_scale=spec.initial_loss_scale,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_param_gather=spec.overlap_param_gather,
    )
    return get_megatron_optimizer(config, chunks)


@dataclass(frozen=True)
class Gpt:
    """A model that trains: what `running` and `build` give."""

    spec: GptSpec
    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer

    @property
    def num_microbatches(self) -> int:
        return self.spec.global_batch_size // (
            self.spec.micro_batch_size * parallel_state.get_data_parallel_world_size()
        )

    def train_step(self, step: int = 0) -> float:
        """One optimizer step on the batch of number `step`; the loss before it, equal on all ranks."""
        loss = self.forward_backward(step)
        self.optimizer.step()
        return loss

    def forward_backward(self, step: int = 0, forward_only: bool = False) -> float:
        """Loss of batch `step` over the whole global batch; gradients are left in the buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [self._microbatches(step) for _ in self.chunks]
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.num_microbatches,
            seq_length=self.spec.seq_length,
            micro_batch_size=self.spec.micro_batch_size,
            forward_only=forward_only,
        )
        return self._mean_loss([output["loss"] for output in outputs])

    def _microbatches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """This data-parallel rank's share of global batch `step`: its contiguous run of sequences."""
        tokens = batch_tokens(self.spec, step)
        num_local = self.spec.global_batch_size // parallel_state.get_data_parallel_world_size()
        first = parallel_state.get_data_parallel_rank() * num_local
        for rows in tokens[first : first + num_local].split(self.spec.micro_batch_size):
            yield {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def _mean_loss(self, losses: list[torch.Tensor]) -> float:
        """Mean over microbatches and data-parallel ranks, sent from the last pipeline stage to all."""
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
        dist.broadcast(
            total,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return total.item()


def batch_tokens(spec: GptSpec, step: int) -> torch.Tensor:
    """Token ids of global batch `step`, int64 of shape (global_batch_size, seq_length + 1)."""
    generator = torch.Generator().manual_seed(spec.seed * 1000 + step)
    return torch.randint(0, spec.vocab_size, (spec.global_batch_size, spec.seq_length + 1), generator=generator)


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    """Megatron's forward_step_func: per-token losses and the function that averages them."""
    batch = next(data_iterator)
    num_tokens = batch["tokens"].shape[1]
    positions = torch.arange(num_tokens).expand_as(batch["tokens"])
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool).triu(1)
    output = model(batch["tokens"], positions, mask, labels=batch["labels"])
    return output, partial(_mean_over_tokens)


def _mean_over_tokens(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def build(spec: GptSpec) -> Gpt:
    """Model, DDP and optimizer for a parallel state that `start` has built."""
    config = transformer_config(spec)
    chunks = wrap_ddp(spec, config, build_chunks(spec, config))
    optimizer = build_optimizer(spec, chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if spec.overlap_grad_reduce:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    return Gpt(spec, config, chunks, optimizer)


def _one_or_list(values: list[Any]) -> Any:
    return values if len(values) > 1 else values[0]


@contextlib.contextmanager
def running(spec: GptSpec) -> Iterator[Gpt]:
    """`start`, `build`, and `stop` at the end. Several may follow one another in one process."""
    start(spec)
    try:
        gpt = build(spec)
        try:
            yield gpt
        finally:
            gpt.config.grad_scale_func = None  # refers to the optimizer, in a circle that no collector sees
    finally:
        stop()


def rank() -> int:
    return int(os.environ["RANK"])
