"""Rules and shapes shared by families: embeddings, grouped-query attention, gated MLPs, layers.

A family's file combines these with its specific parts. Canonical names are patterns with `{layer}`.
Megatron's names cover both layer specs: local, and Transformer Engine, which fuses the input norms
into the linear layers after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid_engine.models.packing import (
    GateUp,
    HeadRows,
    InterleavedQKV,
    Over,
    PackedHeads,
    Packing,
    Replicated,
    Span,
    Split,
    Vocabulary,
)
from hybrid_engine.models.table import ModelDims, Rule, Rules, in_layer
from hybrid_engine.records.regions import Shape, Shapes

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def outer_rules(dims: ModelDims, embedding: str = EMBEDDING, final_norm: str = FINAL_NORM) -> Rules:
    """Return the rules of embedding, final norm and output head."""
    # A checkpoint has a tied head once, as the embedding. Megatron holds it in both parameters if
    # they are on different pipeline stages.
    head = embedding if dims.tied_embeddings else HEAD
    final_norm_names = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")
    return (
        Rule(("embedding.word_embeddings.weight",), Vocabulary(embedding, dims.vocab_size)),
        Rule(final_norm_names, Replicated(final_norm)),
        Rule(("output_layer.weight",), Vocabulary(head, dims.vocab_size)),
    )


POST_NORM_NAMES = (
    (
        "post_self_attn_layernorm.weight",
        "self_attention.linear_proj.post_layernorm.weight",
        "post_attention_layernorm.weight",
    ),
    (
        "post_mlp_layernorm.weight",
        "mlp.linear_fc2.post_layernorm.weight",
        "post_feedforward_layernorm.weight",
    ),
)
"""Names of the norms after attention and after the MLP. Megatron-core does not have these norms,
and the projects that add them use different names: slime, mbridge's GLM-4 and this project;
Megatron-Bridge; mbridge's Gemma-3."""


