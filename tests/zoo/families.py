"""Registry of the families: keys that decide the architecture, and the sizes of test models.

    tiny_config("qwen3", tie_word_embeddings=True)  # small, for exact computations
    served_config("qwen3", vocab_size=128)             # heads as large as vLLM's kernels require

Both return the config.json of a published model (published_configs.py) with other sizes. Sizes that
a rule could confuse differ from each other, and they have as few common divisors as possible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.values import Values
from tests.zoo import published_configs as published

# Megatron must pad 130 tokens to any multiple. head_dim differs from hidden_size /
# num_attention_heads.
SIZES: Values = {
    "vocab_size": 130,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SERVED_SIZES: Values = {
    **SIZES,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,  # The minimum of vLLM's attention on CPU.
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
YARN: Values = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

# With the published values soft caps and windows would have no effect in tiny models.
_GEMMA: Values = {"sliding_window": 5, "query_pre_attn_scalar": 6, "pad_token_id": None}
_SERVED_GEMMA: Values = {"query_pre_attn_scalar": 32, "sliding_window": 64}
_EXPERTS: Values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
# Latent attention: a query has 8 rotary and 6 other elements, a value has 10.
_LATENT: Values = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "routed_scaling_factor": 1.7,
}
_SERVED_LATENT: Values = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 304,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_GPT2: Values = {
    "vocab_size": 130,
    "n_embd": 32,
    "n_inner": 40,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_ctx": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
        transformers: prefix of its class names in transformers.
        published: config.json of a published model.
        tiny, served: changed keys in addition to SIZES and SERVED_SIZES.
        without: keys in SIZES or SERVED_SIZES that its configs do not have.
    """

    transformers: str
    published: Mapping[str, Any]
    tiny: Mapping[str, Any] = field(default_factory=dict)
    served: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def config(self, sizes: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
        merged = {**self.published, **sizes}
        return {
            **{name: value for name, value in merged.items() if name not in self.without},
            **changes,
        }


_NO_GPT2_KEYS = tuple(name for name in SERVED_SIZES if name not in {*_GPT2, "torch_dtype"})
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", published.LLAMA_2_7B),
    # The config has no head_dim.
    "qwen2": Family(
        "Qwen2",
        {**published.QWEN2_5_0_5B, "tie_word_embeddings": False},
        tiny={"hidden_size": 32},
        served={"hidden_size": 128},
        without=("head_dim",),
    ),
    "qwen3": Family("Qwen3", published.QWEN3_8B),
    "glm": Family(
        "Glm", published.GLM_4_9B, tiny={"pad_token_id": None}, served={"pad_token_id": 2}
    ),
    "glm4": Family(
        "Glm4", published.GLM_4_9B_0414, tiny={"pad_token_id": None}, served={"pad_token_id": 2}
    ),
    "gemma2": Family(
        "Gemma2",
        published.GEMMA_2_2B,
        tiny={**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
        served=_SERVED_GEMMA,
    ),
    "gemma3": Family(
        "Gemma3Text",
        published.GEMMA_3_1B,
        tiny={**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
        served={**_SERVED_GEMMA, "sliding_window_pattern": 2},
    ),
    "gpt2": Family(
        "GPT2",
        {**published.GPT2, "tie_word_embeddings": True},
        tiny=_GPT2,
        served={**_GPT2, "n_embd": 128, "n_inner": None, "n_positions": 128, "n_ctx": 128},
        without=_NO_GPT2_KEYS,
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        published.QWEN3_30B_A3B,
        tiny=_EXPERTS,
        served={**_EXPERTS, "moe_intermediate_size": 32},
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        published.QWEN_1_5_MOE,
        tiny={**_EXPERTS, "shared_expert_intermediate_size": 20},
        served={**_EXPERTS, "hidden_size": 128, "shared_expert_intermediate_size": 20},
        without=("head_dim",),
    ),
    "mixtral": Family(
        "Mixtral",
        published.MIXTRAL_8X7B,
        tiny={"num_local_experts": 4, "intermediate_size": 12},
        served={"num_local_experts": 4},
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        published.DEEPSEEK_V2_LITE,
        tiny=_LATENT,
        served=_SERVED_LATENT,
        without=("head_dim",),
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        published.DEEPSEEK_V3,
        tiny={**_LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
        served={
            **_SERVED_LATENT,
            "q_lora_rank": 40,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
        without=("head_dim", "topk_method", "scoring_func"),  # Not written by transformers 5.
    ),
}


SERVED_VARIANTS: dict[str, tuple[str, Values]] = {
    **{name: (name, {}) for name in FAMILIES if name != "qwen2_moe"},
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama vocabulary without padding": ("llama", {"vocab_size": 128}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 100}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}
"""Families that vLLM serves, and variants that it shards differently: name -> (family, changes)."""


TRAIN_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vocab": "make_vocab_size_divisible_by",
    "layout": "pipeline_model_parallel_layout",
}
INFER_KEYS = {
    "tp": "infer_tensor_parallel_size",
    "pp": "infer_pipeline_parallel_size",
    "ep": "infer_expert_parallel_size",
}
"""Parallel sizes by short name -> key of a section of the configuration."""


def tiny_config(family: str, **changes: Any) -> Values:
    return FAMILIES[family].config({**SIZES, **FAMILIES[family].tiny}, changes)


def served_config(variant: str, **changes: Any) -> Values:
    """Return a config for vLLM's kernels; `variant` is one of SERVED_VARIANTS."""
    family, changed = SERVED_VARIANTS[variant]
    return FAMILIES[family].config(
        {**SERVED_SIZES, **FAMILIES[family].served}, {**changed, **changes}
    )


def write_config(directory: Path, config: Mapping[str, Any]) -> Path:
    """Write a directory with config.json only, as for a model without weights; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    return directory


def read_config(directory: Path) -> Values:
    return json.loads((directory / "config.json").read_text())
