"""Small configs of architectures without a name table, in sizes that vLLM's CPU kernels accept."""

from __future__ import annotations

from typing import Any

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
SMALL: dict[str, dict[str, Any]] = {
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


def small_config(architecture: str) -> dict[str, Any]:
    """Return the contents of a config.json."""
    return {**SIZES, **SMALL[architecture], "architectures": [architecture]}
