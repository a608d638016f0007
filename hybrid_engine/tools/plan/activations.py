"""Estimates of the memory of computation, beside weights and state, for training and for vLLM.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198, section 4: every operator keeps its inputs for the backward pass. A layer of that
paper keeps 34 h bytes per token: 2 h of dropout masks, which no trainer here has, and 16 h elements
of 2 bytes, which are counted here with the model's own widths. Attention scores are not kept,
because fused attention recomputes them. Elements per token in one layer, with t = TP:

    part             elements                           tensors
    inputs           2 h                                inputs of both norms
    layernorm        2 h                                their outputs, inputs of projections
    attention        (2 q + 2 kv) / t                   q, k, v and attention's output
      latent (MLA)   2 (r_q + r_kv) + 2 q / t + v / t   compressed, before and after norms; q, k,
                                                        output
    mla_up_proj      kv_up / t                          output of keys' and values' up projection
    mlp              3 f / t                            gate, up and product; 2 f without gate
    moe              k (h + 3 f_e / e) e / t            the same for k experts, for tokens that are
                                                        evenly distributed
    shared_experts   3 f_s / t

With sequence parallelism `inputs` and `layernorm` are divided by t. The names are those of
`recompute_modules`. Recomputed parts exist once, for the layer in its backward pass. With
recompute_granularity full a layer keeps only its input, h, and one group of layers exists in full.

Pipeline stage i of p keeps p - i micro batches (1F1B), and with v chunks 2 (p - i - 1) + (v - 1) p
+ 1 chunks (interleaved; section 4.2.3). For the loss, a logit takes 4 bytes in addition to its own
size. Above MAX_LOGIT_NBYTES only those of a chunk exist, beside the float32 gradients of the output
layer's weight by this chunk and by all. A logit of a chunk takes ENTROPY_NBYTES more for the
entropy. These estimates were not compared with a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_engine.config import ActorConfig, GenerateConfig
from hybrid_engine.layouts.parallelism import (
    MAX_LOGIT_NBYTES,
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
)
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.layouts.stages import Chunk, chunks_of
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.layout import DTYPE_NBYTES

COMPUTE_NBYTES: Mapping[str, int] = {"amp": 2, "bf16": 2, "fp16": 2}
"""`fsdp.mixed_precision` -> bytes of an element in a layer; default: params_dtype's."""
ENTROPY_NBYTES = 16
"""Bytes of a logit of a chunk while the entropy's gradient is computed: float32 tensors of shifted
logits, their exponentials and the products of both, and one of their gradients."""
_MOE_PARTS = ("moe", "moe_act", "shared_experts")


