"""GPT-2: LayerNorm, learned positions, biases everywhere, an MLP without gate, a tied head.

Canonical names are the names that `save_pretrained` writes for GPT2LMHeadModel; vLLM reads them
with and without the prefix `transformer.`. The linear layers are Conv1D with weights [in, out],
compared with [out, in] in Megatron. Query, key and value are one tensor, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_engine.models.config_json import dims_of
from hybrid_engine.models.llama import ACTIVATIONS, unknown_activation
from hybrid_engine.models.packing import InterleavedQKV, Replicated, Span, Split, Vocabulary
from hybrid_engine.models.table import ModelDims, ModelTable, Rule, Rules, Serving, in_layer
from hybrid_engine.records.regions import Shape, Shapes

LAYER = "transformer.h.{layer}."
EMBEDDING = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
HEAD = "lm_head.weight"


def gpt2(config: Any) -> ModelTable:
    """Return the table of GPT-2 or a derived model."""
    dims = dims_of(config, tied_embeddings=config.tie_word_embeddings)
    return ModelTable(
        dims=dims,
        rules=_rules(dims),
        shapes=_shapes(dims, config.n_positions),
        transformer={
            "num_layers": dims.num_layers,
            "hidden_size": dims.hidden_size,
            "ffn_hidden_size": dims.ffn_hidden_size,
            "num_attention_heads": dims.num_heads,
            "kv_channels": dims.head_dim,
            "layernorm_epsilon": config.layer_norm_epsilon,
            "normalization": "LayerNorm",
            "activation_func": ACTIVATIONS.get(config.activation_function),
            "add_bias_linear": True,
            "softmax_scale": dims.head_dim**-0.5 if config.scale_attn_weights else 1.0,
        },
        gpt={
            "position_embedding_type": "learned_absolute",
            "max_sequence_length": config.n_positions,
        },
        serving=Serving(ends_on_every_stage=True),
        not_built=tuple(_not_built(config)),
    )


def _not_built(config: Any) -> Iterator[str]:
    yield from unknown_activation(config.activation_function)
    for key in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        if getattr(config, key):
            yield key


def _rules(dims: ModelDims) -> Rules:
    def qkv(kind: str) -> InterleavedQKV:
        name = f"{LAYER}attn.c_attn.{kind}"
        size = dims.num_heads * dims.head_dim
        # Of Conv1D's [in, out] the second dim is packed. A bias has only that dim.
        is_weight = kind == "weight"
        return InterleavedQKV(
            query=Span(name, 0),
            key=Span(name, size),
            value=Span(name, 2 * size),
            num_groups=dims.num_kv_heads,
            queries_per_group=1,
            head_dim=dims.head_dim,
            dim=1 if is_weight else 0,
            transposed=is_weight,
        )

    def row_parallel(module: str, name: str) -> tuple[Rule, Rule]:
        # Conv1D computes x W with W [in, out]. A row-parallel layer is cut along its inputs, dim 0
        # here.
        weight = Split(f"{LAYER}{name}.weight", dim=0, transposed=True)
        bias = Replicated(f"{LAYER}{name}.bias")
        return Rule(in_layer(f"{module}.weight"), weight), Rule(in_layer(f"{module}.bias"), bias)

    norms = []
    final_norms = []
    for name, norm, fused_into in (
        ("input_layernorm", "ln_1", "self_attention.linear_qkv"),
        ("pre_mlp_layernorm", "ln_2", "mlp.linear_fc1"),
    ):
        for kind in ("weight", "bias"):
            names = in_layer(f"{name}.{kind}", f"{fused_into}.layer_norm_{kind}")
            norms.append(Rule(names, Replicated(f"{LAYER}{norm}.{kind}")))
    for kind in ("weight", "bias"):
        names = (f"decoder.final_layernorm.{kind}", f"decoder.final_norm.{kind}")
        final_norms.append(Rule(names, Replicated(f"transformer.ln_f.{kind}")))
    head = EMBEDDING if dims.tied_embeddings else HEAD
    return (
        Rule(("embedding.word_embeddings.weight",), Vocabulary(EMBEDDING, dims.vocab_size)),
        Rule(("embedding.position_embeddings.weight",), Replicated(POSITIONS)),
        *norms,
        Rule(in_layer("self_attention.linear_qkv.weight"), qkv("weight")),
        Rule(in_layer("self_attention.linear_qkv.bias"), qkv("bias")),
        *row_parallel("self_attention.linear_proj", "attn.c_proj"),
        Rule(
            in_layer("mlp.linear_fc1.weight"),
            Split(LAYER + "mlp.c_fc.weight", dim=1, transposed=True),
        ),
        Rule(in_layer("mlp.linear_fc1.bias"), Split(LAYER + "mlp.c_fc.bias", dim=0)),
        *row_parallel("mlp.linear_fc2", "mlp.c_proj"),
        *final_norms,
        Rule(("output_layer.weight",), Vocabulary(head, dims.vocab_size)),
    )


def _shapes(dims: ModelDims, num_positions: int) -> Shapes:
    hidden = dims.hidden_size
    ffn = dims.ffn_hidden_size
    layer_shapes: dict[str, Shape] = {
        "ln_1": (hidden,),
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, ffn),
        "mlp.c_proj": (ffn, hidden),
        "ln_2": (hidden,),
    }
    shapes: dict[str, Shape] = {
        EMBEDDING: (dims.vocab_size, hidden),
        POSITIONS: (num_positions, hidden),
    }
    for layer in range(dims.num_layers):
        prefix = LAYER.format(layer=layer)
        for name, shape in layer_shapes.items():
            # The last dim is the output of a Conv1D, and the only dim of a norm.
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[-1:]
    shapes["transformer.ln_f.weight"] = (hidden,)
    shapes["transformer.ln_f.bias"] = (hidden,)
    if not dims.tied_embeddings:
        shapes[HEAD] = (dims.vocab_size, hidden)
    return shapes
