"""Small configs of architectures without a name table, in sizes that vLLM's CPU kernels accept."""

from __future__ import annotations

from tests.harness.values import Values

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
LINEAR_ATTENTION = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
MAMBA = {
    "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
    "hybrid_override_pattern": "M-*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "expand": 2,
    "mamba_hidden_act": "silu",
    # transformers cuts smaller steps off, and vLLM and Megatron do not.
    "time_step_min": 1e-6,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 96}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
FIRST_DENSE = {"first_k_dense_replace": 1, "n_shared_experts": 1}
AFMOE = {
    "score_func": "sigmoid",
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "route_norm": True,
    "route_scale": 1.0,
}

# Architecture -> keys of its config besides `SIZES`.
SMALL: dict[str, Values] = {
    "AfmoeForCausalLM": {"model_type": "afmoe", **EXPERTS, **AFMOE},
    "DeepseekV32ForCausalLM": {
        "model_type": "deepseek_v32",
        **EXPERTS,
        **LATENT,
        **FIRST_DENSE,
        "index_topk": 32,
        "index_n_heads": 2,
        "index_head_dim": 64,
    },
    "Ernie4_5_MoeForCausalLM": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 96,
    },
    "Gemma4ForCausalLM": {
        "model_type": "gemma4_text",
        **WINDOWS,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
    },
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe",
        **EXPERTS,
        **FIRST_DENSE,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "Glm4MoeLiteForCausalLM": {
        "model_type": "glm4_moe_lite",
        **EXPERTS,
        **LATENT,
        **FIRST_DENSE,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "GlmMoeDsaForCausalLM": {
        "model_type": "glm_moe_dsa",
        **EXPERTS,
        **LATENT,
        "n_shared_experts": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "index_topk": 32,
        "index_n_heads": 2,
        "index_head_dim": 64,
    },
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        **EXPERTS,
        **WINDOWS,
        "intermediate_size": 128,
        "rope_parameters": YARN,
    },
    "GraniteForCausalLM": {"model_type": "granite"},
    "MiniMaxM2ForCausalLM": {
        "model_type": "minimax_m2",
        **EXPERTS,
        "intermediate_size": 96,
        "rotary_dim": 16,
        # Keys of published files that vLLM reads and transformers ignores.
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "Ministral3ForCausalLM": {"model_type": "ministral3"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None},
    "NemotronHForCausalLM": {"model_type": "nemotron_h", **MAMBA},
    "Olmo3ForCausalLM": {"model_type": "olmo3", "sliding_window": 16},
    "Phi3ForCausalLM": {"model_type": "phi3"},
    "Qwen3NextForCausalLM": {
        "model_type": "qwen3_next",
        **EXPERTS,
        **LINEAR_ATTENTION,
        **SHARED_EXPERT,
    },
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text", **LINEAR_ATTENTION},
    "Qwen3_5MoeForCausalLM": {
        "model_type": "qwen3_5_moe_text",
        **EXPERTS,
        **LINEAR_ATTENTION,
        **SHARED_EXPERT,
    },
    "SeedOssForCausalLM": {"model_type": "seed_oss"},
    "SmolLM3ForCausalLM": {"model_type": "smollm3"},
}


def small_config(architecture: str) -> Values:
    """Return the contents of a config.json."""
    return {**SIZES, **SMALL[architecture], "architectures": [architecture]}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "factor": 4.0,
}
SCALED_QUERIES = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
PUBLISHED_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}

# Variant -> its architecture, and keys of its config besides `SIZES`.
VARIANTS: dict[str, tuple[str, Values]] = {
    "Exaone-4, layers without rotation": (
        "Exaone4ForCausalLM",
        {
            "model_type": "exaone4",
            "sliding_window": 16,
            "sliding_window_pattern": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "Gemma-4, shared keys and values": (
        "Gemma4ForCausalLM",
        {
            **SMALL["Gemma4ForCausalLM"],
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        {
            "model_type": "falcon_h1",
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_expand": 1,
            # vLLM computes a single chunk right on a CPU.
            "mamba_chunk_size": 256,
        },
    ),
    "LFM2-MoE, a router's bias": (
        "Lfm2MoeForCausalLM",
        {
            "model_type": "lfm2_moe",
            **EXPERTS,
            **CONVOLUTIONS,
            "num_dense_layers": 1,
            "use_expert_bias": True,
        },
    ),
    "Phi-3, below its original length": (
        "Phi3ForCausalLM",
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 300,
            "max_position_embeddings": 1200,
            "rope_scaling": LONGROPE,
        },
    ),
    "Phi-3, above its original length": (
        "Phi3ForCausalLM",
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 100,
            "max_position_embeddings": 400,
            "rope_scaling": LONGROPE,
        },
    ),
    "OPT": (
        "OPTForCausalLM",
        {"model_type": "opt", "ffn_dim": 192, "word_embed_proj_dim": 128, "num_key_value_heads": 4},
    ),
    "Bloom": (
        "BloomForCausalLM",
        {"model_type": "bloom", "n_head": 4, "n_layer": 4, "num_key_value_heads": 4},
    ),
    "GPT-J": (
        "GPTJForCausalLM",
        {
            "model_type": "gptj",
            **{"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": None},
            **{"rotary_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": False},
        },
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {"model_type": "gpt_neox", "num_key_value_heads": 4}),
    "Cohere-2, windows": (
        "Cohere2ForCausalLM",
        {
            "model_type": "cohere2",
            "sliding_window": 100,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "Apertus": ("ApertusForCausalLM", {"model_type": "apertus", "hidden_act": "xielu"}),
    "Granite, multipliers": (
        "GraniteForCausalLM",
        {
            "model_type": "granite",
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "attention_multiplier": 0.0156,
        },
    ),
    "StarCoder2, windows": (
        "Starcoder2ForCausalLM",
        {"model_type": "starcoder2", "sliding_window": 16},
    ),
    "OLMoE": ("OlmoeForCausalLM", {"model_type": "olmoe", **EXPERTS}),
    "OLMoE, clamped": ("OlmoeForCausalLM", {"model_type": "olmoe", **EXPERTS, "clip_qkv": 8.0}),
    "gpt-oss, published quantisation": (
        "GptOssForCausalLM",
        {**SMALL["GptOssForCausalLM"], "swiglu_limit": 7.0, "quantization_config": PUBLISHED_MXFP4},
    ),
    "gpt-oss, another limit": (
        "GptOssForCausalLM",
        {**SMALL["GptOssForCausalLM"], "swiglu_limit": 4.0},
    ),
    "Ministral-3, below its original length": (
        "Ministral3ForCausalLM",
        {
            "model_type": "ministral3",
            "rope_parameters": {**SCALED_QUERIES, "original_max_position_embeddings": 300},
        },
    ),
    "Ministral-3, above its original length": (
        "Ministral3ForCausalLM",
        {
            "model_type": "ministral3",
            "rope_parameters": {**SCALED_QUERIES, "original_max_position_embeddings": 100},
        },
    ),
    "Mistral, scaled by position": (
        "MistralForCausalLM",
        {
            **SMALL["MistralForCausalLM"],
            "llama_4_scaling": {"original_max_position_embeddings": 100, "beta": 0.5},
        },
    ),
    "Mistral, scaled logits": (
        "MistralForCausalLM",
        {**SMALL["MistralForCausalLM"], "logit_scale": 1.003},
    ),
}


def variant_config(name: str) -> Values:
    """Return the contents of a config.json, of an architecture or a variant."""
    if name not in VARIANTS:
        return small_config(name)
    architecture, changes = VARIANTS[name]
    return {**SIZES, **changes, "architectures": [architecture]}
