"""Models with experts: Qwen2-MoE, Qwen3-MoE, Mixtral, and parts of other families with experts.

A checkpoint has one tensor per expert (transformers 5 joins them in memory only). Megatron numbers
the experts of a rank from 0, both as separate MLPs (SequentialMLP) and grouped by Transformer
Engine (TEGroupedMLP: one parameter per expert, with the number at the end). The adaptor converts
these to global numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.models.blocks import (
    LAYER,
    PROJECTIONS,
    mlp_rules,
    mlp_shapes,
    model_shapes,
)
from hybrid_engine.models.config_json import dims_of
from hybrid_engine.models.llama import (
    Traits,
    family_table,
    layer_shapes,
    qwen3_traits,
    windows_by_kind,
)
from hybrid_engine.models.packing import GateUp, Over, Packing, Replicated, Span, Split
from hybrid_engine.models.table import Extras, ModelTable, Rule, Rules, Serving, in_layer
from hybrid_engine.records.regions import Shape, Shapes


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes and names of the experts of a layer.

    Attributes:
        num: number of routed experts.
        width: intermediate size of a routed expert.
        top_k: experts per token.
        block: prefix of the experts within a layer of the checkpoint.
        projections: names of gate, up and down of an expert.
        bias: name below `block` of a bias that is added to scores only for the choice of experts.
        shared: prefix below `block` of the shared expert, which processes every token.
        shared_width: intermediate size of the shared expert; 0: there is none.
        shared_gate: name below `block` of the shared expert's gate, if there is one.
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


MIXTRAL: dict[str, Any] = {
    "block": "block_sparse_moe.",
    "projections": ("w1", "w3", "w2"),
}
"""Names of Mixtral's experts."""


def qwen3_moe(config: Any) -> ModelTable:
    """Return the table of Qwen3 with experts, which has the attention of the dense model."""
    experts = Experts(config.num_experts, config.moe_intermediate_size, config.num_experts_per_tok)
    # transformers masks all layers alike and ignores layer_types and max_window_layers.
    windows = (config.sliding_window,) * config.num_hidden_layers
    return _table_of(config, qwen3_traits(config), experts, windows)


def qwen2_moe(config: Any) -> ModelTable:
    """Return the table of Qwen1.5 or Qwen2 with routed experts and a gated shared expert."""
    experts = Experts(
        config.num_experts,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
        shared="shared_expert.",
        shared_width=config.shared_expert_intermediate_size,
        shared_gate="shared_expert_gate.weight",
    )
    # By the defaults of transformers, windows are in every second layer below max_window_layers. In
    # the dense Qwen2 they are in all layers from there on.
    traits = Traits(qkv_bias=config.qkv_bias)
    return _table_of(config, traits, experts, windows_by_kind(config))


def mixtral(config: Any) -> ModelTable:
    """Return the table of Mixtral, with experts of width `intermediate_size` in every layer."""
    experts = Experts(
        config.num_local_experts,
        config.intermediate_size,
        config.num_experts_per_tok,
        **MIXTRAL,
    )
    windows = (config.sliding_window,) * config.num_hidden_layers
    return _table_of(config, Traits(), experts, windows)


def _table_of(
    config: Any,
    traits: Traits,
    experts: Experts,
    windows: tuple[int | None, ...],
) -> ModelTable:
    """Return the table of a Llama-like model with experts instead of the MLP in some layers.

    Without Qwen's keys all layers have experts, and the probabilities of a token's experts are
    scaled to sum to 1. Otherwise they may come from the softmax over all experts unchanged.

    Args:
        config: object of transformers' class.
        traits: differences from Llama.
        experts: the experts of a layer.
        windows: `Extras.windows`, or None for all layers.
    """
    step = getattr(config, "decoder_sparse_step", 1)
    without = getattr(config, "mlp_only_layers", ())
    is_normalized = getattr(config, "norm_topk_prob", True)
    layers = range(config.num_hidden_layers)
    # decoder_sparse_step 2 puts experts into layers 1, 3, 5: counted from 1, as in transformers.
    sparse = [(layer + 1) % step == 0 and layer not in without for layer in layers]
    extras = Extras(windows=windows) if any(windows) else Extras()
    dense = family_table(config, traits, extras)
    with_experts = [layer for layer in layers if sparse[layer]]
    dims = dims_of(config, with_experts, tied_embeddings=config.tie_word_embeddings)
    sparse_mlp = expert_shapes(experts, dims.hidden_size)

    not_built = dense.not_built
    if experts.top_k == 1 and is_normalized:
        # The probability is constant, so the router has no gradient.
        not_built += ("one expert per token with probability 1, which trains no router",)

    def shapes_of(layer: int) -> Shapes:
        return layer_shapes(dims, traits, sparse_mlp if sparse[layer] else None)

    return replace(
        dense,
        dims=dims,
        rules=(*dense.rules, *expert_rules(experts)),
        shapes=model_shapes(dims, shapes_of),
        transformer={
            **dense.transformer,
            **expert_settings(experts, sparse),
            # Softmax over the chosen scores equals softmax over all, scaled to sum to 1. Unscaled
            # probabilities need the softmax first.
            "moe_router_pre_softmax": not is_normalized,
        },
        serving=Serving(ends_on_every_stage=True),
        not_built=not_built,
    )


