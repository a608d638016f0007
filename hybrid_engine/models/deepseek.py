"""DeepSeek-V2 and V3: latent attention (MLA), shared and routed experts, multi-token prediction.

Queries are projected from the hidden state directly or through a small latent vector
(`q_lora_rank`), keys and values always through one, together with the rotary part of the key.
Megatron rotates the pairs (0, 1), (2, 3), ... of a rotary head like the checkpoint, so no rows are
permuted. Its local layer spec shards the projections to the latent vectors by rows, Transformer
Engine's replicates them.

A checkpoint numbers the multi-token prediction (MTP) layers after the decoder's and repeats
embedding and head in them. vLLM's model does not read them.

Sources: `transformers` models deepseek_v2 and deepseek_v3; Megatron-LM
`transformer/multi_latent_attention.py`, `transformer/multi_token_prediction.py`; arXiv:2405.04434
and 2412.19437.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybrid_engine.errors import Violation, Violations, shortened
from hybrid_engine.models.blocks import (
    EMBEDDING,
    HEAD,
    LAYER,
    mlp_rules,
    mlp_shapes,
    model_shapes,
    norm_rules,
    norm_shapes,
    outer_rules,
    output_rules,
)
from hybrid_engine.models.config_json import dims_of, missing
from hybrid_engine.models.llama import decoder_settings
from hybrid_engine.models.moe import Experts, expert_rules, expert_settings, expert_shapes
from hybrid_engine.models.packing import Replicated, Split
from hybrid_engine.models.table import (
    MTP_LAYER,
    Extras,
    ModelDims,
    ModelTable,
    Rule,
    Rules,
    Serving,
    in_layer,
)
from hybrid_engine.records.regions import Shape, Shapes

OTHER_KEYS = {"moe_layer_freq": 1, "num_nextn_predict_layers": 0}
"""Keys that transformers' classes ignore, with their values if a file lacks them."""


def deepseek_v2(config: Any) -> ModelTable:
    """Return the table of DeepSeek-V2 or V2-Lite.

    Scores are a softmax over all experts, and groups are ranked by their best expert.
    """
    routing = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
    method = config.topk_method
    is_known = method in ("greedy", "group_limited_greedy")
    not_built = [] if is_known else [f"topk_method {shortened(method)}"]
    num_groups = config.n_group if method == "group_limited_greedy" else 1
    return _table(config, _experts(config), routing, not_built, num_groups, 1)


def deepseek_v3(config: Any) -> ModelTable:
    """Return the table of DeepSeek-V3 or R1.

    Scores are sigmoids, a bias affects only the choice of experts, and groups are ranked by their
    top-2 experts.
    """
    routing = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    not_built = [] if config.norm_topk_prob else ["norm_topk_prob false with sigmoid scores"]
    experts = _experts(config, bias="gate.e_score_correction_bias")
    return _table(config, experts, routing, not_built, config.n_group or 1, 2)


def v2_relations(config: Any) -> Violations:
    """Yield the violations between a V2's keys for groups of experts."""
    if config.topk_method == "group_limited_greedy":
        if config.n_group is None:
            yield missing("n_group", f"is missing, which topk_method {config.topk_method!r} needs")
        yield from v3_relations(config)
    for key in ("n_group", "topk_group"):
        number = getattr(config, key) or 1
        if number > 1 and config.topk_method == "greedy":
            yield Violation(
                key,
                f"is {number} with topk_method 'greedy', for which vLLM has "
                "groups and the trainer has none",
                "Set it to 1, or topk_method to group_limited_greedy",
                code="unsupported-value",
            )


