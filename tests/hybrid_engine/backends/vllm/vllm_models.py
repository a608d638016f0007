"""Tiny models of every family, as plain configs, and their checkpoints' names and shapes, written out independently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
DEEPSEEK_V2 = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
del DEEPSEEK_V2["head_dim"]
DEEPSEEK_V3 = {
    **DEEPSEEK_V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 40,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
GLM = {
    **LLAMA,
    "architectures": ["GlmForCausalLM"],
    "model_type": "glm",
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "pad_token_id": 2,
}
GLM4 = {**GLM, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
GEMMA2 = {
    **LLAMA,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = {
    **GEMMA2,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 2,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "n_inner": None,
    "vocab_size": 130,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "llama one kv head": {**LLAMA, "num_key_value_heads": 1},
    "llama vocabulary without padding": {**LLAMA, "vocab_size": 128},
    "qwen2": QWEN2,
    "qwen2 tied": {**QWEN2, "tie_word_embeddings": True, "vocab_size": 100},
    "qwen3": QWEN3,
    "qwen3 tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen3 moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek v2": DEEPSEEK_V2,
    "deepseek v3": DEEPSEEK_V3,
    "glm": GLM,
    "glm4": GLM4,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
}


def checkpoint_shapes(config: Mapping[str, Any]) -> Shapes:
    """HF names and shapes of a checkpoint on disk for a config like the above."""
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
        if config["topk_method"] == "noaux_tc":
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
