"""Tables of the families against transformers: checkpoints, settings, sizes."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hybrid_engine.errors import UnknownModelError
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.parameters import linear_modules
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.models.lora_tensors import LoraSettings, adapted_modules, adapter_shapes
from hybrid_engine.models.packing import Over
from hybrid_engine.models.table import VALUE_HEAD, RotaryScaling, value_table
from tests.harness.errors import refused
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values
from tests.zoo import published_configs
from tests.zoo.families import FAMILIES, SIZES, YARN, read_config, tiny_config
from tests.zoo.tiny_models import build_hf_model, read_canonical, save_model

LLAMA3 = {**published_configs.LLAMA_3_8B["rope_scaling"], "original_max_position_embeddings": 16}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
# Changes of each family's tiny model, besides the unchanged model.
VARIANTS: dict[str, list[Values]] = {
    "llama": [
        *(
            TIED,
            BIASED,
            {"mlp_bias": True},
            {"head_dim": None},
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        ),
        {**BIASED, "mlp_bias": True, "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "num_hidden_layers": 11},
    ],
    "qwen2": [TIED, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}],
    "qwen3": [TIED, BIASED],
    "glm": [{"attention_bias": False, **TIED}],
    "glm4": [{"num_key_value_heads": 1}],
    "gemma2": [UNTIED, BIASED],
    "gemma3": [{"num_hidden_layers": 7, "layer_types": None}],
    "gpt2": [UNTIED, {"n_inner": None}],
    "qwen3_moe": [TIED, {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]}],
    "qwen2_moe": [{"qkv_bias": False}],
    "deepseek_v2": [
        {"q_lora_rank": None, "first_k_dense_replace": 0},
        {"first_k_dense_replace": 2, "n_shared_experts": 1},
    ],
    "deepseek_v3": [{"mtp_layers": 2}],
}
MODELS = [(family, changes) for family in FAMILIES for changes in ({}, *VARIANTS.get(family, ()))]


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt2"}))
def test_adapters_have_the_names_and_shapes_of_peft(family: str) -> None:
    """Adapters on GPT-2's weights, which are transposed, have no form of PEFT's."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    table = table_for(tiny_config(family))
    targets = [name for name, has_form in linear_modules(table).items() if has_form]
    shapes = adapter_shapes(table, targets, 4)
    settings = LoraSettings(4, 8.0, adapted_modules(shapes)).in_peft()
    model = peft.get_peft_model(build_hf_model(family), peft.LoraConfig(**settings))
    adapters = peft.get_peft_model_state_dict(model)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in adapters.items()}


@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_tables_equal_the_checkpoints_of_transformers(
    family: str, changes: Values, tmp_path: Path
) -> None:
    config = read_config(save_model(tmp_path, family, **changes))
    table = table_for(config)
    dims = table_for(config).dims
    served = {name: shape for name, shape in table.shapes.items() if table.is_served(name)}
    on_disk = {name: tuple(tensor.shape) for name, tensor in read_canonical(tmp_path).items()}
    # transformers saves no MTP layers; backends/megatron/test_experts.py trains them.
    assert served == {name: shape for name, shape in on_disk.items() if table.is_served(name)}
    assert dims.tied_embeddings == config["tie_word_embeddings"]

    # Every tensor has a parameter in both layer specs; rules may name tensors that a model lacks.
    packed = {pattern for rule in table.rules for pattern in rule.packing.tensors()}
    layers = range(dims.num_layers + dims.num_mtp_layers)
    experts = range(max(1, dims.num_experts))
    covered = {
        pattern.format(layer=layer, expert=expert)
        for pattern in packed
        for layer in layers
        for expert in experts
    }
    assert table.shapes.keys() <= covered
    names = [name for rule in table.rules for name in rule.names]
    assert len(names) == len(set(names))
    for rule in table.rules:
        is_cut = ".experts." in rule.names[0] and not rule.names[0].endswith("linear_fc2.bias")
        assert (rule.packing.over is Over.EXPERT_TENSOR) == is_cut, rule.names

    in_attention = config.get("attention_bias", False) and family in ("llama", "qwen3", "gemma2")
    assert len(table.not_built) == (in_attention != config.get("mlp_bias", False))


WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
LINEAR = {"rope_type": "linear", "factor": 8.0}
# name -> architecture, keys of config.json, settings that must follow from them
SETTINGS: dict[str, tuple[str, Values, Values]] = {
    "llama 3.1": (
        "LlamaForCausalLM",
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rotary_scaling": RotaryScaling("llama3", 8.0, 1.0, 4.0, 16), "rotary_base": 5e5},
    ),
    "llama, linear, by the old name of the type": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rotary_scaling": RotaryScaling("linear", 2.0), "rotary_base": 1e4},
    ),
    "qwen2": ("Qwen2ForCausalLM", WINDOWS, {"windows": (None, 4)}),
    "glm": ("GlmForCausalLM", {"partial_rotary_factor": 0.25}, {"rotary_percent": 0.25}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {},
        {"windows": (4096, None), "attention_softcap": 50.0, "activation_func": "gelu_tanh"},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "rope_theta": 2e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": LINEAR,
            "sliding_window_pattern": 2,
        },
        {
            **{
                "rotary_base": 2e6,
                "window_rotary_base": 2e4,
                "rotary_scaling": RotaryScaling("linear", 8.0),
            },
            "windows": (4096, None),
        },
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_follow_from_config_json(name: str) -> None:
    architecture, keys, expected = SETTINGS[name]
    table = table_for({"architectures": [architecture], **SIZES, **keys})
    assert table.not_built == ()
    extras = {field.name: getattr(table.extras, field.name) for field in fields(table.extras)}
    assert {**table.transformer, **table.gpt, **extras}.items() >= expected.items()


def test_windows_that_are_off_are_ignored() -> None:
    for keys in ({**WINDOWS, "use_sliding_window": False}, {**WINDOWS, "max_window_layers": 2}):
        table = table_for({"architectures": ["Qwen2ForCausalLM"], **SIZES, **keys})
        assert (table.extras.windows, table.extends_layers, table.not_built) == ((), False, ())


def test_expert_models_have_the_windows_of_transformers() -> None:
    switched_on = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "num_hidden_layers": 4,
        "max_window_layers": 3,
    }
    windows = [
        table_for(tiny_config(family, **switched_on)).extras.windows
        for family in ("qwen2_moe", "qwen3_moe")
    ]
    # Qwen2-MoE: every second layer below max_window_layers. Qwen3-MoE: every layer.
    assert windows == [(4, None, 4, None), (4, 4, 4, 4)]


@pytest.mark.parametrize(
    ("family", "changes", "feature"),
    [
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rotary scaling of type 'yarn'",
        ),
        ("llama", {"rope_scaling": {"type": "lama3"}}, "rotary scaling of type 'lama3'"),
        ("qwen2", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "type 'dynamic'"),
        ("llama", {"hidden_act": "silux"}, "activation 'silux'"),
        ("llama", {"attention_bias": True}, "biases in only one of attention and MLP"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}}},
            "'yarn'",
        ),
        ("gpt2", {"activation_function": "tanh"}, "activation 'tanh'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "noaux_tc"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob false"),
        ("deepseek_v3", {"attention_bias": True}, "biases"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0}}, "only one of mscale"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.1}}, "attention_factor"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "one expert per token"),
        ("qwen3_moe", {"attention_bias": True}, "biases"),
    ],
)
def test_unsupported_features_are_named(family: str, changes: Values, feature: str) -> None:
    plain = table_for(tiny_config(family))
    table = table_for(tiny_config(family, **changes))
    assert plain.not_built == ()
    (reason,) = table.not_built
    assert feature in reason
    assert table.rules == plain.rules  # names do not depend on features


# Parameters in billions, from the model cards and arXiv:2401.04088, 2405.04434, 2412.19437.
PUBLISHED = {
    "QWEN3_30B_A3B": 30.5,
    "MIXTRAL_8X7B": 46.7,
    "DEEPSEEK_V2_LITE": 15.7,
    "DEEPSEEK_V3": 671.0,
    "QWEN_1_5_MOE": 14.3,
    "DEEPSEEK_V2": 235.7,
}


def billions(table: ModelTable, served: bool = True) -> float:
    return (
        sum(
            math.prod(shape)
            for name, shape in table.shapes.items()
            if table.is_served(name) == served
        )
        / 1e9
    )


@pytest.mark.parametrize("model", PUBLISHED)
def test_models_have_their_published_sizes(model: str) -> None:
    table = table_for(getattr(published_configs, model))
    assert billions(table) == pytest.approx(PUBLISHED[model], abs=0.1)  # published with one decimal
    assert table.not_built == ()


