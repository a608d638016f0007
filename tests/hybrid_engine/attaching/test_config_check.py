"""Megatron's arguments are compared with the Hugging Face config, flag by flag."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import MLATransformerConfig
from torch.nn.functional import gelu

from hybrid_engine.attaching.config_check import (
    BEYOND_MEGATRON,
    FLAGS,
    LIVE,
    model_mismatches,
    vocabulary_mismatches,
)
from hybrid_engine.backends.megatron.live_attention import latent_attention, rotary_of
from hybrid_engine.compute_check.attention import Attention
from hybrid_engine.models import table_for
from megatron_patches.refused_fields import FUNCTION_FIELDS
from tests.hybrid_engine.megatron_script.megatron_arguments import ARGS, LLAMA, transformer_config
from tests.zoo.families import served_config
from tests.zoo.published_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, LLAMA_3_8B


def mismatches(
    hf: dict[str, Any], config: dict[str, Any] | None = None, args: dict[str, Any] | None = None
) -> dict[str, str]:
    """Return flag -> problem for model `hf` and a Megatron model: LLAMA with changes."""
    violations = model_mismatches(
        table_for({**LLAMA, **hf}),
        Namespace(**{**ARGS, **(args or {})}),
        transformer_config(**(config or {})),
    )
    return {violation.key: violation.problem for violation in violations}


def keys_of_mismatches(
    hf: dict[str, Any], config: dict[str, Any] | None = None, args: dict[str, Any] | None = None
) -> set[str]:
    """Return the keys of mismatches of model `hf` with its Megatron configuration, with changes."""
    table = table_for(hf)
    described = {
        "rotary_base": table.gpt.get("rotary_base"),
        "mtp_num_layers": table.dims.num_mtp_layers,
        "untie_embeddings_and_output_weights": not table.dims.tied_embeddings,
    }
    violations = model_mismatches(
        table,
        Namespace(**{**ARGS, **described, **(args or {})}),
        transformer_config(hf, **(config or {})),
    )
    return {violation.key for violation in violations}


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute YaRN's angles on the CPU, as the patches for Megatron without a GPU do."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


LLAMA3 = LLAMA_3_8B["rope_scaling"]
FEW = {"num_hidden_layers": 4, "n_routed_experts": 16}
FACTOR_40 = {
    "rope_type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_slow": 1,
}
V2_LITE = {
    **DEEPSEEK_V2_LITE,
    **FEW,
    "rope_scaling": {**FACTOR_40, "beta_fast": 32, "mscale": 0.707, "mscale_all_dim": 0.707},
}
V3 = {
    **DEEPSEEK_V3,
    **FEW,
    "rope_scaling": {**FACTOR_40, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
}
MODELS = {
    "llama": LLAMA,
    "mixtral": served_config("mixtral"),
    "qwen3_moe": served_config("qwen3_moe"),
    "deepseek_v3": served_config("deepseek_v3"),
    "deepseek_v3 with YaRN": V3,
}
WITH_EFFECT = {
    "rotary_percent": 0.5,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 4,
}
"""Values for settings for which a small change has no effect."""


@pytest.mark.parametrize("model", MODELS)
def test_the_same_model_matches(model: str) -> None:
    assert keys_of_mismatches(MODELS[model]) == set()


def changed_value(value: Any) -> Any:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return (value or 0) + 3
    return {bool: lambda: not value, list: list, str: lambda: "another"}.get(
        type(value), lambda: gelu
    )()


COMPUTED = [
    name
    for name in FUNCTION_FIELDS
    if hasattr(MLATransformerConfig, name) and not name.startswith(("heterogeneous", "per_block"))
]


@pytest.mark.parametrize("field", COMPUTED)
def test_every_field_of_the_computation_is_compared(field: str) -> None:
    """Change it in every model that has it; at least one change must be reported.

    Heterogeneous models are refused altogether.
    """
    reported: set[str] = set()
    for hf in MODELS.values():
        config = transformer_config(hf)
        if hasattr(config, field):
            value = WITH_EFFECT.get(field) or changed_value(getattr(config, field))
            reported |= keys_of_mismatches(hf, {field: value})
    assert FLAGS.setting(field) in reported


@pytest.mark.parametrize("model", MODELS)
def test_settings_of_the_tables_are_compared(model: str) -> None:
    in_training_only = {"moe_router_dtype", "moe_router_load_balancing_type"}
    assert table_for(MODELS[model]).transformer.keys() - in_training_only <= set(COMPUTED)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama", {"moe_router_topk": 1, "hidden_dropout": 0.0, "fp32_residual_connection": True}),
        ("qwen3_moe", {"moe_router_topk_scaling_factor": 1.0, "moe_router_num_groups": 4}),
        (
            "qwen3_moe",
            {"moe_router_num_groups": 2, "moe_router_group_topk": 2, "moe_z_loss_coeff": 1e-3},
        ),
        ("deepseek_v3", {"moe_router_pre_softmax": True, "moe_router_bias_update_rate": 0.0}),
        (
            "deepseek_v3",
            {"rotary_scaling_factor": 1.0, "mscale": 0.5},
        ),  # what Megatron's scripts pass
    ],
)
def test_settings_that_compute_the_same_are_accepted(model: str, config: dict[str, Any]) -> None:
    assert keys_of_mismatches(MODELS[model], config) == set()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "long_factor": [1.0] * 16,
            "short_factor": [1.0] * 16,
        },
    ],
)
def test_unsupported_rotary_scaling_is_refused(rope: dict[str, Any]) -> None:
    assert keys_of_mismatches({**LLAMA, "rope_scaling": rope}) == {"model"}
    table = table_for({**LLAMA, "rope_scaling": rope})
    live = Namespace(**ARGS, attention=attention())
    assert {
        violation.key for violation in model_mismatches(table, live, transformer_config(), LIVE)
    } == {"model"}


MOONLIGHT = {
    **DEEPSEEK_V3,
    **FEW,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 50000.0,
    "num_nextn_predict_layers": 0,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    **FEW,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 50000.0,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        **FACTOR_40,
        "factor": 32,
        "beta_fast": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
LATENT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Megatron-Bridge (verl, NeMo-RL): kv_channels is the head_dim of transformers' class.
    "DeepSeek-V3, converted": (V3, {"kv_channels": 64}, {}),
    "DeepSeek-V3, without --kv-channels": (V3, {"kv_channels": 56}, {}),
    "DeepSeek-V3, without its MTP layer": (
        V3,
        {"kv_channels": 64, "mtp_num_layers": None},
        {"mtp_num_layers": None},
    ),
    "DeepSeek-V2-Lite, --kv-channels 16": (V2_LITE, {"kv_channels": 16}, {}),
    # Megatron's default is YaRN, which has no effect with factor 1.
    "Moonlight": (
        MOONLIGHT,
        {
            "kv_channels": 128,
            "rope_type": "yarn",
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        {},
    ),
    "Moonlight, converted": (
        MOONLIGHT,
        {
            "kv_channels": 64,
            "rope_type": "yarn",
            "rotary_scaling_factor": 1.0,
            "mscale_all_dim": 1.0,
        },
        {},
    ),
    "Kimi-K2": (KIMI_K2, {"kv_channels": 64}, {}),
}


@pytest.mark.parametrize("name", LATENT)
def test_flags_of_other_projects_are_accepted_for_latent_attention(name: str) -> None:
    """The last case leaves a flag at Megatron's default."""
    hf, config, args = LATENT[name]
    assert keys_of_mismatches(hf, config, args) == set()


