"""Models with experts: Qwen2-MoE, Qwen3-MoE, Mixtral, and what the tables of other families with experts use.

A checkpoint has one tensor per expert (transformers 5 joins them in memory only). Megatron numbers the experts of a
rank from 0 where each is an MLP of its own (SequentialMLP) and where Transformer Engine groups them (TEGroupedMLP:
one parameter per expert, the number at the end); the adaptor gives global numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.models.blocks import (
    LAYER,
    PROJECTIONS,
    Shapes,
    mlp_rules,
    mlp_shapes,
    model_shapes,
)
from hybrid_engine.models.config_json import Mixtral, Qwen2Moe, Qwen3Moe
from hybrid_engine.models.llama import Traits, family_table, layer_shapes, qwen3_traits, windows_by_kind
from hybrid_engine.models.packing import GateUp, Over, Replicated
from hybrid_engine.models.table import Extras, ModelTable, Rule, Serving, in_layer


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer and what they are called.

    Attributes:
        num, width: routed experts, and the intermediate size of one.
        top_k: experts per token.
        block: prefix in a layer of the checkpoint; `projections`: gate, up and down of an expert.
        bias: name below `block` of the bias that is added to the scores only to choose experts, if there is one.
        shared, shared_width: name below `block` and intermediate size of the expert that every token goes through;
            0 without one.
        shared_gate: name below `block` of the shared expert's gate, if it has one.
    """

    num: int
    width: int
    top_k: int
    block: str = "mlp."
    projections: tuple[str, str, str] = PROJECTIONS
    bias: str | None = None
    shared: str = "shared_experts."
    shared_width: int = 0
    shared_gate: str | None = None


def qwen3_moe(config: Qwen3Moe) -> ModelTable:
    """Qwen3 with experts: attention as in the dense model."""
    experts = Experts(config.expert_count, config.moe_intermediate_size, config.num_experts_per_tok)
    # transformers masks every layer alike, whatever layer_types and max_window_layers say
    windows = (config.sliding_window,) * config.num_hidden_layers
    return _qwen_table(config, qwen3_traits(config), experts, windows)


def qwen2_moe(config: Qwen2Moe) -> ModelTable:
    """Qwen1.5 and Qwen2 with experts, one of them shared and gated."""
    experts = Experts(
        config.expert_count,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
        shared="shared_expert.",
        shared_width=config.shared_expert_intermediate_size,
        shared_gate="shared_expert_gate.weight",
    )
    first_without = 28 if config.max_window_layers is None else config.max_window_layers
    # transformers: every second layer, below max_window_layers, where those of the dense Qwen2 begin
    kinds = [
        "full_attention" if layer % 2 or layer >= first_without else "sliding_attention"
        for layer in range(config.num_hidden_layers)
    ]
    return _qwen_table(config, Traits(qkv_bias=bool(config.qkv_bias)), experts, windows_by_kind(config, kinds))


def mixtral(config: Mixtral) -> ModelTable:
    """Mixtral: experts in every layer, each as wide as the model's MLP would be."""
    experts = Experts(
        config.num_local_experts,
        config.intermediate_size,
        config.num_experts_per_tok,
        block="block_sparse_moe.",
        projections=("w1", "w3", "w2"),
    )
    num_layers, window = config.num_hidden_layers, config.sliding_window
    extras = Extras(windows=(window,) * num_layers) if window else Extras()
    return with_experts(family_table(config, Traits(), extras), Traits(), experts, [True] * num_layers, normalized=True)


