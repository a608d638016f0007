"""GPT-2: LayerNorm, learned positions, biases everywhere, an MLP without gate, a tied head.

Canonical names: `transformers` checkpoints of GPT2LMHeadModel, as `save_pretrained` writes them; vLLM reads them with
and without the prefix `transformer.`. Its linear layers are Conv1D: weights are [in, out], Megatron's [out, in]. Query,
key and value are one tensor, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_engine.models.blocks import Shapes
from hybrid_engine.models.config_json import Gpt2
from hybrid_engine.models.llama import ACTIVATIONS, unknown_activation
from hybrid_engine.models.packing import InterleavedQKV, Replicated, Span, Split, Vocabulary
from hybrid_engine.models.table import ModelDims, ModelTable, Rule, Serving, in_layer

LAYER = "transformer.h.{layer}."
EMBEDDING, POSITIONS, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def gpt2(config: Gpt2) -> ModelTable:
    """GPT-2 and models of its kind."""
    hidden, num_heads = config.n_embd, config.n_head
    dims = ModelDims(
        num_layers=config.n_layer,
        hidden_size=hidden,
        ffn_hidden_size=config.n_inner or 4 * hidden,
        vocab_size=config.vocab_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        tied_embeddings=bool(config.tie_word_embeddings),
    )
    return ModelTable(
        dims=dims,
        rules=_rules(dims),
        shapes=_shapes(dims, config.n_positions),
        transformer=_transformer(config, dims),
        gpt={"position_embedding_type": "learned_absolute", "max_sequence_length": config.n_positions},
        serving=Serving(ends_on_every_stage=True),
        not_built=tuple(_not_built(config)),
    )


def _not_built(config: Gpt2) -> Iterator[str]:
    yield from unknown_activation(config.activation_function)
    yield from (key for key in ("add_cross_attention", "scale_attn_by_inverse_layer_idx") if getattr(config, key))


def _rules(dims: ModelDims) -> tuple[Rule, ...]:
    def qkv(kind: str) -> InterleavedQKV:
        name, part = f"{LAYER}attn.c_attn.{kind}", dims.num_heads * dims.head_dim
        query, key, value = (Span(name, start) for start in (0, part, 2 * part))
        is_weight = kind == "weight"
        return InterleavedQKV(
            query, key, value, dims.num_kv_heads, 1, dims.head_dim, dim=int(is_weight), transposed=is_weight
        )

    fused_norms = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
    norms = [
        Rule(in_layer(f"{name}.{kind}", f"{fused_norms[name]}.layer_norm_{kind}"), Replicated(f"{LAYER}{norm}.{kind}"))
        for name, norm in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2"))
        for kind in ("weight", "bias")
    ]
    return (
        Rule(("embedding.word_embeddings.weight",), Vocabulary(EMBEDDING, dims.vocab_size)),
        Rule(("embedding.position_embeddings.weight",), Replicated(POSITIONS)),
        *norms,
        Rule(in_layer("self_attention.linear_qkv.weight"), qkv("weight")),
        Rule(in_layer("self_attention.linear_qkv.bias"), qkv("bias")),
        Rule(
            in_layer("self_attention.linear_proj.weight"), Split(LAYER + "attn.c_proj.weight", dim=0, transposed=True)
        ),
        Rule(in_layer("self_attention.linear_proj.bias"), Replicated(LAYER + "attn.c_proj.bias")),
        Rule(in_layer("mlp.linear_fc1.weight"), Split(LAYER + "mlp.c_fc.weight", dim=1, transposed=True)),
        Rule(in_layer("mlp.linear_fc1.bias"), Split(LAYER + "mlp.c_fc.bias", dim=0)),
        Rule(in_layer("mlp.linear_fc2.weight"), Split(LAYER + "mlp.c_proj.weight", dim=0, transposed=True)),
        Rule(in_layer("mlp.linear_fc2.bias"), Replicated(LAYER + "mlp.c_proj.bias")),
        Rule(("decoder.final_layernorm.weight", "decoder.final_norm.weight"), Replicated("transformer.ln_f.weight")),
        Rule(("decoder.final_layernorm.bias", "decoder.final_norm.bias"), Replicated("transformer.ln_f.bias")),
        Rule(("output_layer.weight",), Vocabulary(EMBEDDING if dims.tied_embeddings else HEAD, dims.vocab_size)),
    )


def _shapes(dims: ModelDims, num_positions: int) -> Shapes:
    hidden, ffn = dims.hidden_size, dims.ffn_hidden_size
    linear = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, ffn),
        "mlp.c_proj": (ffn, hidden),
    }
    shapes: Shapes = {EMBEDDING: (dims.vocab_size, hidden), POSITIONS: (num_positions, hidden)}
    for layer in range(dims.num_layers):
        prefix = LAYER.format(layer=layer)
        for name, shape in {"ln_1": (hidden,), **linear, "ln_2": (hidden,)}.items():
            shapes[f"{prefix}{name}.weight"], shapes[f"{prefix}{name}.bias"] = shape, shape[-1:]
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (hidden,)
    if not dims.tied_embeddings:
        shapes[HEAD] = (dims.vocab_size, hidden)
    return shapes


def _transformer(config: Gpt2, dims: ModelDims) -> dict[str, Any]:
    return {
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
    }
