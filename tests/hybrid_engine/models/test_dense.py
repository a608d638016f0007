"""Tables of the dense families against what transformers writes: checkpoints, and configs of both its ages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.models import table_for
from hybrid_engine.models.blocks import POST_NORM_NAMES
from hybrid_engine.models.variants import RotaryScaling
from tests.zoo.families import SIZES, read_config, tiny_config
from tests.zoo.tiny_models import read_canonical, save_model

KEYS_OF_SIZES = ("num_hidden_layers", "num_key_value_heads")
UNTIED = {"tie_word_embeddings": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", TIED),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama mlp bias": ("llama", {"mlp_bias": True}),
    "llama all biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama no head_dim": ("llama", {"head_dim": None}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 11}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", TIED),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", TIED),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
    "llama 3.1": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "glm": ("glm", {}),
    "glm, no bias, tied": ("glm", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4, one kv head": ("glm4", {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", {}),
    "gemma2, untied": ("gemma2", UNTIED),
    "gemma2, biases": ("gemma2", {"attention_bias": True}),
    "gemma3": ("gemma3", {}),
    "gemma3, seven layers": ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", UNTIED),
    "gpt2, inner size by default": ("gpt2", {"n_inner": None}),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return save_model(tmp_path_factory.mktemp("model"), family, **overrides)


def test_names_and_shapes_are_those_on_disk(checkpoint: Path) -> None:
    on_disk = {name: tuple(tensor.shape) for name, tensor in read_canonical(checkpoint).items()}
    assert table_for(read_config(checkpoint)).shapes == on_disk


def test_sizes_are_those_of_the_config(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    layers, kv_heads = ("n_layer", "n_head") if config["model_type"] == "gpt2" else KEYS_OF_SIZES
    dims = table_for(config).dims
    assert dims.num_layers == config[layers]
    assert dims.vocab_size == config["vocab_size"]
    assert dims.num_kv_heads == config[kv_heads]
    assert dims.tied_embeddings == config["tie_word_embeddings"]


def test_every_canonical_tensor_has_a_megatron_parameter(checkpoint: Path) -> None:
    """In the names of both layer specs; what a rule speaks of and the model has not is no fault of the rule."""
    table = table_for(read_config(checkpoint))
    packed = {pattern for rule in table.rules for pattern in rule.packing.tensors()}
    spoken_of = {pattern.format(layer=layer) for pattern in packed for layer in range(table.dims.num_layers)}
    assert table.shapes.keys() <= spoken_of


def test_no_name_has_two_rules(checkpoint: Path) -> None:
    names = [name for rule in table_for(read_config(checkpoint)).rules for name in rule.names]
    assert len(names) == len(set(names))


def test_everything_is_built(checkpoint: Path) -> None:
    """But for biases in only one of attention and MLP."""
    config = read_config(checkpoint)
    in_attention = config.get("attention_bias", False) and config["model_type"] in ("llama", "qwen3", "gemma2")
    assert len(table_for(config).not_built) == (in_attention != config.get("mlp_bias", False))


def test_both_layer_specs_give_the_same_rule() -> None:
    table = table_for({"architectures": ["LlamaForCausalLM"], **SIZES})
    pairs = [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ]
    for local, transformer_engine in pairs:
        matches = [table.match(f"decoder.layers.11.{name}") for name in (local, transformer_engine)]
        assert matches[0] == matches[1]
        assert matches[0].indices == {"layer": 11}
    assert table.match("decoder.final_layernorm.weight").indices == {}
    for unknown in (
        "decoder.layers.0.unheard_of.weight",
        "decoder.layers.x.input_layernorm.weight",
        "input_layernorm.weight",
    ):
        assert table.match(unknown) is None


GEMMA_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


@pytest.mark.parametrize(
    ("architecture", "canonical"),
    [
        ("Gemma2ForCausalLM", GEMMA_POST_NORMS),
        ("Gemma3ForCausalLM", GEMMA_POST_NORMS),
        ("Glm4ForCausalLM", ("post_self_attn_layernorm", "post_mlp_layernorm")),
    ],
)
def test_post_norms_go_by_the_names_of_the_field(architecture: str, canonical: tuple[str, str]) -> None:
    table = table_for({"architectures": [architecture], **SIZES})
    for names, norm in zip(POST_NORM_NAMES, canonical, strict=True):
        for name in names:
            assert table.match(f"decoder.layers.1.{name}").packing.name == f"model.layers.{{layer}}.{norm}.weight"


def test_layer_norms_with_biases_go_by_both_specs() -> None:
    table = table_for(tiny_config("gpt2"))
    for kind in ("weight", "bias"):
        for local, transformer_engine in (
            ("input_layernorm", "self_attention.linear_qkv.layer_norm"),
            ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"),
        ):
            match = table.match(f"decoder.layers.1.{local}.{kind}")
            assert match is not None
            assert match == table.match(f"decoder.layers.1.{transformer_engine}_{kind}")


# -- configs ---------------------------------------------------------------------------------------------------------

# (architecture, keys as transformers 4 wrote them, the same as transformers 5 writes them)
BOTH_AGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama 3.1": (
        "LlamaForCausalLM",
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ),
    "llama, linear, by the old name of the type": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "glm": (
        "GlmForCausalLM",
        {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"rope_theta": 1e4},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("name", BOTH_AGES)
def test_configs_of_both_ages_give_one_table(name: str) -> None:
    architecture, *ages = BOTH_AGES[name]
    old, new = (table_for({"architectures": [architecture], **SIZES, **keys}) for keys in ages)
    assert old == new
    assert old.not_built == ()


def test_what_the_configs_say_is_in_the_table() -> None:
    tables = {
        name: table_for({"architectures": [architecture], **SIZES, **keys})
        for name, (architecture, keys, _) in BOTH_AGES.items()
    }
    assert tables["llama 3.1"].extras.rotary_scaling == RotaryScaling("llama3", 8.0, 1.0, 4.0, 16)
    assert tables["llama 3.1"].gpt["rotary_base"] == 5e5
    assert tables["qwen2"].extras.windows == (None, 4)
    assert tables["glm"].gpt["rotary_percent"] == 0.25
    assert tables["gemma2"].extras.windows == (4096, None)
    assert tables["gemma2"].extras.attention_softcap == 50.0
    assert tables["gemma2"].extras.logit_softcap == 30.0
    assert tables["gemma2"].dims.tied_embeddings
    assert tables["gemma2"].transformer["activation_func"] == "gelu_tanh"
    gemma3 = tables["gemma3"]
    assert gemma3.gpt["rotary_base"] == 1e6
    assert gemma3.extras.window_rotary_base == 2e4
    assert gemma3.extras.rotary_scaling == RotaryScaling("linear", 8.0)


def test_published_defaults() -> None:
    """Keys that a published config.json leaves out."""
    gemma3 = table_for({"architectures": ["Gemma3ForCausalLM"], **{**SIZES, "num_hidden_layers": 12}})
    assert [layer for layer, window in enumerate(gemma3.extras.windows) if window is None] == [5, 11]
    assert gemma3.gpt["rotary_base"] == 1e6
    assert gemma3.extras.window_rotary_base == 1e4
    glm = table_for({"architectures": ["GlmForCausalLM"], **SIZES})
    assert glm.gpt["rotary_percent"] == 0.5
    assert glm.transformer["add_qkv_bias"]
    gpt2 = table_for({"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 9})
    assert gpt2.dims.tied_embeddings
    assert gpt2.dims.ffn_hidden_size == 128
    assert gpt2.shapes["transformer.wpe.weight"] == (1024, 32)


@pytest.mark.parametrize(
    ("architecture", "keys", "sentence"),
    [
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary scaling of type 'yarn'"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "type 'dynamic'"),
        ("LlamaForCausalLM", {"hidden_act": "quick_gelu"}, "activation 'quick_gelu'"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("LlamaForCausalLM", {"attention_bias": True}, "biases in only one of attention and MLP"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "'yarn'"),
        ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation 'tanh'"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_is_not_built_is_said(architecture: str, keys: dict[str, Any], sentence: str) -> None:
    """And nothing else; Megatron's names do not depend on it."""
    sizes = tiny_config("gpt2") if architecture.startswith("GPT2") else SIZES
    plain = table_for({"architectures": [architecture], **sizes})
    table = table_for({"architectures": [architecture], **sizes, **keys})
    assert len(table.not_built) == 1
    assert sentence in table.not_built[0]
    assert table.rules == plain.rules


def test_windows_that_are_off_do_not_matter() -> None:
    off = {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}
    beyond = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    for keys in (off, beyond):
        table = table_for({"architectures": ["Qwen2ForCausalLM"], **SIZES, **keys})
        assert table.extras.windows == ()
        assert table.layer_spec == "default"
        assert table.not_built == ()
