"""Gemma-2 and Gemma-3 (text): Llama's blocks with norms on both sides of attention and MLP, norm weights that are added
to 1, scaled embeddings, layers that see a sliding window, and in Gemma-2 soft caps, in Gemma-3 norms on query and key.

Canonical names: `transformers` checkpoints of Gemma2ForCausalLM and Gemma3ForCausalLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid_engine.models.llama import Traits, family_table
from hybrid_engine.models.table import ModelTable, Serving
from hybrid_engine.models.variants import Extras, windows_by_type

TRAITS = Traits(
    pre_mlp_norm="pre_feedforward_layernorm", post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)


def gemma2(config: Mapping[str, Any]) -> ModelTable:
    """Every second layer, from the first on, sees a window."""
    extras = Extras(
        windows=windows_by_type(_layer_types(config, period=2), config["sliding_window"]),
        attention_softcap=config["attn_logit_softcapping"],
        logit_softcap=config["final_logit_softcapping"],
    )
    return _table(config, TRAITS, extras)


def gemma3(config: Mapping[str, Any]) -> ModelTable:
    """All but every sixth layer see a window, and have a rotary base of their own."""
    config = dict(config)
    period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    rope = config.get("rope_parameters")
    if rope is None:  # as transformers 4 wrote it
        local_base = config.get("rope_local_base_freq", 10000.0)
        config = {"rope_theta": 1e6, **config}
    else:
        local_base = (rope.get("sliding_attention") or {}).get("rope_theta", 10000.0)
        config["rope_parameters"] = {"rope_theta": 1e6, **(rope.get("full_attention") or {})}
    extras = Extras(
        windows=windows_by_type(_layer_types(config, period), config["sliding_window"]),
        window_rotary_base=local_base,
        logit_softcap=config.get("final_logit_softcapping"),
    )
    return _table(config, replace(TRAITS, qk_norm=True), extras)


def _table(config: Mapping[str, Any], traits: Traits, extras: Extras) -> ModelTable:
    attention_bias = bool(config.get("attention_bias", False))
    table = family_table(
        config,
        replace(traits, qkv_bias=attention_bias, output_bias=attention_bias),
        replace(extras, embedding_scale=math.sqrt(config["hidden_size"]), post_norms=True),
        transformer={"layernorm_zero_centered_gamma": True, "softmax_scale": config["query_pre_attn_scalar"] ** -0.5},
    )
    bidirectional = ("use_bidirectional_attention",) if config.get("use_bidirectional_attention") else ()
    serving = Serving(ends_on_every_stage=True)
    return replace(table, serving=serving, not_built=(*table.not_built, *bidirectional))


def _layer_types(config: Mapping[str, Any], period: int) -> list[str]:
    """transformers' names of the kinds of layers; the last of each `period` layers sees everything."""
    by_position = [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return config.get("layer_types") or by_position