def test_mtp_layers_of_deepseek_v3() -> None:
    table = table_for(published_configs.DEEPSEEK_V3)
    # transformers' class has one layer by default.
    without = {
        key: value for key, value in published_configs.DEEPSEEK_V3.items() if "nextn" not in key
    }
    assert table_for(without).dims.num_mtp_layers == 0
    for is_tied, head in ((False, "lm_head.weight"), (True, "model.embed_tokens.weight")):
        layer = "model.layers.61."
        expected = {
            layer + "embed_tokens.weight": "model.embed_tokens.weight",
            layer + "shared_head.head.weight": head,
        }
        assert (
            table_for({**published_configs.DEEPSEEK_V3, "tie_word_embeddings": is_tied}).copies
            == expected
        )
    copied = sum(math.prod(table.shapes[original]) for original in table.copies.values()) / 1e9
    # 14 billion parameters with the embedding and head that the checkpoint repeats.
    assert billions(table, served=False) + copied == pytest.approx(13.5, abs=0.5)
    assert not table.is_served("model.layers.61.eh_proj.weight")
    assert table.is_served("model.layers.6.mlp.gate.weight")
    biases = {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias": "float32"
        for layer in range(3, 62)
    }
    assert table.dtypes == biases
    match = table.match(
        "mtp.layers.61.transformer_layer.mlp.experts.local_experts.255.linear_fc2.weight"
    )
    assert match.indices == {"layer": 61, "expert": 255}
    assert match == table.match("mtp.layers.61.transformer_layer.mlp.experts.linear_fc2.weight255")


def test_routing_settings_of_the_models() -> None:
    v3 = table_for(published_configs.DEEPSEEK_V3)
    v2 = table_for(published_configs.DEEPSEEK_V2)
    expected = {
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_layer_freq": [0, 0, 0] + [1] * 58,
    }
    assert {key: v3.transformer[key] for key in expected} == expected
    lite = table_for(published_configs.DEEPSEEK_V2_LITE)
    # megatron-core has no setting for this ranking of groups.
    assert [table.extras.experts_per_group_score for table in (v3, v2, lite)] == [2, 1, None]
    for normalized in (True, False):
        qwen = table_for({**published_configs.QWEN3_30B_A3B, "norm_topk_prob": normalized})
        assert qwen.transformer["moe_router_pre_softmax"] is not normalized


@pytest.mark.parametrize("architectures", [[], None])
def test_without_architectures_there_is_no_table(architectures: list[str] | None) -> None:
    with refused(UnknownModelError, "unknown-architecture"):
        table_for({"architectures": architectures, **SIZES})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_model_differs_only_in_its_head(family: str) -> None:
    # MTP layers are dropped.
    changes = {"num_nextn_predict_layers": 1} if family == "deepseek_v3" else {}
    table = table_for(tiny_config(family, **changes))
    value = value_table(table)
    served = {name for name in table.shapes if table.is_served(name)}
    assert value.shapes.keys() - {VALUE_HEAD} == served - {"lm_head.weight"}
    assert value.shapes[VALUE_HEAD] == (1, table.dims.hidden_size)
    assert (value.head, value.extras.logit_softcap, value.dims.num_mtp_layers) == ("value", None, 0)
    matched = value.match("output_layer.weight")
    assert list(matched.packing.tensors()) == [VALUE_HEAD]
    embedding = "embedding.word_embeddings.weight"
    assert value.match(embedding) == table.match(embedding)
    around_one = replace(table, rules=tuple(replace(rule, around_one=True) for rule in table.rules))
    assert value_table(around_one).match(embedding).rule.around_one
    assert {*(table.shapes.keys() - served), *table.copies} <= value.left_out


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_value_model_is_only_on_the_last_stage(tied: bool) -> None:
    table = value_table(table_for(tiny_config("qwen3", tie_word_embeddings=tied)))
    side = training_side(
        table, TrainParallelism(4, tensor=2, pipeline=2, make_vocab_size_divisible_by=8), "float32"
    )
    owners = side.owners
    assert [owner.ranks.tolist() for owner in owners[VALUE_HEAD]] == [[2, 3]]
    embedding_owners = owners["model.embed_tokens.weight"]
    assert sorted(rank for owner in embedding_owners for rank in owner.ranks.tolist()) == [0, 1]


def test_the_walk_through_a_model_is_up_to_date() -> None:
    """The page quotes code from the sources; the docstring has every field."""
    page = (REPO_ROOT / "CONTRIBUTING.md").read_text()
    described = re.findall(r"^        (\w+): ", ModelTable.__doc__ or "", re.MULTILINE)
    assert [field.name for field in fields(ModelTable)] == described
    sources = "".join(
        path.read_text() for path in (REPO_ROOT / "hybrid_engine" / "models").glob("*.py")
    )
    quoted = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert quoted
    assert all(code in sources for code in quoted)
