"""Dense decoders of Llama's blocks: RMSNorm, rotary positions, grouped queries, gated MLP.

Llama 2 and 3, Qwen2, Qwen2.5 and Qwen3; GLM-4 of 2024 and GLM-4-0414; Gemma-2 and Gemma-3 (text).
`Traits` describes their differences. A config is an object of transformers' class
(`config_json.read_config`). Canonical names come from `transformers` checkpoints, Megatron
names from `GPTModel` with megatron-core's local layer spec and its Transformer Engine layer spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.errors import shortened
from hybrid_engine.models.blocks import (
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
from hybrid_engine.models.config_json import dims_of
from hybrid_engine.models.table import Extras, ModelDims, ModelTable, RotaryScaling, Serving
from hybrid_engine.records.regions import Shapes

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names in transformers -> names in `trainer/megatron/build.py`."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Differences between the members of the family.

    Attributes:
        qkv_bias: True if query, key and value have biases.
        output_bias: True if the output projection of attention has a bias.
        mlp_bias: True if the MLP has biases.
        qk_norm: True if there are norms on query and key heads.
        fused_gate_up: True if gate and up projection are one tensor on disk, gate first.
        pre_mlp_norm: checkpoint's name of the norm before the MLP.
        post_norms: checkpoint's names of the norms after attention and after the MLP, if there are
            any.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_gate_up: bool = False
    pre_mlp_norm: str = "post_attention_layernorm"
    post_norms: tuple[str, ...] = ()


def llama(config: Any) -> ModelTable:
    """Return the table of Llama 2 or 3."""
    bias = config.attention_bias
    traits = Traits(qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
    return family_table(config, traits)


def qwen2(config: Any) -> ModelTable:
    """Return the table of Qwen2 or Qwen2.5, with biases on query, key and value."""
    return family_table(config, Traits(qkv_bias=True), Extras(windows=windows_by_kind(config)))


def qwen3(config: Any) -> ModelTable:
    """Return the table of dense Qwen3, with norms on query and key heads."""
    return family_table(config, qwen3_traits(config), Extras(windows=windows_by_kind(config)))


def qwen3_traits(config: Any) -> Traits:
    """Return the traits of Qwen3's attention, which models with experts share."""
    bias = config.attention_bias
    return Traits(qkv_bias=bias, output_bias=bias, qk_norm=True)


def windows_by_kind(config: Any) -> tuple[int | None, ...]:
    """Return `Extras.windows` of a config with `layer_types`."""
    windows = tuple(
        config.sliding_window if kind == "sliding_attention" else None
        for kind in config.layer_types
    )
    return windows if any(windows) else ()


def rope_of(config: Any) -> Mapping[str, Any]:
    """Return the rotary settings of a config; Gemma-3's are those of layers without a window."""
    rope: Mapping[str, Any] = config.rope_parameters
    # Other families have one set of settings, without kinds of layers.
    return rope.get("full_attention", rope)


def glm(config: Any) -> ModelTable:
    """Return the table of GLM-4 of 2024.

    Adjacent elements are rotated in pairs, in a part of each head, and gate and up projection are
    one tensor. vLLM serves it with transformers' model, which gathers the output of the fused
    projection.
    """
    table = _glm_table(config, Traits(qkv_bias=config.attention_bias, fused_gate_up=True))
    return replace(table, serving=Serving(cuts_fused_as_one=True))


def glm4(config: Any) -> ModelTable:
    """Return the table of GLM-4-0414, which also has norms after attention and MLP."""
    traits = Traits(
        qkv_bias=config.attention_bias,
        fused_gate_up=True,
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    )
    return _glm_table(config, traits)


def _glm_table(config: Any, traits: Traits) -> ModelTable:
    return family_table(
        config,
        traits,
        transformer={"rotary_interleaved": True},
        # GLM-4 rotates half of each head.
        gpt={"rotary_percent": config.rope_parameters["partial_rotary_factor"]},
    )


def gemma2(config: Any) -> ModelTable:
    """Return the table of Gemma-2.

    Every second layer, starting with the first, has a window. Attention scores and logits have soft
    caps.
    """
    extras = Extras(
        windows=windows_by_kind(config),
        attention_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
    )
    return _gemma_table(config, extras, qk_norm=False)


def gemma3(config: Any) -> ModelTable:
    """Return the table of Gemma-3.

    All layers except every sixth have a window and a separate rotary base. Query and key heads have
    norms.
    """
    extras = Extras(
        windows=windows_by_kind(config),
        window_rotary_base=config.rope_parameters["sliding_attention"]["rope_theta"],
        logit_softcap=config.final_logit_softcapping,
    )
    return _gemma_table(config, extras, qk_norm=True)


