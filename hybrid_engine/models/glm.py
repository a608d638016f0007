"""GLM-4: Llama's blocks, with half of each head rotated in pairs of neighbours, and gate and up projection in one.

Canonical names: `transformers` checkpoints of GlmForCausalLM (glm-4-9b-hf) and of Glm4ForCausalLM (GLM-4-0414), which
has norms after attention and MLP too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid_engine.models.llama import Traits, family_table, partial_rotary_factor
from hybrid_engine.models.table import ModelTable, Serving
from hybrid_engine.models.variants import Extras


def glm(config: Mapping[str, Any]) -> ModelTable:
    """GLM-4 of 2024. vLLM serves it through transformers' model, which gathers what the fused projection gives."""
    table = _table(config, Traits(qkv_bias=bool(config.get("attention_bias", True)), fused_gate_up=True))
    return replace(table, serving=Serving(cuts_fused_as_one=True))


def glm4(config: Mapping[str, Any]) -> ModelTable:
    """GLM-4-0414."""
    traits = Traits(
        qkv_bias=bool(config.get("attention_bias", True)),
        fused_gate_up=True,
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    )
    return _table(config, traits)


def _table(config: Mapping[str, Any], traits: Traits) -> ModelTable:
    return family_table(
        config,
        traits,
        Extras(post_norms=bool(traits.post_norms)),
        transformer={"rotary_interleaved": True},
        gpt={"rotary_percent": partial_rotary_factor(config) or 0.5},
    )