def test_differences_of_latent_attention_are_reported() -> None:
    for field, value in {
        "rotary_scaling_factor": 32,
        "mscale_all_dim": 0.5,
        "rotary_base": 5e4,
    }.items():
        assert keys_of_mismatches(V3, {"kv_channels": 64, field: value}) == {FLAGS.setting(field)}
    assert keys_of_mismatches(MOONLIGHT, {"rope_type": "yarn", "rotary_scaling_factor": 4.0}) >= {
        "--rope-type"
    }
    # These settings only matter together.
    unscaled = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    assert keys_of_mismatches(V3, unscaled) >= {"--rope-type", "--rotary-scaling-factor"}
    assert keys_of_mismatches(V3, {"v_head_dim": 64}) == {"--v-head-dim"}


def test_remedies_name_flags_of_the_parser() -> None:
    table = table_for(KIMI_K2)
    config = transformer_config(KIMI_K2, beta_fast=32, qk_layernorm=False)
    args = Namespace(**{**ARGS, "rotary_base": 50000})
    names = replace(FLAGS, flags=frozenset({"--qk-layernorm", "--rotary-scaling-factor"}))
    by_key = {
        violation.key: violation.remedy
        for violation in model_mismatches(table, args, config, names)
    }
    assert by_key == {
        "--qk-layernorm": "Make them agree",
        "TransformerConfig.beta_fast": "No flag of this Megatron sets it: change "
        "config.json, or train through "
        "ActorHybridWorker",
    }