@dataclass(frozen=True)
class Step:
    """Settings of a training step on which its activations depend.

    Attributes:
        sizes: Megatron's sizes; those of a single rank with FSDP2.
        tokens: tokens of a micro batch on one rank.
        itemsize: bytes of an element in computation.
        splits_sequence: norms are split along the sequence.
        granularity, method, num_layers, modules: the `recompute_...` keys.
        logit_nbytes: bytes of a logit during the computation of its loss.
    """

    sizes: TrainParallelism
    tokens: int
    itemsize: int
    splits_sequence: bool
    granularity: str | None
    method: str | None
    num_layers: int
    modules: tuple[str, ...]
    logit_nbytes: int

    @classmethod
    def of(cls, actor: ActorConfig, sizes: TrainParallelism | ShardedParallelism) -> Step:
        """Return the settings of a configuration."""
        tokens = actor.micro_batch_size * actor.seq_length
        itemsize = DTYPE_NBYTES[actor.params_dtype]
        if isinstance(sizes, TrainParallelism):
            return cls(
                sizes=sizes,
                # Context parallel ranks have parts of each sequence.
                tokens=-(-tokens // sizes.context),
                itemsize=itemsize,
                splits_sequence=actor.sequence_parallel,
                granularity=actor.recompute_granularity,
                method=actor.recompute_method,
                num_layers=actor.recompute_num_layers or 1,
                modules=actor.recompute_modules or (),
                logit_nbytes=itemsize + 4,
            )
        assert actor.fsdp is not None
        itemsize = COMPUTE_NBYTES.get(actor.fsdp.mixed_precision, itemsize)
        return cls(
            sizes=TrainParallelism(1),
            tokens=tokens,
            itemsize=itemsize,
            splits_sequence=False,
            granularity="full" if actor.fsdp.activation_checkpointing else None,
            method="uniform",
            num_layers=1,
            modules=(),
            # float32: logits, their log-softmax and its gradient; and the model's, if narrower
            logit_nbytes=12 + itemsize % 4,
        )


def activation_nbytes(table: ModelTable, step: Step) -> np.ndarray:
    """Return the peak bytes of activations on each rank of a stage; int array by pipeline stage."""
    sizes = step.sizes
    chunks = chunks_of(sizes, table.dims.num_layers, table.dims.num_mtp_layers)
    virtual = len(chunks) // sizes.pipeline
    nbytes = np.zeros(sizes.pipeline)
    for stage in range(sizes.pipeline):
        of_stage = [_of_chunk(table, step, chunk) for chunk in chunks if chunk.stage == stage]
        num_later = sizes.pipeline - stage - 1
        # Micro batches between their forward and backward pass; see the module's docstring.
        if sizes.pipeline == 1:
            in_flight: float = 1
        elif virtual == 1:
            in_flight = num_later + 1
        else:
            # 4 stages with 2 chunks, first stage: (2 * 3 + 1 * 4 + 1) / 2 = 5.5. Divided by the
            # chunks, since `kept` below sums those of all chunks of the stage, and each of the 11
            # is one chunk.
            in_flight = (2 * num_later + (virtual - 1) * sizes.pipeline + 1) / virtual
        kept = sum(chunk.kept for chunk in of_stage)
        # A stage computes one chunk's backward pass at a time.
        recomputed = max(chunk.recomputed for chunk in of_stage)
        logits = sum(chunk.logits for chunk in of_stage)
        nbytes[stage] = step.tokens * step.itemsize * (in_flight * kept + recomputed) + logits
    return nbytes.astype(np.int64)


@dataclass(frozen=True)
class _Kept:
    """Activations of a chunk.

    Attributes:
        kept: elements per token kept for the backward pass.
        recomputed: elements per token that exist once, for the part in its backward pass.
        logits: bytes of logits, and of what their computation in chunks needs.
    """

    kept: float
    recomputed: float
    logits: float


def _of_chunk(table: ModelTable, step: Step, chunk: Chunk) -> _Kept:
    num_experts = table.dims.num_experts
    moe_layers = table.sizes["moe_layer_freq"] if num_experts else [0] * table.dims.num_layers
    has_experts = [bool(moe_layers[layer]) for layer in chunk.mlp]
    num_heads = int(chunk.has_head)
    if chunk.has_mtp:
        has_experts += [bool(num_experts)] * table.dims.num_mtp_layers
        num_heads += table.dims.num_mtp_layers
    if table.head != "vocabulary":
        num_heads = 0
    layers = [_layer(table, step, is_moe) for is_moe in has_experts]
    whole = [sum(layer.values()) for layer in layers]
    # `inputs` has those of both norms; recomputation keeps the layer's own input only.
    inputs = [layer["inputs"] / 2 for layer in layers]  # of the first of both norms
    kept = sum(whole)
    recomputed = 0.0
    # One input for each group of `num_layers` layers; the group in its backward pass exists whole.
    if step.granularity == "full" and step.method == "uniform":
        kept = sum(inputs) / step.num_layers
        recomputed = max(whole, default=0.0) * step.num_layers
    # Megatron's method "block": the first `num_layers` layers of the chunk, each on its own.
    elif step.granularity == "full":
        recomputed = max(whole[: step.num_layers], default=0.0)
        kept = sum(inputs[: step.num_layers]) + sum(whole[step.num_layers :])
    elif step.granularity == "selective":
        names = {*step.modules, *(_MOE_PARTS if "moe" in step.modules else ())}
        dropped = [sum(layer[name] for name in layer if name in names) for layer in layers]
        kept = kept - sum(dropped)
        recomputed = max(dropped, default=0.0)
    vocabulary = step.sizes.padded_vocabulary(table.dims.vocab_size) / step.sizes.tensor
    num_logits = step.tokens * vocabulary
    logits = num_logits * step.logit_nbytes * num_heads
    if num_logits * 4 > MAX_LOGIT_NBYTES and num_heads:
        # Two float32 gradients of the output layer's weight, by this chunk of logits and by all.
        of_weight = 8 * vocabulary * table.dims.hidden_size
        # Heads compute one after another, so that the chunk of one head exists at a time.
        logits = of_weight + MAX_LOGIT_NBYTES / 4 * step.logit_nbytes
    if num_heads:
        logits += min(num_logits, MAX_LOGIT_NBYTES / 4) * ENTROPY_NBYTES
    return _Kept(kept, recomputed, logits)


def _layer(table: ModelTable, step: Step, has_experts: bool) -> dict[str, float]:
    """Return part of a layer -> elements per token; see the module's docstring."""
    settings = table.sizes
    hidden = table.dims.hidden_size
    tensor = step.sizes.tensor
    # Sequence parallelism splits what tensor parallelism would repeat on every rank.
    norms = 2 * hidden / (tensor if step.splits_sequence else 1)
    parts = {"inputs": norms, "layernorm": norms, **_attention(table, tensor)}
    num_products = 3 if settings.get("gated_linear_unit") else 2
    if not has_experts:
        return {**parts, "mlp": num_products * settings["ffn_hidden_size"] / tensor}
    width = settings["moe_ffn_hidden_size"] / step.sizes.expert_cut
    # TP 4, ETP 1 and 8 experts per token: a rank computes 1/4 of the tokens, 2 copies per token of
    # the sequence, in whole experts. With ETP 4 it has 8 copies and 1/4 of each expert's width.
    copies = step.sizes.expert_cut / tensor
    copies *= settings["moe_router_topk"]
    shared = settings.get("moe_shared_expert_intermediate_size") or 0
    return {
        **parts,
        "moe": copies * (hidden + (num_products - 1) * width),
        "moe_act": copies * width,
        "shared_experts": num_products * shared / tensor,
    }


def _attention(table: ModelTable, tensor: int) -> dict[str, float]:
    """Return the attention's parts of `_layer`, for TP size `tensor`."""
    dims = table.dims
    settings = table.sizes
    q = dims.num_heads * dims.head_dim
    if not settings.get("multi_latent_attention"):
        # With fewer key/value heads than ranks, each rank has a copy of one.
        kv = max(dims.num_kv_heads, tensor) * dims.head_dim
        return {"attention": (2 * q + 2 * kv) / tensor}
    value = dims.num_heads * settings["v_head_dim"]
    up = dims.num_heads * settings["qk_head_dim"] + value
    # Twice: before and after the norm.
    compressed = 2 * ((settings.get("q_lora_rank") or 0) + dims.latent_kv_size)
    return {"attention": compressed + (2 * q + value) / tensor, "mla_up_proj": up / tensor}


def gathered_nbytes(model: PackedModel, actor: ActorConfig) -> int:
    """Return the bytes that FSDP2 gathers on every rank in training, with unreduced gradients.

    `fully_shard` makes one group of each layer, and the root's group of all other parameters. The
    root's parameters and gradients exist throughout the backward pass. Of the layers, parameters
    exist of the current and the next, prefetched one, and gradients of one, with a float32 copy for
    the reduction. SHARD_GRAD_OP keeps the parameters of all layers.
    Source: torch 2.13, `fully_shard` and `FSDPParamGroup`.
    """
    assert actor.fsdp is not None
    itemsize = DTYPE_NBYTES[actor.params_dtype]
    itemsize = COMPUTE_NBYTES.get(actor.fsdp.mixed_precision, itemsize)
    layers = model.numel_by_layer()
    root = layers.pop("", 0)
    layer = max(layers.values(), default=0)
    keeps_all = actor.fsdp.sharding_strategy == "SHARD_GRAD_OP"
    gathered = sum(layers.values()) if keeps_all else 2 * layer
    # Parameters of the root and of two layers, gradients of the root and of one, and that one's
    # float32 copy.
    return itemsize * (root + gathered) + itemsize * (root + layer) + 4 * layer


def step_tokens(generate: GenerateConfig, device_nbytes: float) -> int:
    """Return `max_num_batched_tokens`, the tokens of vLLM's largest step."""
    default = 16_384 if device_nbytes >= 70 * 2**30 else 8_192
    configured: Any = generate.vllm.get("max_num_batched_tokens", default)
    return configured if isinstance(configured, int) else default


def vllm_step_nbytes(
    table: ModelTable,
    infer: InferenceParallelism,
    generate: GenerateConfig,
    itemsize: int,
    device_nbytes: float,
) -> int:
    """Return the bytes of vLLM's largest step, which vLLM measures and subtracts from its share.

    A step of `max_num_batched_tokens` (default: 16,384 on devices of 70 GiB and more, else 8,192)
    keeps three hidden states per token and the tensors of one layer: q, k, v and attention's
    output, or the products of the MLP or the experts. The logits of `max_num_seqs` sequences exist
    in their dtype and twice in float32. Source: vLLM 0.32.0, `EngineArgs.get_batch_defaults`,
    `fused_moe`, `LogitsProcessor`.
    """
    dims = table.dims
    settings = table.sizes
    tokens = step_tokens(generate, device_nbytes)
    widths = [sum(_attention(table, infer.tensor).values())]
    if dims.ffn_hidden_size:
        widths.append(3 * settings["ffn_hidden_size"] / infer.tensor)
    if dims.num_experts:
        # Without EP, vLLM splits every expert over the tensor parallel ranks.
        width = settings["moe_ffn_hidden_size"] / (infer.tensor if infer.expert == 1 else 1)
        widths.append(settings["moe_router_topk"] * (dims.hidden_size + 3 * width))
    vocabulary = infer.padded_vocabulary(dims.vocab_size)
    # One token per sequence is sampled: its logits in the model's dtype and twice in float32.
    logits = min(generate.max_num_seqs, tokens) * vocabulary * (itemsize + 8)
    return int(tokens * itemsize * (3 * dims.hidden_size + max(widths)) + logits)