def _qwen_table(config: Qwen3Moe, traits: Traits, experts: Experts, windows: tuple[int | None, ...]) -> ModelTable:
    """`windows` are those of all layers where `use_sliding_window` switches them on."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    sparse = [(layer + 1) % step == 0 and layer not in dense for layer in range(config.num_hidden_layers)]
    extras = Extras(windows=windows) if config.use_sliding_window and any(windows) else Extras()
    table = family_table(config, traits, extras)
    return with_experts(table, traits, experts, sparse, normalized=bool(config.norm_topk_prob))


def with_experts(
    dense: ModelTable, traits: Traits, experts: Experts, sparse: Sequence[bool], *, normalized: bool
) -> ModelTable:
    """The table of a Llama-like model in which the layers marked in `sparse` have experts instead of the MLP.

    Args:
        dense: the model with an MLP in every layer; `traits`: what it was made with.
        normalized: the probabilities of a token's experts sum to 1; else they are what the softmax over all gave.
    """
    dims = replace(
        dense.dims,
        ffn_hidden_size=0 if all(sparse) else dense.dims.ffn_hidden_size,
        num_experts=experts.num,
    )

    sparse_mlp = expert_shapes(experts, dims.hidden_size)
    return replace(
        dense,
        dims=dims,
        rules=(*dense.rules, *expert_rules(experts)),
        shapes=model_shapes(dims, lambda layer: layer_shapes(dims, traits, sparse_mlp if sparse[layer] else None)),
        transformer={
            **dense.transformer,
            **expert_settings(experts, sparse),
            "moe_router_pre_softmax": not normalized,
        },
        serving=Serving(ends_on_every_stage=True),
        not_built=(*dense.not_built, *_not_built(experts, normalized)),
    )


def _not_built(experts: Experts, normalized: bool) -> Iterator[str]:
    if experts.top_k == 1 and normalized:
        yield "one expert per token with probability 1, which trains no router"


def expert_rules(experts: Experts) -> tuple[Rule, ...]:
    """Router, routed experts, shared expert."""
    block = LAYER + experts.block
    local = "mlp.experts.local_experts.{expert}."
    rules = [
        Rule(in_layer("mlp.router.weight"), Replicated(block + "gate.weight")),
        *mlp_rules(
            (local + "linear_fc1.{kind}", "mlp.experts.linear_fc1.{kind}{expert}"),
            (local + "linear_fc2.{kind}", "mlp.experts.linear_fc2.{kind}{expert}"),
            block + "experts.{expert}.",
            experts.projections,
            Over.EXPERT_TENSOR,
        ),
    ]
    if experts.bias:
        rules.append(Rule(in_layer("mlp.router.expert_bias"), Replicated(block + experts.bias)))
    if experts.shared_width:
        fc1, fc2 = ((f"mlp.shared_experts.linear_fc{number}.{{kind}}",) for number in (1, 2))
        rules.extend(mlp_rules(fc1, fc2, block + experts.shared))
    if experts.shared_gate:
        rules.append(Rule(in_layer("mlp.shared_experts.gate_weight"), Replicated(block + experts.shared_gate)))
    return tuple(rules)


def expert_shapes(experts: Experts, hidden: int) -> Shapes:
    """Return the shapes of one layer's router and experts, by names without the layer's prefix."""
    block = experts.block
    shapes: Shapes = {block + "gate.weight": (experts.num, hidden)}
    if experts.bias:
        shapes[block + experts.bias] = (experts.num,)
    for expert in range(experts.num):
        shapes |= mlp_shapes(hidden, experts.width, f"{block}experts.{expert}.", experts.projections)
    if experts.shared_width:
        shapes |= mlp_shapes(hidden, experts.shared_width, block + experts.shared)
    if experts.shared_gate:
        shapes[block + experts.shared_gate] = (1, hidden)
    return shapes


def expert_settings(experts: Experts, sparse: Sequence[bool]) -> dict[str, Any]:
    """Settings of TransformerConfig that experts determine. The router computes in fp32, whatever the weights are."""
    return {
        "num_moe_experts": experts.num,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": [int(has_experts) for has_experts in sparse],
        "moe_router_topk": experts.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": bool(experts.shared_gate),
    }


def interleave_experts(table: ModelTable, block: int) -> ModelTable:
    """The table where Transformer Engine's experts have the rows of gate and up projection in alternating blocks.

    megatron-core's own experts ignore `moe_mlp_glu_interleave_size`, and shared experts have a setting of their own.
    """
    rules = []
    for rule in table.rules:
        grouped = tuple(name for name in rule.names if ".mlp.experts.linear_fc1." in name)
        if grouped and isinstance(rule.packing, GateUp):
            rules.append(Rule(grouped, replace(rule.packing, block=block)))
            rule = replace(rule, names=tuple(name for name in rule.names if name not in grouped))
        rules.append(rule)
    return replace(table, rules=tuple(rules))