def test_live_latent_attention_overrides_its_settings() -> None:
    """A module can differ from its configuration, and a configuration from the built model."""
    table = table_for(V3)
    config = transformer_config(V3, kv_channels=64)
    built = latent_attention(config)
    args = Namespace(**{**ARGS, "mtp_num_layers": 1, "attention": {0: built, 1: built}})
    assert model_mismatches(table, args, config, LIVE) == []
    args.attention[1] = replace(built, scale=2 * built.scale)
    (violation,) = model_mismatches(table, args, config, LIVE)
    assert violation.key == "MLASelfAttention, the scale of attention scores"


@pytest.mark.parametrize("unread", [{"scale": None}, {"scale": None, "rotary": None}])
def test_settings_replace_unreadable_live_latent_attention(unread: dict[str, None]) -> None:
    for mscale, keys in {1.0: [], 0.5: ["TransformerConfig.mscale_all_dim"]}.items():
        config = transformer_config(V3, kv_channels=64, mscale_all_dim=mscale)
        live = replace(latent_attention(config), **unread)
        args = Namespace(**{**ARGS, "mtp_num_layers": 1, "attention": {0: live}})
        assert [
            violation.key for violation in model_mismatches(table_for(V3), args, config, LIVE)
        ] == keys


def test_an_unsupported_model_is_refused() -> None:
    assert keys_of_mismatches(served_config("deepseek_v3", norm_topk_prob=False)) == {"model"}


def attention(**changes: Any) -> dict[int, Attention]:
    """Return the attention of a live model with LLAMA's heads, as `model_arguments` reads it."""
    settings = {
        "kv_channels": LLAMA["head_dim"],
        "rotary_percent": 1.0,
        "use_cpu_initialization": True,
        **changes,
    }
    return {0: Attention(LLAMA["head_dim"] ** -0.5, rotary=rotary_of(RotaryEmbedding(**settings)))}


def live_mismatches(rope: dict[str, Any] | None, **changes: Any) -> list[str]:
    """Return mismatches of a live Llama: `rope` in config.json, `changes` of its rotary
    embedding."""
    args = Namespace(**ARGS, attention=attention(**changes))
    violations = model_mismatches(
        table_for({**LLAMA, "rope_scaling": rope}), args, transformer_config(), LIVE
    )
    return [str(violation) for violation in violations]


def test_rotary_frequencies_of_the_live_model_are_compared() -> None:
    """Llama 3.2 has factor 32; in Megatron's models no other attribute has the factor."""
    llama32 = {**LLAMA3, "factor": 32.0}
    linear = {"rope_type": "linear", "factor": 8.0}
    assert live_mismatches(llama32, rope_scaling=True, rope_scaling_factor=32.0) == []
    assert live_mismatches(LLAMA3, rope_scaling=True) == []
    assert live_mismatches(linear, seq_len_interpolation_factor=8) == []
    wrong = [
        live_mismatches(LLAMA3, rope_scaling=True, rope_scaling_factor=32.0),
        live_mismatches(llama32, rope_scaling=True),
        live_mismatches(llama32),
        live_mismatches(None, seq_len_interpolation_factor=8),
        live_mismatches(None, rotary_base=20000),
        live_mismatches(None, rotary_percent=0.5),
    ]
    assert all("GPTModel.rotary_pos_emb: " in violation for (violation,) in wrong)
    assert "rotary frequency 15 is 2.22285e-05 radians per token in Megatron" in wrong[1][0]
    expected = (
        "asks for 5.55712e-06 radians per token (rotary scaling: "
        "RotaryScaling(rope_type='llama3', factor=32.0"
    )
    assert expected in wrong[1][0]


def test_unreadable_rotary_frequencies_are_reported() -> None:
    args = Namespace(**ARGS, attention={0: Attention(1.0, rotary=rotary_of(SimpleNamespace()))})
    (violation,) = model_mismatches(table_for(LLAMA), args, transformer_config(), LIVE)
    assert violation.key == BEYOND_MEGATRON


@pytest.mark.parametrize(
    ("hf", "flags"),
    [
        ({"num_hidden_layers": 7}, {"--num-layers"}),
        ({"intermediate_size": 32}, {"--ffn-hidden-size"}),
        ({"num_key_value_heads": 1}, {"--group-query-attention --num-query-groups"}),
        ({"rms_norm_eps": 1e-3}, {"--norm-epsilon"}),
        ({"attention_bias": True, "mlp_bias": True}, {"--disable-bias-linear", "--add-qkv-bias"}),
        ({"rope_theta": 5e5}, {"--rotary-base"}),
        ({"tie_word_embeddings": True}, {"--untie-embeddings-and-output-weights"}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"--rotary-seq-len-interpolation-factor"},
        ),
    ],
)
def test_differences_are_reported_under_their_flags(hf: dict[str, Any], flags: set[str]) -> None:
    assert set(mismatches(hf)) == flags