def expert_rules(experts: Experts) -> Rules:
    """Return the rules of router, routed experts and shared expert."""
    block = LAYER + experts.block
    local = "mlp.experts.local_experts.{expert}."
    rules = [
        Rule(in_layer("mlp.router.weight"), Replicated(block + "gate.weight")),
        *mlp_rules(
            # A SequentialMLP has the expert's number in the middle of the name, a grouped MLP at
            # its end.
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
        rules.extend(
            mlp_rules(
                ("mlp.shared_experts.linear_fc1.{kind}",),
                ("mlp.shared_experts.linear_fc2.{kind}",),
                block + experts.shared,
            )
        )
    if experts.shared_gate:
        gate_names = in_layer("mlp.shared_experts.gate_weight")
        rules.append(Rule(gate_names, Replicated(block + experts.shared_gate)))
    return tuple(rules)


def packed_expert_rules() -> Rules:
    """Return the rules of router and experts that are stored together, as gpt-oss's are.

    All experts of a layer are one tensor, [experts, in, out], in which gate and up columns
    alternate. All linear layers have biases.
    """
    block = LAYER + "mlp."
    experts = block + "experts."
    # Of [experts, in, out] the even columns of an expert are its gate, the odd ones its up
    # projection.
    column = experts + "gate_up_proj[{expert},:,%d::2]"
    element = experts + "gate_up_proj_bias[{expert},%d::2]"
    over = Over.EXPERT_TENSOR
    packings: dict[str, Packing] = {
        "linear_fc1.weight": GateUp(
            Span(column % 0),
            Span(column % 1),
            dim=1,
            transposed=True,
            over=over,
        ),
        "linear_fc1.bias": GateUp(Span(element % 0), Span(element % 1), over=over),
        "linear_fc2.weight": Split(
            experts + "down_proj[{expert},:,:]",
            dim=0,
            transposed=True,
            over=over,
        ),
        # A row-parallel layer adds its bias after the reduction, so it is not sharded.
        "linear_fc2.bias": Replicated(experts + "down_proj_bias[{expert},:]"),
    }
    rules = [
        Rule(in_layer(f"mlp.router.{kind}"), Replicated(f"{block}router.{kind}"))
        for kind in ("weight", "bias")
    ]
    for name, packing in packings.items():
        local = f"mlp.experts.local_experts.{{expert}}.{name}"
        grouped = f"mlp.experts.{name}{{expert}}"
        rules.append(Rule(in_layer(local, grouped), packing))
    return tuple(rules)


def expert_shapes(experts: Experts, hidden: int) -> Shapes:
    """Return the shapes of a layer's router and experts, by name without the layer's prefix."""
    block = experts.block
    shapes: dict[str, Shape] = {block + "gate.weight": (experts.num, hidden)}
    if experts.bias:
        shapes[block + experts.bias] = (experts.num,)
    for expert in range(experts.num):
        prefix = f"{block}experts.{expert}."
        shapes |= mlp_shapes(hidden, experts.width, prefix, experts.projections)
    if experts.shared_width:
        shapes |= mlp_shapes(hidden, experts.shared_width, block + experts.shared)
    if experts.shared_gate:
        shapes[block + experts.shared_gate] = (1, hidden)
    return shapes


def expert_settings(experts: Experts, sparse: Sequence[bool]) -> dict[str, Any]:
    """Return the settings of TransformerConfig that experts determine."""
    return {
        "num_moe_experts": experts.num,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": [int(has_experts) for has_experts in sparse],
        "moe_router_topk": experts.top_k,
        # The router computes in fp32 regardless of the weights' dtype.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": bool(experts.shared_gate),
    }


def interleave_experts(table: ModelTable, block: int) -> ModelTable:
    """Return the table with gate and up rows of Transformer Engine's experts in alternating blocks.

    megatron-core's experts ignore `moe_mlp_glu_interleave_size`, and shared experts have a separate
    setting.

    Args:
        table: name table of the model.
        block: rows of a block.
    """
    rules = []
    for rule in table.rules:
        grouped = tuple(name for name in rule.names if ".mlp.experts.linear_fc1." in name)
        if grouped and isinstance(rule.packing, GateUp):
            # Split the rule: the other names keep their packing.
            rules.append(Rule(grouped, replace(rule.packing, block=block)))
            others = tuple(name for name in rule.names if name not in grouped)
            rules.append(Rule(others, rule.packing))
        else:
            rules.append(rule)
    return replace(table, rules=tuple(rules))
