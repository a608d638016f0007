"""Rules and shapes that families share: embeddings, grouped-query attention, gated MLPs, the list of layers.

A family file puts these together and adds what is its own. Canonical names are patterns with `{layer}`; Megatron's
names come in both layer specs, local and Transformer Engine, where the input norms are fused into the linear layers
that follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybrid_engine.models.packing import GateUp, InterleavedQKV, Over, Replicated, Shape, Span, Split, Vocabulary
from hybrid_engine.models.table import ModelDims, Rule, in_layer

LAYER = "model.layers.{layer}."
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Shapes = dict[str, Shape]


def outer_rules(dims: ModelDims) -> tuple[Rule, ...]:
    """Embedding, final norm, output head."""
    return (
        Rule(("embedding.word_embeddings.weight",), Vocabulary(EMBEDDING, dims.vocab_size)),
        Rule(("decoder.final_layernorm.weight", "decoder.final_norm.weight"), Replicated(FINAL_NORM)),
        Rule(("output_layer.weight",), Vocabulary(EMBEDDING if dims.tied_embeddings else HEAD, dims.vocab_size)),
    )


POST_NORM_NAMES = (
    (
        "post_self_attn_layernorm.weight",
        "self_attention.linear_proj.post_layernorm.weight",
        "post_attention_layernorm.weight",
    ),
    ("post_mlp_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
)
"""Names of the norms after attention and after the MLP. Megatron-core has none, so the names differ by who adds them:
slime, mbridge's GLM-4 and this project; Megatron-Bridge; mbridge's Gemma-3."""


def norm_rules(pre_mlp: str = "post_attention_layernorm", post: Sequence[str] = ()) -> tuple[Rule, ...]:
    """The norms before attention and before the MLP or experts, standalone or fused; and those after both.

    `pre_mlp`, `post`: what the checkpoint calls them.
    """
    return (
        Rule(
            in_layer("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            Replicated(LAYER + "input_layernorm.weight"),
        ),
        Rule(
            in_layer("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            Replicated(f"{LAYER}{pre_mlp}.weight"),
        ),
        *(
            Rule(in_layer(*names), Replicated(f"{LAYER}{norm}.weight"))
            for norm, names in zip(post, POST_NORM_NAMES, strict=False)
        ),
    )


def attention_rules(dims: ModelDims) -> tuple[Rule, ...]:
    """Grouped-query attention, with all biases and norms it can have."""
    attention = LAYER + "self_attn."

    def qkv(kind: str) -> InterleavedQKV:
        query, key, value = (Span(f"{attention}{part}_proj.{kind}") for part in "qkv")
        queries_per_group = dims.num_heads // dims.num_kv_heads
        return InterleavedQKV(query, key, value, dims.num_kv_heads, queries_per_group, dims.head_dim)

    return (
        Rule(in_layer("self_attention.linear_qkv.weight"), qkv("weight")),
        Rule(in_layer("self_attention.linear_qkv.bias"), qkv("bias")),
        Rule(in_layer("self_attention.q_layernorm.weight"), Replicated(attention + "q_norm.weight")),
        Rule(in_layer("self_attention.k_layernorm.weight"), Replicated(attention + "k_norm.weight")),
        *output_rules(),
    )


def output_rules() -> tuple[Rule, ...]:
    """The projection after attention, of any kind."""
    projection = LAYER + "self_attn.o_proj."
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
) -> tuple[Rule, ...]:
    """A gated MLP: the dense one, a shared expert, or one expert of many.

    Args:
        fc1, fc2: Megatron's names below a layer, `{kind}` for weight or bias.
        canonical: prefix of the tensors; `projections`: names of gate, up and down below it.
        over: the ranks that shard it.
    """
    gate, up, down = (f"{canonical}{projection}." for projection in projections)
    rules = []
    for kind, output in (
        ("weight", Split(down + "weight", dim=1, over=over)),
        ("bias", Replicated(down + "bias")),
    ):
        first, second = ([name.replace("{kind}", kind) for name in names] for names in (fc1, fc2))
        rules.append(Rule(in_layer(*first), GateUp(Span(gate + kind), Span(up + kind), over=over)))
        rules.append(Rule(in_layer(*second), output))
    return tuple(rules)


def fused_mlp_rules(dims: ModelDims) -> tuple[Rule, ...]:
    """A gated MLP whose gate and up projection are one tensor on disk, gate first. Without biases."""
    both = LAYER + "mlp.gate_up_proj.weight"
    return (
        Rule(in_layer("mlp.linear_fc1.weight"), GateUp(Span(both), Span(both, dims.ffn_hidden_size))),
        Rule(in_layer("mlp.linear_fc2.weight"), Split(LAYER + "mlp.down_proj.weight", dim=1)),
    )


def attention_shapes(dims: ModelDims, *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> Shapes:
    """Return the shapes of one layer's attention, by names without the layer's prefix."""
    hidden = dims.hidden_size
    rows = {"q": dims.num_heads * dims.head_dim, "k": dims.num_kv_heads * dims.head_dim}
    rows["v"] = rows["k"]
    shapes: Shapes = {}
    for part, size in rows.items():
        shapes[f"self_attn.{part}_proj.weight"] = (size, hidden)
        if qkv_bias:
            shapes[f"self_attn.{part}_proj.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (dims.head_dim,)
    return shapes


def mlp_shapes(
    hidden: int, width: int, canonical: str = "mlp.", projections: Sequence[str] = PROJECTIONS, bias: bool = False
) -> Shapes:
    """Return the shapes of one gated MLP."""
    shapes: Shapes = {}
    for projection, shape in zip(projections, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
        shapes[f"{canonical}{projection}.weight"] = shape
        if bias:
            shapes[f"{canonical}{projection}.bias"] = shape[:1]
    return shapes


def fused_mlp_shapes(dims: ModelDims) -> Shapes:
    """Return the shapes of what `fused_mlp_rules` packs."""
    hidden, ffn = dims.hidden_size, dims.ffn_hidden_size
    return {"mlp.gate_up_proj.weight": (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}


def norm_shapes(hidden: int, pre_mlp: str = "post_attention_layernorm", post: Sequence[str] = ()) -> Shapes:
    """The norms of one layer, see `norm_rules`."""
    return {f"{norm}.weight": (hidden,) for norm in ("input_layernorm", pre_mlp, *post)}


def model_shapes(dims: ModelDims, layer_shapes: Callable[[int], Mapping[str, Shape]]) -> Shapes:
    """Canonical tensors in checkpoint order, from those of each layer without its prefix."""
    shapes: Shapes = {EMBEDDING: (dims.vocab_size, dims.hidden_size)}
    for layer in range(dims.num_layers):
        prefix = LAYER.format(layer=layer)
        shapes.update({prefix + name: shape for name, shape in layer_shapes(layer).items()})
    shapes[FINAL_NORM] = (dims.hidden_size,)
    if not dims.tied_embeddings:
        shapes[HEAD] = (dims.vocab_size, dims.hidden_size)
    return shapes
