"""Estimates what computing takes on a device beside weights and state: in a training step, and in a step of vLLM.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section
4: every operator keeps its inputs for the backward pass. That paper's layer keeps 34 h bytes a token: 2 h of dropout
masks, which no trainer here has, and 16 h elements of 2 bytes, which are counted here by the model's own widths.
Attention scores are not kept: fused attention computes them again. Elements of a token in one layer, t being TP:

    part             elements                                    what it is
    inputs           2 h                                         inputs of both norms
    layernorm        2 h                                         their outputs, which projections take
    attention        (2 q + 2 kv) / t                            q, k, v and attention's output
      latent (MLA)   2 (r_q + r_kv) + 2 q / t + v / t            compressed, before and after norms; q, k, output
    mla_up_proj      kv_up / t                                   what the up projection of keys and values gives
    mlp              3 f / t                                     gate, up and their product; 2 f without a gate
    moe              k (h + 3 f_e / e) e / t                     the same of k experts, for tokens sent to them evenly
    shared_experts   3 f_s / t

`inputs` and `layernorm` are a t-th with sequence parallelism. The names are those of `recompute_modules`; what is
recomputed is there once, for the layer whose backward pass runs. With recompute_granularity full a layer keeps its
input alone, h, and one group of layers is there whole.

A pipeline stage i of p keeps p - i micro batches (1F1B), and with v chunks 2 (p - i - 1) + (v - 1) p + 1 chunks
(interleaved; section 4.2.3). Logits take 4 bytes for the loss beside their own. Nothing of this was compared
with a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_engine.config import ActorConfig, GenerateConfig
from hybrid_engine.layouts.parallelism import VOCAB_MULTIPLE, InferenceParallelism, ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.layouts.stages import Chunk, chunks_of
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.layout import DTYPE_NBYTES

COMPUTE_NBYTES: Mapping[str, int] = {"amp": 2, "bf16": 2, "fp16": 2}
"""`actor_config.fsdp.mixed_precision` -> bytes of an element in a layer; `no`: those of params_dtype."""
_OF_MOE = ("moe", "moe_act", "shared_experts")


@dataclass(frozen=True)
class Step:
    """The settings of a training step that decide what it keeps.

    Attributes:
        sizes: Megatron's; one rank's where FSDP2 trains.
        tokens: of a micro batch on one rank. itemsize: bytes of an element while computing.
        splits_sequence: norms have a part of the sequence.
        granularity, method, num_layers, modules: `recompute_...`.
        logit_nbytes: of a logit while its loss is computed.
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
        """Take them from a configuration."""
        tokens, itemsize = actor.micro_batch_size * actor.seq_length, DTYPE_NBYTES[actor.params_dtype]
        if actor.fsdp is None or isinstance(sizes, TrainParallelism):
            assert isinstance(sizes, TrainParallelism)
            recompute = actor.recompute_granularity, actor.recompute_method, actor.recompute_num_layers or 1
            modules = actor.recompute_modules or ()
            tokens = -(-tokens // sizes.context)
            return cls(sizes, tokens, itemsize, actor.sequence_parallel, *recompute, modules, itemsize + 4)
        itemsize = COMPUTE_NBYTES.get(actor.fsdp.mixed_precision, itemsize)
        full = "full" if actor.fsdp.activation_checkpointing else None
        logits = 12 + itemsize % 4  # float32: logits, their log-softmax and its gradient; and the model's own
        return cls(TrainParallelism(1), tokens, itemsize, False, full, "uniform", 1, (), logits)


def activation_nbytes(table: ModelTable, step: Step) -> np.ndarray:
    """Bytes on each rank of a pipeline stage, where most of a training step is kept; int array by stage."""
    sizes, dims = step.sizes, table.dims
    chunks = chunks_of(sizes, dims.num_layers, dims.num_mtp_layers)
    virtual = len(chunks) // sizes.pipeline
    found = np.zeros(sizes.pipeline)
    for stage in range(sizes.pipeline):
        own = [_of_chunk(table, step, chunk) for chunk in chunks if chunk.stage == stage]
        waiting = sizes.pipeline - stage - 1
        in_flight = waiting + 1 if virtual == 1 else (2 * waiting + (virtual - 1) * sizes.pipeline + 1) / virtual
        if sizes.pipeline == 1:
            in_flight = 1
        kept, again = sum(one.kept for one in own), max(one.again for one in own)
        found[stage] = step.tokens * (step.itemsize * (in_flight * kept + again) + sum(one.logits for one in own))
    return found.astype(np.int64)


@dataclass(frozen=True)
class _Kept:
    """What a chunk keeps of a token: elements, elements that are there once, and bytes of logits."""

    kept: float
    again: float
    logits: float


def _of_chunk(table: ModelTable, step: Step, chunk: Chunk) -> _Kept:
    by_layer = table.transformer["moe_layer_freq"] if table.dims.num_experts else [0] * table.dims.num_layers
    has_experts = [bool(by_layer[layer]) for layer in chunk.mlp]
    num_heads = int(chunk.has_head)
    if chunk.has_mtp:
        has_experts += [bool(table.dims.num_experts)] * table.dims.num_mtp_layers
        num_heads += table.dims.num_mtp_layers
    layers = [_layer(table, step, has) for has in has_experts]
    whole, inputs = [sum(layer.values()) for layer in layers], [layer["inputs"] / 2 for layer in layers]
    kept, again = sum(whole), 0.0
    if step.granularity == "full" and step.method == "uniform":
        kept, again = sum(inputs) / step.num_layers, max(whole, default=0.0) * step.num_layers
    elif step.granularity == "full":
        again = max(whole[: step.num_layers], default=0.0)
        kept = sum(inputs[: step.num_layers]) + sum(whole[step.num_layers :])
    elif step.granularity == "selective":
        names = {*step.modules, *(_OF_MOE if "moe" in step.modules else ())}
        dropped = [sum(size for name, size in layer.items() if name in names) for layer in layers]
        kept, again = kept - sum(dropped), max(dropped, default=0.0)
    if table.head != "vocabulary":
        num_heads = 0
    logits = step.sizes.padded_vocabulary(table.dims.vocab_size) / step.sizes.tensor * step.logit_nbytes * num_heads
    return _Kept(kept, again, logits)


def _layer(table: ModelTable, step: Step, has_experts: bool) -> dict[str, float]:
    """Elements of a token by part of a layer, as in the module's text."""
    h, settings, tensor = table.dims.hidden_size, table.transformer, step.sizes.tensor
    outer = 2 * h / (tensor if step.splits_sequence else 1)
    found = {"inputs": outer, "layernorm": outer, **_attention(table, tensor)}
    gated = 3 if settings.get("gated_linear_unit") else 2
    if not has_experts:
        return {**found, "mlp": gated * settings["ffn_hidden_size"] / tensor}
    width, copies = settings["moe_ffn_hidden_size"] / step.sizes.expert_cut, step.sizes.expert_cut / tensor
    copies *= settings["moe_router_topk"]
    shared = settings.get("moe_shared_expert_intermediate_size") or 0
    return {
        **found,
        "moe": copies * (h + (gated - 1) * width),
        "moe_act": copies * width,
        "shared_experts": gated * shared / tensor,
    }


def _attention(table: ModelTable, tensor: int) -> dict[str, float]:
    dims, settings = table.dims, table.transformer
    q = dims.num_heads * dims.head_dim
    if not settings.get("multi_latent_attention"):
        return {"attention": (2 * q + 2 * max(dims.num_kv_heads, tensor) * dims.head_dim) / tensor}
    value = dims.num_heads * settings["v_head_dim"]
    up = dims.num_heads * settings["qk_head_dim"] + value
    compressed = 2 * ((settings.get("q_lora_rank") or 0) + dims.latent_kv_size)
    return {"attention": compressed + (2 * q + value) / tensor, "mla_up_proj": up / tensor}


def gathered_nbytes(model: PackedModel, actor: ActorConfig) -> int:
    """Bytes of what FSDP2 gathers on every rank while it trains, with gradients before they are reduced.

    `fully_shard` makes a group of each layer and one, the root's, of all else. The root's parameters and gradients are
    there through the backward pass; of the layers one that computes and the next, which is on its way, and gradients of
    one, with the float32 copy that is reduced. SHARD_GRAD_OP keeps all layers. Source: torch 2.13, `fully_shard` and
    `FSDPParamGroup`.
    """
    assert actor.fsdp is not None
    itemsize = COMPUTE_NBYTES.get(actor.fsdp.mixed_precision, DTYPE_NBYTES[actor.params_dtype])
    layers = model.numel_by_layer(1)
    root = layers.pop("", 0)
    layer = max(layers.values(), default=0)
    there = sum(layers.values()) if actor.fsdp.sharding_strategy == "SHARD_GRAD_OP" else 2 * layer
    return itemsize * (root + there) + itemsize * (root + layer) + 4 * layer


def vllm_step_nbytes(
    table: ModelTable, infer: InferenceParallelism, generate: GenerateConfig, itemsize: int, device_nbytes: float
) -> int:
    """Bytes that vLLM's largest step takes, which its start-up measures and takes off its share of the device.

    A step of `max_num_batched_tokens` (default: 16,384 on devices of 70 GiB and more, else 8,192) keeps three hidden
    states a token, and what one layer computes: q, k, v and attention's output, or the MLP's or experts' products. The
    logits of `max_num_seqs` sequences are there whole, in their dtype and twice in float32.
    Source: vLLM 0.32.0, `EngineArgs.get_batch_defaults`, `fused_moe`, `LogitsProcessor`.
    """
    dims, settings = table.dims, table.transformer
    default = 16_384 if device_nbytes >= 70 * 2**30 else 8_192
    given: Any = generate.vllm.get("max_num_batched_tokens", default)
    tokens = given if isinstance(given, int) else default
    widths = [sum(_attention(table, infer.tensor).values())]
    if dims.ffn_hidden_size:
        widths.append(3 * settings["ffn_hidden_size"] / infer.tensor)
    if dims.num_experts:
        width = settings["moe_ffn_hidden_size"] / (infer.tensor if infer.expert == 1 else 1)
        widths.append(settings["moe_router_topk"] * (dims.hidden_size + 3 * width))
    vocabulary = -(-dims.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    logits = min(generate.max_num_seqs, tokens) * vocabulary * (itemsize + 8)
    return int(tokens * itemsize * (3 * dims.hidden_size + max(widths)) + logits)