def v3_relations(config: Any) -> Violations:
    """Yield a violation if the groups of experts do not fit their numbers."""
    groups = config.n_group or 1
    if groups == 1:
        return
    chosen = config.topk_group or 0
    # DeepSeek-V3: 8 groups of 32 experts, of which a token takes 4 with 128 experts, and 8 of
    # these.
    in_group, rest = divmod(config.n_routed_experts, groups)
    used = config.num_experts_per_tok or 0
    if rest or not 1 <= chosen <= groups or used > chosen * in_group:
        yield Violation(
            "n_group",
            f"{groups} groups of {config.n_routed_experts} experts, of which topk_group {chosen} "
            f"have the num_experts_per_tok {used} of a token",
            "Use a divisor of the experts, at most as many groups for a token, and no more experts "
            "than these have",
            code="out-of-range",
        )


def _experts(config: Any, bias: str | None = None) -> Experts:
    return Experts(
        config.n_routed_experts,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
        bias=bias,
        # A checkpoint has its shared experts as one MLP: 2 of width 1,536 in DeepSeek-V2 are one of
        # 3,072.
        shared_width=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )


def _table(
    config: Any,
    experts: Experts,
    routing: Mapping[str, Any],
    not_built: list[str],
    num_groups: int,
    experts_per_group_score: int,
) -> ModelTable:
    first = config.first_k_dense_replace
    step = config.moe_layer_freq or 1
    # DeepSeek-V3: first 3 and step 1, so layers 0, 1 and 2 are dense.
    sparse = [layer >= first and layer % step == 0 for layer in range(config.num_hidden_layers)]
    with_experts = [layer for layer, has_experts in enumerate(sparse) if has_experts]
    dims = replace(
        dims_of(config, with_experts, tied_embeddings=config.tie_word_embeddings),
        num_experts=experts.num,
        num_mtp_layers=config.num_nextn_predict_layers or 0,
    )
    mtp_layers = range(dims.num_layers, dims.num_layers + dims.num_mtp_layers)
    copies: dict[str, str] = {}
    for layer in mtp_layers:
        # A checkpoint repeats the embedding and the head in an MTP layer.
        prefix = LAYER.format(layer=layer)
        copies[prefix + "embed_tokens.weight"] = EMBEDDING
        copies[prefix + "shared_head.head.weight"] = EMBEDDING if dims.tied_embeddings else HEAD
    shapes = _shapes(config, dims, experts, sparse)
    extras = Extras()
    if num_groups > 1:
        routing = {
            **routing,
            "moe_router_num_groups": num_groups,
            "moe_router_group_topk": config.topk_group,
        }
        extras = Extras(experts_per_group_score=experts_per_group_score)
    return ModelTable(
        dims=dims,
        rules=(
            *outer_rules(dims),
            *norm_rules(),
            *latent_attention_rules(),
            *mlp_rules(),
            *expert_rules(experts),
            *_mtp_rules(),
        ),
        shapes=shapes,
        transformer={
            **_transformer(config, dims),
            **expert_settings(experts, sparse),
            **routing,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        },
        gpt={"position_embedding_type": "rope"},
        extras=extras,
        copies=copies,
        unserved=tuple(LAYER.format(layer=layer) for layer in mtp_layers),
        serving=Serving(whole_shared_experts=True),
        dtypes={name: "float32" for name in shapes if experts.bias and name.endswith(experts.bias)},
        not_built=(*not_built, *_not_built(config)),
    )


def latent_attention_rules() -> Rules:
    """Return the rules of attention whose keys and values come from a latent vector."""
    attention = LAYER + "self_attn."

    def split(parameter: str, tensor: str, may_be_whole: bool = False) -> Rule:
        names = in_layer(f"self_attention.{parameter}.weight")
        return Rule(names, Split(f"{attention}{tensor}.weight", dim=0, may_be_whole=may_be_whole))

    def norm(tensor: str, *parameters: str) -> Rule:
        names = (f"self_attention.{parameter}" for parameter in parameters)
        return Rule(in_layer(*names), Replicated(f"{attention}{tensor}.weight"))

    return (
        split("linear_q_proj", "q_proj"),
        split("linear_q_down_proj", "q_a_proj", may_be_whole=True),
        norm("q_a_layernorm", "q_layernorm.weight", "linear_q_up_proj.layer_norm_weight"),
        split("linear_q_up_proj", "q_b_proj"),
        split("linear_kv_down_proj", "kv_a_proj_with_mqa", may_be_whole=True),
        norm("kv_a_layernorm", "kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"),
        split("linear_kv_up_proj", "kv_b_proj"),
        *output_rules(),
    )


