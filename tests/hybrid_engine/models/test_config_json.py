"""config.json as input: published files are accepted, invalid values are refused by their keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from hybrid_engine.models.families import TABLES, read_model
from tests.harness.errors import violated
from tests.harness.values import Values
from tests.zoo import published_configs as published
from tests.zoo.families import FAMILIES, served_config, tiny_config, write_config

YARN = {
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# Spellings that the configs of the zoo do not have.
SPELLINGS: dict[str, Values] = {
    "null for nothing": published.LLAMA_2_7B | {"rope_scaling": None, "pad_token_id": -1},
    "qwen2.5, windows": published.QWEN2_5_0_5B
    | {"use_sliding_window": True, "max_window_layers": 28},
    "qwen3, dynamic": published.QWEN3_8B
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "alpha": 1000.0}},
    "qwen3-moe, more keys": published.QWEN3_30B_A3B | {"num_local_experts": 128, "x": {}},
    "qwen1.5-moe": published.QWEN_1_5_MOE,
    "mixtral, no head_dim": published.MIXTRAL_8X7B | {"head_dim": None, "sliding_window": 4096},
    "deepseek-v2": published.DEEPSEEK_V2,
    "deepseek-v3, YaRN and fp8": published.DEEPSEEK_V3
    | {
        "rope_scaling": YARN,
        "quantization_config": {"quant_method": "fp8"},
        "auto_map": {"AutoConfig": "file.Class"},
    },
    "gemma-3, without defaults": {
        key: value
        for key, value in published.GEMMA_3_1B.items()
        if key not in ("vocab_size", "num_attention_heads")
    },
    "gpt-2, as on the Hub": published.GPT2
    | {"n_inner": None, "task_specific_params": {"text-generation": {}}},
}


@pytest.mark.parametrize("name", [*published.PUBLISHED, *SPELLINGS])
def test_published_configs_are_accepted(name: str) -> None:
    config = (published.PUBLISHED | SPELLINGS)[name]
    assert table_for(json.loads(json.dumps(config))).dims.vocab_size == config.get(
        "vocab_size", 262208
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_transformers_has_the_table_of_the_published_one(
    family: str, tmp_path: Path
) -> None:
    import transformers

    whole = dict(FAMILIES[family].published)
    config_class = getattr(transformers, f"{FAMILIES[family].transformers}Config")
    config_class.from_dict(dict(whole)).save_pretrained(tmp_path)
    assert read_model(tmp_path)[0] == table_for(whole)


LLAMA3 = published.LLAMA_3_8B["rope_scaling"]
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
# (family, changes of config.json, key named by the error)
WRONG: list[tuple[str, Values, str]] = [
    *(("llama", {"hidden_size": value}, "hidden_size")
      for value in ("4", None, [], 0, -1, 1.5, True)),
    *(("llama", {key: 2**80}, key)
      for key in ("vocab_size", "intermediate_size", "rope_theta", "num_hidden_layers")),
    *(("llama", {"num_key_value_heads": heads}, "num_key_value_heads") for heads in (3, 64)),
    ("llama", {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "model"),
    ("llama", {"head_dim": 7}, "head_dim"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps"),
    *(("llama", {"rope_theta": value}, "rope_theta") for value in ("x", float("inf"))),
    ("llama", {"max_position_embeddings": "x"}, "max_position_embeddings"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ("llama", {"eos_token_id": [1, "2"]}, "eos_token_id"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_parameters"),
    ("qwen3", {"layer_types": ["full_attention"]}, "num_hidden_layers"),
    ("qwen3", {"layer_types": ["full_attention", "mamba"]}, "layer_types.1"),
    ("qwen3", {"max_window_layers": -1}, "max_window_layers"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma3", {"rope_parameters": {"full_attention": {"type": "linear"}}}, "rope_parameters"),
    ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("gemma3", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    ("gemma2", {"hidden_activation": []}, "hidden_activation"),
    ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor"),
    *(("gpt2", {"n_head": heads}, "n_head") for heads in (0, 5)),
    ("gpt2", {"n_inner": []}, "n_inner"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("qwen3_moe", {"num_experts": None}, "num_experts"),
    ("qwen3_moe", {"num_experts": 16384, "num_hidden_layers": 1000}, "num_experts"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ("deepseek_v3", {"moe_layer_freq": 0}, "moe_layer_freq"),
    ("deepseek_v3", {"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers"),
    ("deepseek_v3", {"n_group": 3}, "n_group"),
    ("deepseek_v3", {"topk_group": 5}, "n_group"),
    ("deepseek_v3", {"topk_group": 1}, "n_group"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ("deepseek_v3", {"topk_method": "greedy", "scoring_func": "sigmoid"}, "topk_method"),
    ("deepseek_v3", {"topk_method": "noaux_tc", "scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    *((family, {"hidden_act": "gelu"}, "hidden_act")
      for family in ("mixtral", "qwen3_moe", "deepseek_v3")),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    *(("deepseek_v2", {key: 2}, key) for key in ("n_group", "topk_group")),
    ("deepseek_v2", {**GROUPS, "n_group": None}, "n_group"),
    ("deepseek_v2", {**GROUPS, "topk_group": None}, "n_group"),
    ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    *(("llama", {"architectures": value}, "architectures")
      for value in ("Llama", 5, {"a": 1}, [[]], [None])),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "key"), WRONG)
def test_invalid_values_are_refused_by_key(family: str, changes: Values, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table_for(tiny_config(family, **changes))
    assert [finding.key for finding in caught.value.findings] == [key]


def test_synonyms_of_implied_values_are_refused() -> None:
    with violated(ConfigError, ("hidden_act", "unsupported-value")):
        table_for(tiny_config("mixtral", hidden_act="swish"))


LAYERS = {"num_hidden_layers", "hidden_size", "intermediate_size"}
SIZES = LAYERS | {"num_attention_heads", "vocab_size"}
EXPERTS = SIZES | {"num_experts_per_tok", "moe_intermediate_size"}
LATENT = {"n_routed_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
REQUIRED = {
    **dict.fromkeys(TABLES, SIZES),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), EXPERTS | LATENT),
    "GPT2LMHeadModel": {"n_layer", "n_embd", "n_head", "vocab_size"},
    "Gemma3ForCausalLM": LAYERS,
    "MixtralForCausalLM": SIZES | {"num_local_experts", "num_experts_per_tok"},
    "Qwen2MoeForCausalLM": EXPERTS | {"num_experts", "shared_expert_intermediate_size"},
    "Qwen3MoeForCausalLM": EXPERTS | {"num_local_experts"},
}


@pytest.mark.parametrize("architecture", REQUIRED)
def test_every_missing_required_key_is_named(architecture: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table_for({"architectures": [architecture]})
    assert {finding.key for finding in caught.value.findings} == REQUIRED[architecture]


def test_all_errors_are_reported_at_once_with_the_file(tmp_path: Path) -> None:
    changes = {
        "hidden_size": "4",
        "vocab_size": 0,
        "rope_scaling": {"factor": 0, "rope_type": 5},
        "hidden_act": 1,
    }
    write_config(tmp_path, tiny_config("llama", **changes))
    with pytest.raises(ConfigError) as caught:
        read_model(tmp_path)
    keys = {"hidden_size", "vocab_size", "rope_scaling.factor", "hidden_act"}
    assert {finding.key for finding in caught.value.findings} == keys
    for finding in caught.value.findings:
        assert f"in {tmp_path / 'config.json'}" in finding.problem
        assert finding.remedy


def test_null_is_the_default_where_no_model_has_none() -> None:
    for family, key in (("llama", "rope_theta"), ("glm4", "partial_rotary_factor")):
        config = {name: value for name, value in tiny_config(family).items() if name != key}
        assert table_for({**config, key: None}) == table_for(config)


def test_keys_that_no_table_reads_are_ignored() -> None:
    odd = {
        "num_labels": -1,
        "id2label": [[[]]],
        "hidden_activation": [],
        "layer_types": 5,
        "n_head": "x",
    }
    assert table_for(served_config("llama") | odd) == table_for(served_config("llama"))