def norm_rules(pre_mlp: str = "post_attention_layernorm", post: Sequence[str] = ()) -> Rules:
    """Return the rules of the norms around attention and the MLP or experts.

    Args:
        pre_mlp: checkpoint's name of the norm before the MLP.
        post: checkpoint's names of the norms after attention and after the MLP, if there are any.
    """
    return (
        Rule(
            in_layer(
                "input_layernorm.weight",
                "self_attention.linear_qkv.layer_norm_weight",
                "self_attention.in_proj.layer_norm_weight",
            ),
            Replicated(LAYER + "input_layernorm.weight"),
        ),
        Rule(
            in_layer("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            Replicated(f"{LAYER}{pre_mlp}.weight"),
        ),
        *(
            # Not strict below: most models have no such norms, and `post` is empty.
            Rule(in_layer(*names), Replicated(f"{LAYER}{norm}.weight"))
            for norm, names in zip(post, POST_NORM_NAMES, strict=False)
        ),
    )


def attention_rules(
    dims: ModelDims,
    attention: str = ATTENTION,
    *,
    gated: bool = False,
    whole_norms: bool = False,
) -> Rules:
    """Return the rules of grouped-query attention, with all optional biases and norms.

    Args:
        dims: sizes of the model.
        attention: prefix of the canonical tensors.
        gated: the query projection has a gate after each head.
        whole_norms: queries and keys are normalized over all heads. Megatron-core has no such
            norms; Megatron-Bridge's have the elements of a rank's heads.
    """
    projections = [Span(f"{attention}{part}_proj") for part in "qkv"]

    def norm(part: str) -> Rule:
        tensor = f"{attention}{part}_norm.weight"
        packing = Split(tensor, dim=0) if whole_norms else Replicated(tensor)
        return Rule(in_layer(f"self_attention.{part}_layernorm.weight"), packing)

    return (
        *(_gated_qkv_rules(dims, attention) if gated else _qkv_rules(dims, projections)),
        norm("q"),
        norm("k"),
        # An attention sink for each query head.
        Rule(
            in_layer("self_attention.core_attention.softmax_offset"),
            Split(attention + "sinks", dim=0),
        ),
        *output_rules(attention),
    )


def fused_attention_rules(dims: ModelDims) -> Rules:
    """Return the rules of attention whose query, key and value are one tensor on disk, in order."""
    projection = ATTENTION + "qkv_proj"
    query_rows = dims.num_heads * dims.head_dim
    kv_rows = dims.num_kv_heads * dims.head_dim
    # 32 query heads, 8 key/value heads of 128: queries in rows 0 to 4095, keys from 4096, values
    # from 5120.
    starts = (0, query_rows, query_rows + kv_rows)
    return _qkv_rules(dims, [Span(projection, start) for start in starts])


def _qkv_rules(dims: ModelDims, projections: Sequence[Span]) -> Rules:
    """Return the rules of Megatron's one projection to queries, keys and values.

    `projections`: names, without weight or bias, and first rows of query, key and value.
    """

    def qkv(kind: str) -> InterleavedQKV:
        query, key, value = (Span(f"{span.tensor}.{kind}", span.start) for span in projections)
        return InterleavedQKV(
            query=query,
            key=key,
            value=value,
            num_groups=dims.num_kv_heads,
            queries_per_group=dims.num_heads // dims.num_kv_heads,
            head_dim=dims.head_dim,
        )

    return tuple(
        Rule(in_layer(f"self_attention.linear_qkv.{kind}"), qkv(kind))
        for kind in ("weight", "bias")
    )


def _gated_qkv_rules(dims: ModelDims, attention: str) -> Rules:
    """Return the rules of Megatron's projection with gates: query heads, gates, key, value."""
    size = dims.head_dim

    def qkv(kind: str) -> PackedHeads:
        query, key, value = (f"{attention}{part}_proj.{kind}" for part in "qkv")
        return PackedHeads(
            (
                # With heads of 128 rows the checkpoint's query tensor has head 0 in rows 0 to 127
                # and its gate in rows 128 to 255. Megatron has, per group, all query heads first
                # and then all their gates.
                HeadRows(query, dims.num_heads, size, 0, 2 * size),
                HeadRows(query, dims.num_heads, size, size, 2 * size),
                HeadRows(key, dims.num_kv_heads, size),
                HeadRows(value, dims.num_kv_heads, size),
            ),
            num_shares=dims.num_kv_heads,
        )

    return tuple(
        Rule(in_layer(f"self_attention.linear_qkv.{kind}"), qkv(kind))
        for kind in ("weight", "bias")
    )


def output_rules(attention: str = ATTENTION) -> Rules:
    """Return the rules of the output projection of any attention."""
    projection = attention + "o_proj."
    return (
        Rule(in_layer("self_attention.linear_proj.weight"), Split(projection + "weight", dim=1)),
        Rule(in_layer("self_attention.linear_proj.bias"), Replicated(projection + "bias")),
    )


def mlp_rules(
    fc1: Sequence[str] = ("mlp.linear_fc1.{kind}",),
    fc2: Sequence[str] = ("mlp.linear_fc2.{kind}",),
    canonical: str = LAYER + "mlp.",
    projections: Sequence[str] = PROJECTIONS,
    over: Over = Over.TENSOR,
) -> Rules:
    """Return the rules of a gated MLP: of a dense layer, a shared expert, or a routed expert.

    Args:
        fc1: Megatron's names of the first linear layer below a layer, `{kind}` for weight or bias.
        fc2: Megatron's names of the second linear layer.
        canonical: prefix of the canonical tensors.
        projections: canonical names of gate, up and down.
        over: group of ranks that shard it.
    """
    gate, up, down = (f"{canonical}{projection}." for projection in projections)
    outputs: dict[str, Packing] = {
        "weight": Split(down + "weight", dim=1, over=over),
        # A row-parallel layer adds its bias after the reduction, so it is not sharded.
        "bias": Replicated(down + "bias"),
    }
    rules = []
    for kind, output in outputs.items():
        fc1_names = in_layer(*(name.replace("{kind}", kind) for name in fc1))
        fc2_names = in_layer(*(name.replace("{kind}", kind) for name in fc2))
        rules.append(Rule(fc1_names, GateUp(Span(gate + kind), Span(up + kind), over=over)))
        rules.append(Rule(fc2_names, output))
    return tuple(rules)


def fused_mlp_rules(dims: ModelDims) -> Rules:
    """Return the rules of a gated MLP with one tensor for gate and up on disk, without biases."""
    fused = LAYER + "mlp.gate_up_proj.weight"
    gate_up = GateUp(Span(fused), Span(fused, dims.ffn_hidden_size))
    return (
        Rule(in_layer("mlp.linear_fc1.weight"), gate_up),
        Rule(in_layer("mlp.linear_fc2.weight"), Split(LAYER + "mlp.down_proj.weight", dim=1)),
    )


def attention_shapes(
    dims: ModelDims,
    *,
    qkv_bias: bool,
    output_bias: bool,
    qk_norm: bool,
) -> Shapes:
    """Return the shapes of a layer's attention, by name without the layer's prefix."""
    hidden = dims.hidden_size
    query_rows = dims.num_heads * dims.head_dim
    kv_rows = dims.num_kv_heads * dims.head_dim
    shapes: dict[str, Shape] = {}
    for part, size in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes[f"self_attn.{part}_proj.weight"] = (size, hidden)
        if qkv_bias:
            shapes[f"self_attn.{part}_proj.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (hidden, query_rows)
    if output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if qk_norm:
        shapes["self_attn.q_norm.weight"] = (dims.head_dim,)
        shapes["self_attn.k_norm.weight"] = (dims.head_dim,)
    return shapes


def mlp_shapes(
    hidden: int,
    width: int,
    canonical: str = "mlp.",
    projections: Sequence[str] = PROJECTIONS,
    bias: bool = False,
) -> Shapes:
    """Return the shapes of a gated MLP with intermediate size `width`."""
    weights = ((width, hidden), (width, hidden), (hidden, width))
    shapes: dict[str, Shape] = {}
    for projection, shape in zip(projections, weights, strict=True):
        shapes[f"{canonical}{projection}.weight"] = shape
        if bias:
            shapes[f"{canonical}{projection}.bias"] = shape[:1]
    return shapes


def fused_mlp_shapes(dims: ModelDims) -> Shapes:
    """Return the shapes of the tensors of `fused_mlp_rules`."""
    hidden = dims.hidden_size
    ffn = dims.ffn_hidden_size
    return {
        "mlp.gate_up_proj.weight": (2 * ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }


def norm_shapes(
    hidden: int,
    pre_mlp: str = "post_attention_layernorm",
    post: Sequence[str] = (),
) -> Shapes:
    """Return the shapes of the norms of a layer; arguments as in `norm_rules`."""
    return {f"{norm}.weight": (hidden,) for norm in ("input_layernorm", pre_mlp, *post)}


def model_shapes(dims: ModelDims, layer_shapes: Callable[[int], Shapes]) -> Shapes:
    """Return the shapes of all canonical tensors in checkpoint order.

    Args:
        dims: sizes of the model.
        layer_shapes: returns the shapes of a layer, by name without its prefix.
    """
    shapes: dict[str, Shape] = {EMBEDDING: (dims.vocab_size, dims.hidden_size)}
    for layer in range(dims.num_layers):
        prefix = LAYER.format(layer=layer)
        shapes.update({prefix + name: shape for name, shape in layer_shapes(layer).items()})
    shapes[FINAL_NORM] = (dims.hidden_size,)
    if not dims.tied_embeddings:
        shapes[HEAD] = (dims.vocab_size, dims.hidden_size)
    return shapes
