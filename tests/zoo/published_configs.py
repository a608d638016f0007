"""Configs of published models, one or two per family, with the keys that decide the
architecture."""

from __future__ import annotations

from typing import Any

LLAMA_2_7B: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096},
    **{"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    "torch_dtype": "float16",
}
LLAMA_3_8B = {
    **LLAMA_2_7B,
    **{"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "rope_theta": 500000.0},
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "torch_dtype": "bfloat16"},
}
LLAMA_3_70B = {
    **LLAMA_3_8B,
    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
QWEN2_5_0_5B = {
    **LLAMA_2_7B,
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896},
    **{"intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    **{"vocab_size": 151936, "max_position_embeddings": 32768, "max_window_layers": 21},
    **{"sliding_window": 32768, "use_sliding_window": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
    **{"tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16"},
}
QWEN3_8B = {
    **QWEN2_5_0_5B,
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128},
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "max_position_embeddings": 40960, "max_window_layers": 36},
    **{"sliding_window": None, "tie_word_embeddings": False},
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048},
    **{"intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128},
    **{"num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001},
}
QWEN3_235B_A22B = {
    **QWEN3_30B_A3B,
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64},
    "moe_intermediate_size": 1536,
}
MIXTRAL_8X7B = {
    **LLAMA_2_7B,
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 14336},
    **{"num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1000000.0},
    **{"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
    **{"router_aux_loss_coef": 0.02, "torch_dtype": "bfloat16"},
}
DEEPSEEK_V2_LITE = {
    **LLAMA_2_7B,
    **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False},
    **{"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10000, "q_lora_rank": None, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1},
    **{"moe_layer_freq": 1, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    **{"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    **{"bos_token_id": 100000, "eos_token_id": 100001, "torch_dtype": "bfloat16"},
}
DEEPSEEK_V3 = {
    **DEEPSEEK_V2_LITE,
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168},
    **{"intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128},
    **{"num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536, "first_k_dense_replace": 3},
    **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "bos_token_id": 0},
    "eos_token_id": 1,
}
GLM_4_9B = {
    **LLAMA_2_7B,
    **{"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True, "head_dim": 128},
    **{"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2},
    **{"vocab_size": 151552, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5},
    **{"rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "pad_token_id": 151329},
    **{"eos_token_id": [151329, 151336, 151338], "torch_dtype": "bfloat16"},
}
GLM_4_9B_0414 = {
    **GLM_4_9B,
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
}
GEMMA_2_2B = {
    **LLAMA_2_7B,
    **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False},
    **{"head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000},
    **{"max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0},
    **{"final_logit_softcapping": 30.0, "sliding_window": 4096, "hidden_act": "gelu_pytorch_tanh"},
    **{"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    **{"tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
    "torch_dtype": "float32",
}
GEMMA_3_1B = {
    **GEMMA_2_2B,
    **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152},
    **{"intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144},
    **{"max_position_embeddings": 32768, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    **{"sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000},
    **{"rope_local_base_freq": 10000, "torch_dtype": "bfloat16"},
}
GPT2: dict[str, Any] = {
    **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"},
    **{"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
    **{"layer_norm_epsilon": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    **{"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256},
}

# Further models of these families, not in PUBLISHED.
QWEN_1_5_MOE = {
    **QWEN2_5_0_5B,
    **{"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048},
    **{"intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    **{"num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "tie_word_embeddings": False},
}
DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    **{"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 5120, "intermediate_size": 12288},
    **{"num_hidden_layers": 60, "vocab_size": 102400, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6},
    **{"topk_group": 3, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    **{"norm_topk_prob": False, "routed_scaling_factor": 16.0, "num_nextn_predict_layers": 0},
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2": LLAMA_2_7B,
    "llama-3": LLAMA_3_8B,
    "qwen2.5": QWEN2_5_0_5B,
    "qwen3": QWEN3_8B,
    "qwen3-moe": QWEN3_30B_A3B,
    "mixtral": MIXTRAL_8X7B,
    "deepseek-v2": DEEPSEEK_V2_LITE,
    "deepseek-v3": DEEPSEEK_V3,
    "glm-4": GLM_4_9B,
    "glm-4-0414": GLM_4_9B_0414,
    "gemma-2": GEMMA_2_2B,
    "gemma-3": GEMMA_3_1B,
    "gpt-2": GPT2,
}

_QWEN_VL_TOKENS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
PUBLISHED_VISION: dict[str, dict[str, Any]] = {
    "qwen3-vl": {
        **_QWEN_VL_TOKENS,
        **{"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"},
        "text_config": {
            **{"model_type": "qwen3_vl_text", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288},
            **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936},
            **{"max_position_embeddings": 262144, "rope_theta": 5000000},
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {
            **{"model_type": "qwen3_vl", "deepstack_visual_indexes": [8, 16, 24], "depth": 27},
            **{"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096},
            **{"patch_size": 16, "num_position_embeddings": 2304},
        },
    },
    # The text model's keys are those of the whole model.
    "qwen2.5-vl": {
        **_QWEN_VL_TOKENS,
        **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"},
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28},
        **{"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000},
        **{"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        "vision_config": {
            **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
            **{"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        },
    },
    # Most sizes of the text model are the class's defaults.
    "gemma-3": {
        **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        **{"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144},
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"},
            **{"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        },
        "vision_config": {
            **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16},
            **{"model_type": "siglip_vision_model", "num_hidden_layers": 27, "patch_size": 14},
        },
    },
}
"""Models of images and text."""