def test_differences_of_live_objects_are_reported_under_their_fields() -> None:
    hf = {
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4,
        "rope_theta": 5e5,
    }
    args = Namespace(**{**ARGS, "padded_vocab_size": 1})
    table = table_for({**LLAMA, **hf})
    violations = model_mismatches(table, args, transformer_config(), LIVE) + vocabulary_mismatches(
        table, args, LIVE
    )
    assert {violation.key for violation in violations} == {
        "TransformerConfig.layernorm_epsilon",
        "GPTModel.rotary_base",
        "GPTModel.share_embeddings_and_output_weights",
        "GPTModel.vocab_size",
    }


def test_settings_of_megatron_alone_are_compared() -> None:
    flags = set(
        mismatches({}, {"qk_layernorm": True, "activation_func": gelu, "gated_linear_unit": False})
    )
    assert flags == {
        "--qk-layernorm",
        "--swiglu",
        next(flag for flag in flags if "--squared-relu" in flag),
    }
    assert set(mismatches({}, args={"mtp_num_layers": 1, "rotary_percent": 0.5})) == {
        "--mtp-num-layers",
        "--rotary-percent",
    }


def test_megatrons_rope_scaling_matches_llama3() -> None:
    assert mismatches({"rope_scaling": LLAMA3}, args={"use_rope_scaling": True}) == {}
    assert (
        "factor=32.0"
        in mismatches({"rope_scaling": {**LLAMA3, "factor": 32.0}})["--use-rope-scaling"]
    )


def test_fused_bias_and_gelu_matches_gelu_tanh() -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 2,
        "n_layer": 2,
    }
    gpt2 |= {"vocab_size": 64, "n_positions": 128}
    table = table_for(gpt2)
    config = transformer_config(gpt2, activation_func=gelu, softmax_scale=None)
    args = Namespace(
        **{
            **ARGS,
            "position_embedding_type": "learned_absolute",
            "untie_embeddings_and_output_weights": False,
        }
    )
    assert model_mismatches(table, args, config) == []
    config.bias_activation_fusion = False
    violations = model_mismatches(table, args, config)
    assert [violation.problem for violation in violations] == [
        "Megatron has gelu, the Hugging Face config asks for gelu_tanh"
    ]


def test_settings_of_expert_balancing_are_not_compared() -> None:
    hf = served_config("qwen3_moe")
    table = table_for(hf)
    ignored = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_dtype": None,
        "ffn_hidden_size": 7,
    }
    args = Namespace(**{**ARGS, "rotary_base": table.gpt["rotary_base"]})
    args.untie_embeddings_and_output_weights = not table.dims.tied_embeddings
    every_layer = transformer_config(hf, **ignored, moe_layer_freq=1)
    assert model_mismatches(table, args, every_layer) == []
    fewer = transformer_config(hf, moe_layer_freq=2, num_moe_experts=3)
    assert {violation.key for violation in model_mismatches(table, args, fewer)} == {
        "--moe-layer-freq",
        "--num-experts",
    }


def test_a_hybrid_pattern_replaces_the_number_of_layers() -> None:
    """Megatron counts attention and MLP layers; `config` compares the pattern with the model."""
    table = table_for(LLAMA)
    config = transformer_config(num_layers=2 * table.dims.num_layers, moe_layer_freq=1)
    with_pattern = Namespace(**ARGS, hybrid_layer_pattern="*-" * table.dims.num_layers)
    assert model_mismatches(table, with_pattern, config) == []
    assert [violation.key for violation in model_mismatches(table, Namespace(**ARGS), config)] == [
        "--num-layers"
    ]


def test_sliding_windows_are_refused_in_a_script() -> None:
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
    }
    violations = mismatches(
        {**qwen, "sliding_window": 16, "max_window_layers": 0}, {"add_qkv_bias": True}
    )
    assert "windows" in violations["model"]
    assert "Megatron's GPT model does not compute this" in violations["model"]


def test_the_padded_vocabulary_must_cover_the_models() -> None:
    table = table_for(LLAMA)
    assert vocabulary_mismatches(table, Namespace(padded_vocab_size=table.dims.vocab_size)) == []
    (violation,) = vocabulary_mismatches(table, Namespace(padded_vocab_size=8))
    assert f"8 rows after padding, the Hugging Face config has {table.dims.vocab_size}" in str(
        violation
    )