def _gemma_table(config: Any, extras: Extras, *, qk_norm: bool) -> ModelTable:
    """Return the table of a Gemma.

    It has norms before and after attention and MLP, norm weights as offsets from 1, and scaled
    embeddings.
    """
    traits = Traits(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=qk_norm,
        pre_mlp_norm="pre_feedforward_layernorm",
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    table = family_table(
        config,
        traits,
        replace(extras, embedding_scale=math.sqrt(config.hidden_size)),
        transformer={
            "layernorm_zero_centered_gamma": True,
            # Not from the head's size: Gemma-2 27B has heads of 128 elements and scales by
            # 144**-0.5.
            "softmax_scale": config.query_pre_attn_scalar**-0.5,
        },
    )
    return replace(table, serving=Serving(ends_on_every_stage=True))


def family_table(
    config: Any,
    traits: Traits,
    extras: Extras | None = None,
    transformer: Mapping[str, Any] | None = None,
    gpt: Mapping[str, Any] | None = None,
) -> ModelTable:
    """Return the table of a dense member of the family.

    Families with experts start from it (`moe.with_experts`).

    Args:
        config: object of transformers' class.
        traits: differences from Llama.
        extras: features without a setting in Megatron. Rotary scaling and post norms are overridden
            by the config and the traits.
        transformer: additional or changed settings of TransformerConfig.
        gpt: additional or changed settings of GPTModel.
    """
    dims = dims_of(config, tied_embeddings=config.tie_word_embeddings)
    gpt_settings = {
        "position_embedding_type": "rope",
        "rotary_base": rope_of(config)["rope_theta"],
        **(gpt or {}),
    }
    extras = replace(
        extras or Extras(),
        rotary_scaling=_rotary_scaling(config),
        post_norms=bool(traits.post_norms),
    )
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
        gpt=gpt_settings,
        extras=extras,
        not_built=tuple(_not_built(config, traits)),
    )


def _rotary_scaling(config: Any) -> RotaryScaling | None:
    """Return the configured scaling; None if there is none, or its type is not built."""
    # transformers' class has checked that the keys of each type are present.
    rope = rope_of(config)
    match rope["rope_type"]:
        case "linear":
            return RotaryScaling("linear", rope["factor"])
        case "llama3":
            return RotaryScaling(
                "llama3",
                rope["factor"],
                rope["low_freq_factor"],
                rope["high_freq_factor"],
                rope["original_max_position_embeddings"],
            )
    return None


def _not_built(config: Any, traits: Traits) -> Iterator[str]:
    kind = rope_of(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        yield f"rotary scaling of type {shortened(kind)} (supported: linear, llama3)"
    yield from unknown_activation(_activation(config))
    if traits.output_bias != traits.mlp_bias:
        yield "biases in only one of attention and MLP, where Megatron has one switch for both"


def _activation(config: Any) -> str:
    name: str = getattr(config, "hidden_activation", None) or config.hidden_act
    return name


def unknown_activation(name: str) -> Iterator[str]:
    """Yield a sentence for `ModelTable.not_built` if `ACTIVATIONS` lacks the activation."""
    if name not in ACTIVATIONS:
        yield f"activation {shortened(name)}"


def layer_shapes(dims: ModelDims, traits: Traits, experts: Shapes | None = None) -> Shapes:
    """Return the shapes of a layer, by name without its prefix.

    Shapes of `experts` replace the MLP.
    """
    if experts:
        mlp = experts
    elif traits.fused_gate_up:
        mlp = fused_mlp_shapes(dims)
    else:
        mlp = mlp_shapes(dims.hidden_size, dims.ffn_hidden_size, bias=traits.mlp_bias)
    attention = attention_shapes(
        dims,
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        qk_norm=traits.qk_norm,
    )
    norms = norm_shapes(dims.hidden_size, traits.pre_mlp_norm, traits.post_norms)
    return {**attention, **norms, **mlp}


def decoder_settings(config: Any, dims: ModelDims) -> dict[str, Any]:
    """Return the settings of TransformerConfig that any decoder with RMSNorm and gates has."""
    return {
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": dims.num_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        # None for an activation that `_not_built` reports.
        "activation_func": ACTIVATIONS.get(_activation(config)),
    }


def _transformer(config: Any, dims: ModelDims, traits: Traits) -> dict[str, Any]:
    """Return the settings of TransformerConfig (see `ModelTable.transformer`)."""
    return {
        **decoder_settings(config, dims),
        "num_query_groups": dims.num_kv_heads,
        "kv_channels": dims.head_dim,
        # One switch for the biases of output projection and MLP.
        "add_bias_linear": traits.output_bias or traits.mlp_bias,
        "add_qkv_bias": traits.qkv_bias,
        "qk_layernorm": traits.qk_norm,
    }
