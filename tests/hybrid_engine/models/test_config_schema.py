"""config.json is data from outside: what is published is accepted, what cannot be is refused by its own keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from hybrid_engine.models.config_schema import ACTIVATIONS, ROPE_TYPES
from hybrid_engine.models.families import TABLES, read_model
from tests.zoo import published_configs as published
from tests.zoo.families import FAMILIES, served_config, tiny_config, write_config

# As others than the configs of the zoo spell it.
SPELLINGS: dict[str, dict[str, Any]] = {
    "llama-2, null for nothing": published.LLAMA_2_7B | {"rope_scaling": None, "pretraining_tp": 1, "pad_token_id": -1},
    "llama-2, linear scaling by its old name": published.LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 4}},
    "llama-3, transformers 5": {
        **{key: value for key, value in published.LLAMA_3_8B.items() if not key.startswith(("rope", "torch_dtype"))},
        "rope_parameters": {**published.LLAMA_3_8B["rope_scaling"], "rope_theta": 500000.0},
        "dtype": "bfloat16",
        "head_dim": 128,
        "mlp_bias": False,
    },
    "llama-3.2, 24 heads of 128": published.LLAMA_3_8B
    | {"hidden_size": 3072, "num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True},
    "qwen2.5, longer by YaRN": published.QWEN2_5_0_5B
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "qwen2.5, windows": published.QWEN2_5_0_5B | {"use_sliding_window": True, "max_window_layers": 28},
    "qwen3, layer types": published.QWEN3_8B | {"layer_types": ["full_attention"] * 36, "use_sliding_window": None},
    "qwen3, dynamic": published.QWEN3_8B | {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "alpha": 1000.0}},
    "qwen3-moe, more keys": published.QWEN3_30B_A3B | {"num_local_experts": 128, "x": {}},
    "mixtral, no head_dim": published.MIXTRAL_8X7B | {"head_dim": None, "sliding_window": 4096},
    "deepseek-v3, YaRN and fp8": published.DEEPSEEK_V3
    | {
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 4096, "type": "yarn"},
        },
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "ep_size": 1,
    },
    "gemma-2, layer types": published.GEMMA_2_2B
    | {"layer_types": ["sliding_attention", "full_attention"] * 13, "cache_implementation": "hybrid"},
    "gemma-3, transformers 5": {
        **{key: value for key, value in published.GEMMA_3_1B.items() if not key.startswith("rope")},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
        "_sliding_window_pattern": 6,
        "use_bidirectional_attention": False,
    },
    "gpt-2, as on the Hub": published.GPT2
    | {"n_inner": None, "task_specific_params": {"text-generation": {"do_sample": True}}, "summary_type": "cls_index"},
}


@pytest.mark.parametrize("name", [*published.PUBLISHED, *SPELLINGS, "qwen1.5-moe", "deepseek-v2-236b"])
def test_published_configs_are_accepted(name: str) -> None:
    others = {"qwen1.5-moe": published.QWEN_1_5_MOE, "deepseek-v2-236b": published.DEEPSEEK_V2}
    config = (published.PUBLISHED | SPELLINGS | others)[name]
    assert table_for(json.loads(json.dumps(config))).dims.vocab_size == config["vocab_size"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_accepted(family: str, tmp_path: Path) -> None:
    """By the version that is installed: its spelling, its defaults."""
    import transformers

    config_class = getattr(transformers, f"{FAMILIES[family].transformers}Config")
    for values in (FAMILIES[family].published, tiny_config(family)):
        config_class.from_dict(dict(values)).save_pretrained(tmp_path)
        assert read_model(tmp_path)[0] == table_for(values)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_means_what_it_means_to_transformers(family: str) -> None:
    """And so to vLLM, which reads config.json by transformers' classes. Neither computes layers for multi-token
    prediction: of these a model has what the file says."""
    import transformers

    config_class = getattr(transformers, f"{FAMILIES[family].transformers}Config")
    for whole in (dict(FAMILIES[family].published), tiny_config(family)):
        for key in whole.keys() - {"architectures", "num_nextn_predict_layers"}:
            config = {name: value for name, value in whole.items() if name != key}
            try:
                table = table_for(config)
            except ConfigError:
                continue
            filled = config_class.from_dict(dict(config)).to_dict()
            assert table == table_for({**filled, "architectures": config["architectures"]}), f"without {key}"


@pytest.mark.slow
def test_names_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ACT2FN) <= ACTIVATIONS
    assert {"default", *ROPE_INIT_FUNCTIONS} <= ROPE_TYPES


LLAMA3 = published.LLAMA_3_8B["rope_scaling"]
LINEAR, YARN = {"type": "linear"}, {"type": "yarn", "factor": 40}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
# family, what is changed, the key that is named, and a word of what is said
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    *(("llama", {"hidden_size": value}, "hidden_size", "Input should") for value in ("4", None, [], 0, -1, 1.5, True)),
    *(("llama", {key: 2**80}, key, "less than or equal") for key in ("vocab_size", "intermediate_size", "rope_theta")),
    ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers", "less than or equal to 1000"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", "3 key/value heads do not divide 4"),
    ("llama", {"num_key_value_heads": 64}, "num_key_value_heads", "64 key/value heads do not divide 4"),
    ("llama", {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "num_attention_heads", "24"),
    ("llama", {"head_dim": 7}, "head_dim", "even"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps", "greater than or equal"),
    ("llama", {"rope_theta": "x"}, "rope_theta", "valid number"),
    ("llama", {"rope_theta": float("inf")}, "rope_theta", "finite"),
    ("llama", {"max_position_embeddings": "x"}, "max_position_embeddings", "valid integer"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings", "valid boolean"),
    ("llama", {"eos_token_id": [1, "2"]}, "eos_token_id", "token id"),
    ("llama", {"hidden_act": "silux"}, "hidden_act", "did you mean silu"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling", "keys and values"),
    ("llama", {"rope_scaling": {"rope_type": "lama3"}}, "rope_scaling.rope_type", "did you mean llama3"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "missing"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor", "greater than 0"),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor", "not above"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_parameters", "only Gemma-3"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types", "1 entries, but num_hidden_layers is 2"),
    ("qwen3", {"layer_types": ["full_attention", "mamba"]}, "layer_types.1", "unknown name"),
    ("qwen3", {"max_window_layers": -1}, "max_window_layers", "greater than or equal"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern", "greater than or equal"),
    ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters", "kind of layer"),
    ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}, "rope_parameters.sliding_attention.factor", "mis"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "greater than 0"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping", "greater than 0"),
    ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor", "less than or equal"),
    ("gpt2", {"n_head": 0}, "n_head", "greater than or equal"),
    ("gpt2", {"n_head": 5}, "n_head", "do not divide n_embd"),
    ("gpt2", {"n_inner": []}, "n_inner", "valid integer"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok", "5 of 4 experts"),
    ("qwen3_moe", {"num_experts": None}, "num_experts", "is missing"),
    ("qwen3_moe", {"num_experts": 16384, "num_hidden_layers": 1000}, "num_experts", "more than 100,000"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step", "greater than or equal"),
    ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers", "names layers [2]"),
    ("qwen3_moe", {"moe_intermediate_size": "4"}, "moe_intermediate_size", "valid integer"),
    ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size", "valid integer"),
    ("deepseek_v3", {"moe_layer_freq": 0}, "moe_layer_freq", "greater than or equal"),
    ("deepseek_v3", {"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers", "less than or equal"),
    ("deepseek_v3", {"n_group": 3}, "n_group", "3 groups do not divide 8 experts"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group", "5 of 4 groups"),
    ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok", "1 of 4 groups have 2"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim", "pairs"),
    ("deepseek_v3", {"rope_scaling": YARN}, "rope_scaling.original_max_position_embeddings", "is missing"),
    ("deepseek_v2", {**GROUPS, "n_group": None}, "n_group", "is missing"),
    ("deepseek_v2", {**GROUPS, "topk_group": None}, "topk_group", "is missing, with 4 groups"),
    ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank", "greater than or equal"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "key", "says"), WRONG)
def test_what_cannot_be_is_refused(family: str, changes: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table_for(tiny_config(family, **changes))
    (found,) = caught.value.findings
    assert found.key == key
    assert says in str(found)


@pytest.mark.parametrize("architecture", sorted(TABLES))
def test_each_required_key_is_named_where_it_is_missing(architecture: str) -> None:
    required = {name for name, each in TABLES[architecture].schema.model_fields.items() if each.is_required()}
    with pytest.raises(ConfigError) as caught:
        table_for({"architectures": [architecture]})
    assert {found.key for found in caught.value.findings} == required


def test_everything_wrong_is_said_at_once_with_the_file(tmp_path: Path) -> None:
    changes = {"hidden_size": "4", "vocab_size": 0, "rope_scaling": {"factor": None, "rope_type": 5}, "hidden_act": "x"}
    write_config(tmp_path, tiny_config("llama", **changes))
    with pytest.raises(ConfigError) as caught:
        read_model(tmp_path)
    assert {found.key for found in caught.value.findings} == {
        "hidden_size", "vocab_size", "rope_scaling.rope_type", "hidden_act"
    }  # fmt: skip
    assert all(f"in {tmp_path / 'config.json'}" in found.problem and found.remedy for found in caught.value.findings)


@pytest.mark.parametrize("value", ["LlamaForCausalLM", 5, {"a": 1}, [["LlamaForCausalLM"]], [None]])
def test_architectures_are_names(value: Any) -> None:
    with pytest.raises(ConfigError, match="architectures: Input should be a list of names"):
        table_for({**served_config("llama"), "architectures": value})


def test_what_no_table_reads_is_let_through() -> None:
    odd = {"num_labels": -1, "id2label": [[[]]], "rope_theta": 10000, "layer_types": 5, "n_head": "x"}
    assert table_for(tiny_config("llama", **odd)) == table_for(tiny_config("llama"))
