"""A small Llama-like GPT on real megatron-core, for tests of its buffers and optimizers.

    with running(spec) as gpt:          # process group, parallel state, model, DDP, optimizer
        losses = [gpt.train_step() for _ in range(3)]

Runs on ranks of `tests.harness.launch`. Weights come from Megatron's random generators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_patches
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.values import Values

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEQ_LENGTH = 16
VOCAB_SIZE = 128
NUM_SEQUENCES = 4


@dataclass(frozen=True)
class GptSpec:
    """Options of a test.

    `vpp` is the number of model chunks per pipeline rank. The data parallel size is the world size
    divided by `pp`. `ddp_overrides` are further fields of DistributedDataParallelConfig by name.
    """

    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    dtype: str = "fp32"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True
    bucket_size: int | None = None
    num_layers: int = 2
    tied: bool = False
    num_experts: int | None = None
    ddp_overrides: Values = field(default_factory=dict)

    @property
    def params_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def half(self) -> Values:
        return {
            "bf16": self.dtype == "bf16",
            "fp16": self.dtype == "fp16",
            "params_dtype": self.params_dtype,
        }


def transformer_config(spec: GptSpec) -> TransformerConfig:
    """Return Megatron's configuration for `spec` on CPU, without fusions and with CPU
    initialisation.

    Interleaved stages use unbatched sends. Of two pipeline ranks each is both the previous and the
    next rank of the other, so that batched sends would be matched to the wrong receives, on NCCL
    too.
    """
    sizes = {
        "num_layers": spec.num_layers,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
    }
    attention = {
        "num_query_groups": 2,
        "kv_channels": 16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    mlp = {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
    }
    experts = {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": 48,
        "moe_token_dispatcher_type": "alltoall",
    }
    pipeline = {"overlap_p2p_comm": spec.vpp is not None, "batch_p2p_comm": spec.vpp is None}
    fusions = (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
    )
    return TransformerConfig(
        **{**sizes, **attention, **mlp, **(experts if spec.num_experts else {}), **pipeline},
        **{**spec.half, **dict.fromkeys(fusions, False)},
        normalization="RMSNorm",
        pipeline_dtype=spec.params_dtype,
        pipeline_model_parallel_size=spec.pp,
        virtual_pipeline_model_parallel_size=spec.vpp,
        expert_model_parallel_size=spec.ep,
        use_cpu_initialization=True,
    )


def start(spec: GptSpec) -> None:
    """Apply the patches, join the gloo process group and build megatron's parallel state."""
    megatron_patches.apply()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=spec.pp,
        virtual_pipeline_model_parallel_size=spec.vpp,
        expert_model_parallel_size=spec.ep,
    )
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)


def stop() -> None:
    """Undo the parallel state of `start`; keep the process group for the next `start`."""
    for group in filter(
        None, parallel_state._global_process_group_list or ()
    ):  # Megatron does not destroy them.
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def build_chunks(spec: GptSpec, config: TransformerConfig) -> list[torch.nn.Module]:
    """Build this rank's chunks, one per virtual stage, in Megatron's DDP with flat buffers."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=spec.grad_reduce_in_fp32,
        overlap_grad_reduce=spec.overlap_grad_reduce,
        overlap_param_gather=spec.overlap_param_gather,
        use_distributed_optimizer=spec.distributed_optimizer,
        bucket_size=spec.bucket_size,
        **spec.ddp_overrides,
    )
    chunks = []
    for vp_stage in range(spec.vpp) if spec.vpp else [None]:
        stage = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQ_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        inner = model if spec.dtype == "fp32" else Float16Module(config, model)
        chunks.append(
            DistributedDataParallel(config, ddp_config, inner, disable_bucketing=bool(chunks))
        )
    return chunks


@dataclass(frozen=True)
class Gpt:
    """A model with its optimizer."""

    spec: GptSpec
    config: TransformerConfig
    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer

    def train_step(self) -> float:
        """Take a step, always on the same batch; return the loss before it, the same on all
        ranks."""
        loss = self.forward_backward()
        self.optimizer.step()
        return loss

    def forward_backward(self) -> float:
        """Return the loss over the global batch; leave gradients in the buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        rows = self._rows()
        batches = [iter(rows) for _ in self.chunks]
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=_one_or_list(batches),
            model=_one_or_list(self.chunks),
            num_microbatches=len(rows),
            seq_length=SEQ_LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        losses = [output["loss"] for output in outputs]  # Empty before the last pipeline stage.
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
        return total.item()

    def _rows(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCAB_SIZE, (NUM_SEQUENCES, SEQ_LENGTH + 1), generator=generator)
        share = tokens.chunk(parallel_state.get_data_parallel_world_size())
        return list(share[parallel_state.get_data_parallel_rank()].split(1))


def forward_step(data_iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    """Megatron's forward_step_func: return per-token losses and the function that averages them."""
    rows = next(data_iterator)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    output = model(
        rows[:, :-1], torch.arange(SEQ_LENGTH)[None], mask, labels=rows[:, 1:].contiguous()
    )

    def mean_over_tokens(output: torch.Tensor) -> tuple[torch.Tensor, TensorDict]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, mean_over_tokens


def build(spec: GptSpec) -> Gpt:
    """Build model, DDP and Adam for the parallel state of `start`."""
    config = transformer_config(spec)
    chunks = build_chunks(spec, config)
    settings = OptimizerConfig(
        **spec.half,
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-2,
        clip_grad=1.0,
        initial_loss_scale=2.0**8,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_param_gather=spec.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
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
    """Call `start` and `build`, and `stop` at the end. May be used repeatedly in a process."""
    start(spec)
    try:
        gpt = build(spec)
        try:
            yield gpt
        finally:
            gpt.config.grad_scale_func = (
                None  # Breaks a reference cycle that the collector does not find.
            )
    finally:
        stop()
