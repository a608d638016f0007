"""Rules of Megatron's parameters by the usual names of a decoder's tensors, for a derived table.

Most decoders name their tensors alike: `model.layers.N.self_attn.q_proj`, `mlp.gate_proj`,
`mlp.experts.E.down_proj`. The rules of blocks.py and moe.py pack them as Megatron's GPT model does.
They are used only if they cover every tensor of a checkpoint.

Names do not show what is computed with the tensors. So a job with such rules needs the comparison
of log-probabilities in its first switch (`generate_config.check_compute`): it fails if a tensor has
another meaning than its name suggests.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hybrid_engine.models.blocks import (
    LAYER,
    attention_rules,
    fused_attention_rules,
    fused_mlp_rules,
    mlp_rules,
    norm_rules,
    outer_rules,
)
from hybrid_engine.models.deepseek import latent_attention_rules
from hybrid_engine.models.moe import MIXTRAL, Experts, expert_rules, packed_expert_rules
from hybrid_engine.models.recurrent import BACKBONE_LAYER, backbone_rules, delta_net_rules
from hybrid_engine.models.table import ModelDims, Rules
from hybrid_engine.records.regions import Shapes

_POST_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")
"""Names of the norms after attention and after the MLP that cannot be taken for others."""
_LATENT = LAYER + "self_attn.kv_a_proj_with_mqa.weight"
_BIASES = ("gate.e_score_correction_bias", "e_score_correction_bias")
_QUERIES = LAYER + "self_attn.q_proj.weight"
_QUERY_NORM = LAYER + "self_attn.q_norm.weight"
_SHARED = ("shared_experts.", "shared_expert.")
_PACKED_EXPERTS = LAYER + "mlp.experts.gate_up_proj_bias"
"""Tensor of all experts of a layer in gpt-oss's order, which no other family's experts have."""
_SHARED_GATE = "shared_expert_gate.weight"


def conventional_rules(shapes: Shapes, dims: ModelDims) -> Rules:
    """Return the rules of all tensors of a checkpoint; none if any of them has another name.

    Args:
        shapes: canonical name -> shape.
        dims: sizes of the model.
    """
    patterns = {_pattern_of(name): shape for name, shape in shapes.items()}
    query_rows = dims.num_heads * dims.head_dim
    attention = (
        *attention_rules(
            dims,
            # Twice as many query rows as heads need: a gate for each query (Qwen3-Next).
            gated=patterns.get(_QUERIES, (0,))[0] == 2 * query_rows,
            # A norm of a single head has head_dim elements. With one head both lengths are equal
            # and mean the same.
            whole_norms=patterns.get(_QUERY_NORM) == (query_rows,) != (dims.head_dim,),
        ),
        *fused_attention_rules(dims),
        *delta_net_rules(patterns, dims.num_linear_key_heads),
    )
    if _LATENT in patterns:
        attention = latent_attention_rules()
    rules = [
        *outer_rules(dims),
        *norm_rules(post=_POST_NORMS),
        *attention,
        *mlp_rules(),
        *fused_mlp_rules(dims),
        *backbone_rules(patterns, dims),
    ]
    if _PACKED_EXPERTS in patterns:
        rules += packed_expert_rules()
    elif dims.num_experts:
        rules += expert_rules(_experts(patterns, dims))
    # Alternatives have the same parameters and other tensors, so one of them is left.
    used = [rule for rule in rules if patterns.keys() >= set(rule.packing.tensors())]
    covered = {tensor for rule in used for tensor in rule.packing.tensors()}
    return tuple(used) if covered == patterns.keys() else ()


def _pattern_of(name: str) -> str:
    """Return a canonical name with `{layer}` and `{expert}` in place of its numbers."""
    name = re.sub(r"^model\.layers\.\d+\.", LAYER, name)
    name = re.sub(r"^backbone\.layers\.\d+\.", BACKBONE_LAYER, name)
    return re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", name)


def _experts(patterns: Shapes, dims: ModelDims) -> Experts:
    """Return the experts of a layer as the names of its tensors describe them."""
    usual = Experts(dims.num_experts, width=0, top_k=1)  # top_k is in no rule
    # Mixtral's names, also of MiniMax-M2, or the usual ones.
    is_mixtral = any(name.startswith(LAYER + MIXTRAL["block"]) for name in patterns)
    experts = replace(usual, **MIXTRAL) if is_mixtral else usual
    block = LAYER + experts.block
    rows = {name: patterns.get(f"{block}{name}gate_proj.weight", (0,))[0] for name in _SHARED}
    # The name that the checkpoint has; the other has no rows. Without either, the width is 0.
    shared = max(_SHARED, key=rows.__getitem__)
    return replace(
        experts,
        bias=next((name for name in _BIASES if block + name in patterns), None),
        shared=shared,
        shared_width=rows[shared],
        shared_gate=_SHARED_GATE if block + _SHARED_GATE in patterns else None,
    )
