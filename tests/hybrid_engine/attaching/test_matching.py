"""The model that Megatron's arguments describe is compared with the Hugging Face config, flag by flag."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn.functional import gelu, silu

from hybrid_engine.attaching.matching import _DEFAULTS, LIVE, model_mismatches, vocabulary_mismatches
from hybrid_engine.models import table_for
from tests.hybrid_engine.megatron_script.megatron_arguments import ARGS, LLAMA, transformer_config
from tests.zoo.families import served_config


def mismatches(
    hf: dict[str, Any], config: dict[str, Any] | None = None, args: dict[str, Any] | None = None
) -> dict[str, str]:
    """Flag -> what is wrong, of a model `hf` and a Megatron model that is LLAMA but for `config` and `args`."""
    found = model_mismatches(
        table_for({**LLAMA, **hf}), Namespace(**{**ARGS, **(args or {})}), transformer_config(**(config or {}))
    )
    return {violation.key: violation.problem for violation in found}


def test_the_same_model_matches() -> None:
    assert mismatches({}) == {}


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
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"--use-rope-scaling"}),
    ],
)
def test_every_difference_is_under_its_flag(hf: dict[str, Any], flags: set[str]) -> None:
    assert set(mismatches(hf)) == flags


def test_differences_of_live_objects_are_under_their_fields() -> None:
    hf = {"rms_norm_eps": 1e-3, "tie_word_embeddings": True, "max_position_embeddings": 4, "rope_theta": 5e5}
    args = Namespace(**{**ARGS, "padded_vocab_size": 1})
    table = table_for({**LLAMA, **hf})
    found = model_mismatches(table, args, transformer_config(), LIVE) + vocabulary_mismatches(table, args, LIVE)
    assert {violation.key for violation in found} == {
        "TransformerConfig.layernorm_epsilon",
        "GPTModel.rotary_base",
        "GPTModel.share_embeddings_and_output_weights",
        "GPTModel.vocab_size",
    }


def test_differences_of_megatron_alone_are_found() -> None:
    found = mismatches({}, {"qk_layernorm": True, "activation_func": gelu, "gated_linear_unit": False})
    assert set(found) == {"--qk-layernorm", "--swiglu", next(flag for flag in found if "--squared-relu" in flag)}
    assert set(mismatches({}, args={"mtp_num_layers": 1, "rotary_percent": 0.5})) == {
        "--mtp-num-layers",
        "--rotary-percent",
    }


def test_megatrons_own_rope_scaling_is_llamas() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert mismatches({"rope_scaling": scaling}, args={"use_rope_scaling": True}) == {}
    assert "factor=32.0" in mismatches({"rope_scaling": {**scaling, "factor": 32.0}})["--use-rope-scaling"]


def test_fused_bias_and_gelu_is_the_approximation_by_tanh() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2}
    table = table_for({**gpt2, "vocab_size": 64, "n_positions": 128})
    values = {**_DEFAULTS, **table.transformer, "activation_func": gelu, "softmax_scale": None}
    args = Namespace(
        **{**ARGS, "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False}
    )
    assert model_mismatches(table, args, SimpleNamespace(**values, bias_activation_fusion=True)) == []
    found = model_mismatches(table, args, SimpleNamespace(**values, bias_activation_fusion=False))
    assert [violation.problem for violation in found] == [
        "Megatron has gelu, the Hugging Face config asks for gelu_tanh"
    ]


def test_balancing_of_experts_is_trainings_own_affair() -> None:
    table = table_for(served_config("qwen3_moe"))
    values = {**_DEFAULTS, **table.transformer, "activation_func": silu, "bias_activation_fusion": True}
    own = {"moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": None, "ffn_hidden_size": 7}
    args = Namespace(**{**ARGS, "rotary_base": table.gpt["rotary_base"]})
    args.untie_embeddings_and_output_weights = not table.dims.tied_embeddings
    every_layer = SimpleNamespace(**{**values, **own, "moe_layer_freq": 1})
    assert model_mismatches(table, args, every_layer) == []
    fewer = SimpleNamespace(**{**values, "moe_layer_freq": 2, "num_moe_experts": 3})
    assert {found.key for found in model_mismatches(table, args, fewer)} == {"--moe-layer-freq", "--num-experts"}


def test_a_pattern_says_how_many_layers_there_are() -> None:
    """Megatron counts attention and MLP apart, and sets these itself; `config` compares the pattern with the model."""
    table = table_for(LLAMA)
    config = transformer_config(num_layers=2 * table.dims.num_layers, moe_layer_freq=1)
    with_pattern = Namespace(**ARGS, hybrid_layer_pattern="*-" * table.dims.num_layers)
    assert model_mismatches(table, with_pattern, config) == []
    assert [found.key for found in model_mismatches(table, Namespace(**ARGS), config)] == ["--num-layers"]


def test_what_megatrons_script_cannot_compute_is_named() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
    found = mismatches({**qwen, "sliding_window": 16, "max_window_layers": 0}, {"add_qkv_bias": True})
    assert "windows" in found["model"]
    assert "Megatron's GPT model does not compute this" in found["model"]


def test_the_padded_vocabulary_must_hold_the_models() -> None:
    table = table_for(LLAMA)
    assert vocabulary_mismatches(table, Namespace(padded_vocab_size=table.dims.vocab_size)) == []
    (found,) = vocabulary_mismatches(table, Namespace(padded_vocab_size=8))
    assert f"8 rows after padding, the Hugging Face config has {table.dims.vocab_size}" in str(found)
