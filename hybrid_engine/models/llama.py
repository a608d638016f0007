"""The Llama family: RMSNorm, rotary positions, grouped queries, gated MLP. Llama 2/3, Qwen2/2.5 and Qwen3 (dense).

Canonical names: `transformers` checkpoints of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.
Megatron names: `GPTModel` with megatron-core's local layer spec and with its Transformer Engine layer spec.

`glm.py` and `gemma.py` are the same blocks with other `Traits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.models.blocks import (
    Shapes,
    attention_rules,
    attention_shapes,
    fused_mlp_rules,
    fused_mlp_shapes,
    mlp_rules,
    mlp_shapes,
    model_shapes,
    norm_rules,
    norm_shapes,
    outer_rules,
)
from hybrid_engine.models.table import ModelDims, ModelTable
from hybrid_engine.models.variants import Extras, rope_parameters, rotary_scaling, unknown_scaling, windows_by_type

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' names -> those of `trainer/megatron/build.py`."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Where the members of the family differ.

    Attributes:
        qkv_bias, output_bias, mlp_bias: biases of query, key and value; of the attention's output; of the MLP.
        qk_norm: norms on query and key heads.
        fused_gate_up: gate and up projection are one tensor on disk, gate first.
        pre_mlp_norm: what the checkpoint calls the norm before the MLP.
        post_norms: what it calls the norms after attention and after the MLP, in families that have them.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_gate_up: bool = False
    pre_mlp_norm: str = "post_attention_layernorm"
    post_norms: tuple[str, ...] = ()


def llama(config: Mapping[str, Any]) -> ModelTable:
    """Llama 2 and 3."""
    attention_bias = bool(config.get("attention_bias", False))
    traits = Traits(qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=bool(config.get("mlp_bias", False)))
    return family_table(config, traits)


def qwen2(config: Mapping[str, Any]) -> ModelTable:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    return family_table(config, Traits(qkv_bias=True), Extras(windows=qwen_windows(config)))


def qwen3(config: Mapping[str, Any]) -> ModelTable:
    """Qwen3 (dense): norms on query and key heads."""
    attention_bias = bool(config.get("attention_bias", False))
    traits = Traits(qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True)
    return family_table(config, traits, Extras(windows=qwen_windows(config)))


def qwen_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Sliding windows, where they are switched on, are in the layers from `max_window_layers` on."""
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return ()
    first = config.get("max_window_layers")
    first = 28 if first is None else first
    kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(config["num_hidden_layers"])]
    return windows_by_type(config.get("layer_types") or kinds, config["sliding_window"])


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


def family_table(
    config: Mapping[str, Any],
    traits: Traits,
    extras: Extras | None = None,
    transformer: Mapping[str, Any] | None = None,
    gpt: Mapping[str, Any] | None = None,
) -> ModelTable:
    """A dense member of the family; families with experts start from it (`moe.with_experts`).

    `transformer` and `gpt` change or add settings; the rotary scaling comes from the config.
    """
    dims = dims_of(config)
    gpt = {"position_embedding_type": "rope", "rotary_base": rotary_base(config), **(gpt or {})}
    extras = replace(extras or Extras(), rotary_scaling=rotary_scaling(config))
    return ModelTable(
        dims=dims,
        rules=(
            *outer_rules(dims),
            *norm_rules(traits.pre_mlp_norm, traits.post_norms),
            *attention_rules(dims),
            *(fused_mlp_rules(dims) if traits.fused_gate_up else mlp_rules()),
        ),
        shapes=model_shapes(dims, lambda layer: layer_shapes(dims, traits)),
        transformer={**_transformer(config, dims, traits), **(transformer or {})},
        gpt=gpt,
        layer_spec=extras.layer_spec,
        extras=extras,
        not_built=tuple(_not_built(config, traits, gpt)),
    )


def _not_built(config: Mapping[str, Any], traits: Traits, gpt: Mapping[str, Any]) -> Iterator[str]:
    yield from unknown_scaling(config)
    yield from unknown_activation(_activation(config))
    if (factor := partial_rotary_factor(config)) not in (None, gpt.get("rotary_percent", 1.0)):
        yield f"partial_rotary_factor {factor}"
    if traits.output_bias != traits.mlp_bias:
        yield "biases in only one of attention and MLP, where Megatron has one switch for both"


def unknown_activation(name: str) -> Iterator[str]:
    """A sentence for `ModelTable.not_built` unless `ACTIVATIONS` has the activation."""
    if name not in ACTIVATIONS:
        yield f"activation {name!r}"


def _activation(config: Mapping[str, Any]) -> str:
    return config.get("hidden_activation") or config.get("hidden_act") or "silu"


def layer_shapes(dims: ModelDims, traits: Traits, experts: Shapes | None = None) -> Shapes:
    """Of one layer, without its prefix; `experts` are those in place of the MLP, where there are any."""
    separate = mlp_shapes(dims.hidden_size, dims.ffn_hidden_size, bias=traits.mlp_bias)
    return {
        **attention_shapes(dims, qkv_bias=traits.qkv_bias, output_bias=traits.output_bias, qk_norm=traits.qk_norm),
        **norm_shapes(dims.hidden_size, traits.pre_mlp_norm, traits.post_norms),
        **(experts or (fused_mlp_shapes(dims) if traits.fused_gate_up else separate)),
    }


def rotary_base(config: Mapping[str, Any]) -> float:
    """Rotary base of a config written by transformers 4 (rope_theta) or 5 (rope_parameters)."""
    return rope_parameters(config).get("rope_theta") or 10000.0


def partial_rotary_factor(config: Mapping[str, Any]) -> float | None:
    """Part of each head that is rotated, where the config says so."""
    return rope_parameters(config).get("partial_rotary_factor") or config.get("partial_rotary_factor")


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
        "activation_func": ACTIVATIONS.get(_activation(config)),
        "add_bias_linear": traits.output_bias or traits.mlp_bias,
        "add_qkv_bias": traits.qkv_bias,
        "qk_layernorm": traits.qk_norm,
    }
