"""Names and shapes of checkpoints on disk for a config of any family, written out independently of the product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def checkpoint_shapes(config: Mapping[str, Any]) -> Shapes:
    """HF names and shapes of a checkpoint on disk for a config.json."""
    if config["model_type"] == "gpt2":
        return _gpt2_shapes(config)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for extra in range(config.get("num_nextn_predict_layers", 0)):
        shapes |= _prediction_shapes(config, config["num_hidden_layers"] + extra)
    return shapes


def checkpoint_dtypes(config: Mapping[str, Any]) -> dict[str, str]:
    """Tensors of such a checkpoint whose dtype is not the model's."""
    return {name: "float32" for name in checkpoint_shapes(config) if name.endswith("e_score_correction_bias")}


def _layer_shapes(config: Mapping[str, Any], layer: int) -> Shapes:
    hidden, kind = config["hidden_size"], config["model_type"]
    shapes: Shapes = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,))
    if kind.startswith("gemma"):
        shapes |= dict.fromkeys(("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"), (hidden,))
    if kind == "glm4":
        shapes |= dict.fromkeys(("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"), (hidden,))
    attention = _latent_attention_shapes(config) if kind.startswith("deepseek") else _attention_shapes(config)
    return shapes | attention | _mlp_shapes(config, layer)


def _attention_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, kind = config["hidden_size"], config["model_type"]
    head_dim = config["head_dim"] if kind != "qwen2" else hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: Shapes = {}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if kind in ("qwen2", "glm", "glm4"):
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if kind.startswith(("qwen3", "gemma3")):
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _latent_attention_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, queries = config["qk_rope_head_dim"], heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    keys_values = heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
    low_rank = config["q_lora_rank"]
    shapes: Shapes = {"q_proj.weight": (queries, hidden)}
    if low_rank:
        shapes = {
            "q_a_proj.weight": (low_rank, hidden),
            "q_a_layernorm.weight": (low_rank,),
            "q_b_proj.weight": (queries, low_rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (keys_values, latent),
        "o_proj.weight": (hidden, heads * config["v_head_dim"]),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mlp_shapes(config: Mapping[str, Any], layer: int) -> Shapes:
    hidden, inner, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    if kind == "mixtral":
        shapes: Shapes = {"block_sparse_moe.gate.weight": (4, hidden)}
        for expert in range(4):
            shapes |= _gated(f"block_sparse_moe.experts.{expert}.", hidden, inner, ("w1", "w3", "w2"))
        return shapes
    if kind == "qwen3_moe":
        return {"mlp.gate.weight": (config["num_experts"], hidden)} | _experts(config, config["num_experts"])
    if kind.startswith("deepseek") and layer >= config["first_k_dense_replace"]:
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"] * config["n_shared_experts"]
        shapes = {"mlp.gate.weight": (experts, hidden)}
        if config["architectures"] == ["DeepseekV3ForCausalLM"]:
            shapes["mlp.gate.e_score_correction_bias"] = (experts,)
        return shapes | _experts(config, experts) | _gated("mlp.shared_experts.", hidden, width)
    if kind in ("glm", "glm4"):
        return {"mlp.gate_up_proj.weight": (2 * inner, hidden), "mlp.down_proj.weight": (hidden, inner)}
    return _gated("mlp.", hidden, inner)


def _experts(config: Mapping[str, Any], number: int) -> Shapes:
    shapes: Shapes = {}
    for expert in range(number):
        shapes |= _gated(f"mlp.experts.{expert}.", config["hidden_size"], config["moe_intermediate_size"])
    return shapes


def _gated(
    prefix: str, hidden: int, width: int, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def _prediction_shapes(config: Mapping[str, Any], layer: int) -> Shapes:
    """A layer for multi-token prediction, as DeepSeek-V3 numbers it: after the decoder's."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        "embed_tokens.weight": (vocabulary, hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        **_layer_shapes(config, layer),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocabulary, hidden),
    }
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    """Weights of GPT-2's linear layers are on disk as [in, out]."""
    hidden, vocabulary = config["n_embd"], config["vocab_size"]
    shapes: Shapes = {
        "transformer.wte.weight": (vocabulary, hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    linear = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    linear |= {"mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden)}
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        shapes |= {f"{prefix}{norm}.{kind}": (hidden,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        for name, shape in linear.items():
            shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[1:]}
    return shapes | {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}
