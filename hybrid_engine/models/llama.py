"""The Llama family: RMSNorm, rotary positions, grouped queries, gated MLP. Llama 2/3, Qwen2/2.5 and Qwen3 (dense).

Canonical names: `transformers` checkpoints of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.
Megatron names: `GPTModel` with megatron-core's local layer spec and with its Transformer Engine layer spec, where
the input norms are fused into the linear layers that follow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.models.packing import GateUp, InterleavedQKV, Replicated, Span, Split, Vocabulary
from hybrid_engine.models.table import ModelDims, ModelTable, Rule, in_layer

LAYER = "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class Traits:
    """Where the members of the family differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def llama(config: Mapping[str, Any]) -> ModelTable:
    """Llama 2 and 3."""
    attention_bias = bool(config.get("attention_bias", False))
    traits = Traits(qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=bool(config.get("mlp_bias", False)))
    return _family_table(config, traits)


def qwen2(config: Mapping[str, Any]) -> ModelTable:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    return _family_table(config, Traits(qkv_bias=True))


def qwen3(config: Mapping[str, Any]) -> ModelTable:
    """Qwen3 (dense): norms on query and key heads."""
    attention_bias = bool(config.get("attention_bias", False))
    return _family_table(config, Traits(qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True))


def dims_of(config: Mapping[str, Any]) -> ModelDims:
    """Sizes from a Hugging Face config."""
    num_heads = config["num_attention_heads"]
    return ModelDims(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _family_table(config: Mapping[str, Any], traits: Traits) -> ModelTable:
    dims = dims_of(config)
    return ModelTable(
        dims=dims,
        rules=_rules(dims),
        shapes=_shapes(dims, traits),
        transformer=_transformer(config, dims, traits),
        gpt={"position_embedding_type": "rope", "rotary_base": rotary_base(config)},
        not_built=tuple(_not_built(config, traits)),
    )


def _not_built(config: Mapping[str, Any], traits: Traits) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        yield f"rotary scaling of type {rope_type!r}"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {config['hidden_act']!r}"
    if config.get("use_sliding_window"):
        yield "use_sliding_window"
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor {config['partial_rotary_factor']}"
    if traits.output_bias != traits.mlp_bias:
        yield "biases in only one of attention and MLP, where Megatron has one switch for both"


def _rules(dims: ModelDims) -> tuple[Rule, ...]:
    """All parameters any member of the family can have."""
    embedding = "model.embed_tokens.weight"
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."

    def qkv(kind: str) -> InterleavedQKV:
        spans = (Span(f"{attention}{part}_proj.{kind}") for part in "qkv")
        return InterleavedQKV(*spans, dims.num_kv_heads, dims.num_heads // dims.num_kv_heads, dims.head_dim)

    def gate_up(kind: str) -> GateUp:
        return GateUp(Span(f"{mlp}gate_proj.{kind}"), Span(f"{mlp}up_proj.{kind}"))

    return (
        Rule(("embedding.word_embeddings.weight",), Vocabulary(embedding, dims.vocab_size)),
        Rule(
            in_layer("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            Replicated(LAYER + "input_layernorm.weight"),
        ),
        Rule(in_layer("self_attention.linear_qkv.weight"), qkv("weight")),
        Rule(in_layer("self_attention.linear_qkv.bias"), qkv("bias")),
        Rule(in_layer("self_attention.q_layernorm.weight"), Replicated(attention + "q_norm.weight")),
        Rule(in_layer("self_attention.k_layernorm.weight"), Replicated(attention + "k_norm.weight")),
        Rule(in_layer("self_attention.linear_proj.weight"), Split(attention + "o_proj.weight", dim=1)),
        Rule(in_layer("self_attention.linear_proj.bias"), Replicated(attention + "o_proj.bias")),
        Rule(
            in_layer("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            Replicated(LAYER + "post_attention_layernorm.weight"),
        ),
        Rule(in_layer("mlp.linear_fc1.weight"), gate_up("weight")),
        Rule(in_layer("mlp.linear_fc1.bias"), gate_up("bias")),
        Rule(in_layer("mlp.linear_fc2.weight"), Split(mlp + "down_proj.weight", dim=1)),
        Rule(in_layer("mlp.linear_fc2.bias"), Replicated(mlp + "down_proj.bias")),
        Rule(("decoder.final_layernorm.weight",), Replicated("model.norm.weight")),
        Rule(
            ("output_layer.weight",),
            Vocabulary(embedding if dims.tied_embeddings else "lm_head.weight", dims.vocab_size),
        ),
    )


def _shapes(dims: ModelDims, traits: Traits) -> dict[str, tuple[int, ...]]:
    """Canonical tensors in checkpoint order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (dims.vocab_size, dims.hidden_size)}
    for layer in range(dims.num_layers):
        prefix = LAYER.format(layer=layer)
        shapes.update({prefix + name: shape for name, shape in _layer_shapes(dims, traits).items()})
    shapes["model.norm.weight"] = (dims.hidden_size,)
    if not dims.tied_embeddings:
        shapes["lm_head.weight"] = (dims.vocab_size, dims.hidden_size)
    return shapes


def _layer_shapes(dims: ModelDims, traits: Traits) -> dict[str, tuple[int, ...]]:
    hidden, ffn = dims.hidden_size, dims.ffn_hidden_size
    rows = {"q": dims.num_heads * dims.head_dim, "k": dims.num_kv_heads * dims.head_dim}
    rows["v"] = rows["k"]
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for part, size in rows.items():
        shapes[f"self_attn.{part}_proj.weight"] = (size, hidden)
        if traits.qkv_bias:
            shapes[f"self_attn.{part}_proj.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if traits.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if traits.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (dims.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for part, shape in {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}.items():
        shapes[f"mlp.{part}_proj.weight"] = shape
        if traits.mlp_bias:
            shapes[f"mlp.{part}_proj.bias"] = shape[:1]
    return shapes


def rotary_base(config: Mapping[str, Any]) -> float:
    """Rotary base of a config written by transformers 4 (rope_theta) or 5 (rope_parameters)."""
    rope = config.get("rope_parameters") or {}
    return config.get("rope_theta") or rope.get("rope_theta", 10000.0)


def _transformer(config: Mapping[str, Any], dims: ModelDims, traits: Traits) -> dict[str, Any]:
    """What the architecture determines of TransformerConfig (see `ModelTable.transformer`)."""
    return {
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "ffn_hidden_size": dims.ffn_hidden_size,
        "num_attention_heads": dims.num_heads,
        "num_query_groups": dims.num_kv_heads,
        "kv_channels": dims.head_dim,
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": traits.output_bias or traits.mlp_bias,
        "add_qkv_bias": traits.qkv_bias,
        "qk_layernorm": traits.qk_norm,
    }