def _mtp_rules() -> Rules:
    """Return the rules of a multi-token prediction layer outside of its transformer layer."""
    norms = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
    return (
        *(
            Rule((f"{MTP_LAYER}{parameter}.weight",), Replicated(f"{LAYER}{tensor}.weight"))
            for parameter, tensor in norms.items()
        ),
        Rule((MTP_LAYER + "eh_proj.weight",), Split(LAYER + "eh_proj.weight", dim=0)),
    )


def _shapes(config: Any, dims: ModelDims, experts: Experts, sparse: list[bool]) -> Shapes:
    hidden = dims.hidden_size
    common = {**_attention_shapes(config, dims), **norm_shapes(hidden)}
    dense_layer = {**common, **mlp_shapes(hidden, config.intermediate_size)}
    sparse_layer = {**common, **expert_shapes(experts, hidden)}
    layers = model_shapes(dims, lambda layer: sparse_layer if sparse[layer] else dense_layer)
    shapes = {**layers}
    mtp_layer = {
        **sparse_layer,
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        # Input: the embedding of the next token beside the hidden state, each normalized.
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }
    for layer in range(dims.num_layers, dims.num_layers + dims.num_mtp_layers):
        prefix = LAYER.format(layer=layer)
        shapes |= {prefix + name: shape for name, shape in mtp_layer.items()}
    return shapes


def _attention_shapes(config: Any, dims: ModelDims) -> Shapes:
    hidden = dims.hidden_size
    heads = dims.num_heads
    # 128 heads of 128 + 64 elements: `head_dim` includes the rotary part.
    query_rows = heads * dims.head_dim
    q_rank = config.q_lora_rank
    kv_rank = config.kv_lora_rank
    if q_rank is None:
        query: dict[str, Shape] = {"q_proj.weight": (query_rows, hidden)}
    else:
        query = {
            "q_a_proj.weight": (q_rank, hidden),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (query_rows, q_rank),
        }
    shapes = {
        **query,
        # The latent vector, and behind it the rotary part of the key, which all heads share.
        "kv_a_proj_with_mqa.weight": (kv_rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (kv_rank,),
        # Per head: keys without the rotary part, then values. The rotary part comes from kv_a_proj
        # directly, once for all heads.
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), kv_rank),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _transformer(config: Any, dims: ModelDims) -> dict[str, Any]:
    """Return the settings of MLATransformerConfig (see `ModelTable.transformer`).

    All norms use the config's epsilon, as in vLLM. In transformers, norms of latent vectors always
    use 1e-6.
    """
    return {
        **decoder_settings(config, dims),
        "multi_latent_attention": True,
        "kv_channels": config.v_head_dim,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        **_rotary(config),
        "add_bias_linear": False,
        "qk_layernorm": True,
    }


def _rotary(config: Any) -> dict[str, Any]:
    """Return the rotary settings. DeepSeek scales long contexts by YaRN (arXiv:2309.00071)."""
    rope = config.rope_parameters
    if rope["rope_type"] != "yarn":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"]}
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _not_built(config: Any) -> Iterator[str]:
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", "yarn"):
        yield f"rotary scaling of type {shortened(rope['rope_type'])}"
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        yield "YaRN with only one of mscale and mscale_all_dim"
    if rope.get("attention_factor") is not None or not rope.get("truncate", True):
        yield "YaRN with attention_factor or without truncate"
    if config.attention_bias or getattr(config, "mlp_bias", False):
        yield "biases in attention or MLP"
