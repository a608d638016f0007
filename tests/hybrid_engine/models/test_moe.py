"""Tables of the models with experts against what transformers writes and what is published about their sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.models.packing import Over
from tests.zoo import published_configs
from tests.zoo.families import YARN, read_config, tiny_config
from tests.zoo.tiny_models import read_canonical, save_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, no bias": ("qwen2_moe", {"qkv_bias": False}),
    "mixtral": ("mixtral", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2, plain queries": ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v2, all dense but the last": ("deepseek_v2", {"first_k_dense_replace": 2, "n_shared_experts": 1}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, two mtp layers": ("deepseek_v3", {"mtp_layers": 2}),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return save_model(tmp_path_factory.mktemp("model"), family, **overrides)


def test_names_and_shapes_are_those_on_disk(checkpoint: Path) -> None:
    """But for multi-token prediction, which transformers leaves out: see test_mbridge."""
    table = table_for(read_config(checkpoint))
    on_disk = {name: tuple(tensor.shape) for name, tensor in read_canonical(checkpoint).items()}
    assert {name: shape for name, shape in table.shapes.items() if table.is_served(name)} == {
        name: shape for name, shape in on_disk.items() if table.is_served(name)
    }


def test_every_canonical_tensor_has_a_megatron_parameter(checkpoint: Path) -> None:
    table = table_for(read_config(checkpoint))
    packed = {pattern for rule in table.rules for pattern in rule.packing.tensors()}
    layers = range(table.dims.num_layers + table.dims.num_mtp_layers)
    spoken_of = {
        pattern.format(layer=layer, expert=expert)
        for pattern in packed
        for layer in layers
        for expert in range(table.dims.num_experts)
    }
    assert table.shapes.keys() <= spoken_of


def test_no_name_has_two_rules(checkpoint: Path) -> None:
    names = [name for rule in table_for(read_config(checkpoint)).rules for name in rule.names]
    assert len(names) == len(set(names))


def test_only_experts_are_cut_over_expert_ranks(checkpoint: Path) -> None:
    for rule in table_for(read_config(checkpoint)).rules:
        is_cut = ".experts." in rule.names[0] and not rule.names[0].endswith("linear_fc2.bias")
        assert (rule.packing.over is Over.EXPERT_TENSOR) == is_cut, rule.names


def test_settings_of_older_transformers_are_read() -> None:
    """transformers 5 writes num_local_experts where a published config has num_experts."""
    published = {**published_configs.QWEN3_30B_A3B, "num_hidden_layers": 2}
    renamed = {name: value for name, value in published.items() if name != "num_experts"}
    table, same = table_for(published), table_for({**renamed, "num_local_experts": 128})
    assert table.shapes == same.shapes
    assert table.transformer == same.transformer
    with pytest.raises(ConfigError, match="num_experts: is missing"):
        table_for(renamed)


# Parameters in billions, from the model cards and arXiv:2401.04088, 2405.04434, 2412.19437.
PUBLISHED = {
    "QWEN3_30B_A3B": 30.5,
    "MIXTRAL_8X7B": 46.7,
    "DEEPSEEK_V2_LITE": 15.7,
    "DEEPSEEK_V3": 671.0,
}


def billions(table: ModelTable, served: bool = True) -> float:
    return sum(math.prod(shape) for name, shape in table.shapes.items() if table.is_served(name) == served) / 1e9


@pytest.mark.parametrize("model", PUBLISHED)
def test_sizes_are_the_published_ones(model: str) -> None:
    table = table_for(getattr(published_configs, model))
    assert billions(table) == pytest.approx(PUBLISHED[model], abs=0.06)
    assert table.not_built == ()


def test_sizes_of_further_models() -> None:
    """Qwen1.5-MoE-A2.7B; DeepSeek-V2; and the multi-token prediction of DeepSeek-V3, 14 billion with the embedding and
    the head that its checkpoint repeats."""
    assert billions(table_for(published_configs.QWEN_1_5_MOE)) == pytest.approx(14.3, abs=0.06)
    assert billions(table_for(published_configs.DEEPSEEK_V2)) == pytest.approx(235.7, abs=0.1)
    table = table_for(published_configs.DEEPSEEK_V3)
    copied = sum(math.prod(table.shapes[original]) for original in table.copies.values()) / 1e9
    assert billions(table, served=False) + copied == pytest.approx(13.5, abs=0.5)


def test_multi_token_prediction_of_deepseek_v3() -> None:
    table = table_for(published_configs.DEEPSEEK_V3)
    assert table.unserved == ("model.layers.61.",)
    assert table.dims.num_mtp_layers == 1
    assert table.copies == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }
    assert not table.is_served("model.layers.61.eh_proj.weight")
    assert table.is_served("model.layers.6.mlp.gate.weight")
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": "float32" for layer in range(3, 62)}
    assert table.dtypes == biases
    match = table.match("mtp.layers.61.transformer_layer.mlp.experts.local_experts.255.linear_fc2.weight")
    assert match.indices == {"layer": 61, "expert": 255}
    assert match == table.match("mtp.layers.61.transformer_layer.mlp.experts.linear_fc2.weight255")
    assert table.match("mtp.layers.61.final_layernorm.weight").packing.tensors() == [
        "model.layers.{layer}.shared_head.norm.weight"
    ]


def test_routing_is_that_of_the_models() -> None:
    """Where megatron-core has the setting; groups of experts are ranked by our own rule."""
    v3, v2 = table_for(published_configs.DEEPSEEK_V3), table_for(published_configs.DEEPSEEK_V2)
    assert v3.transformer["moe_router_num_groups"] == 8
    assert v3.transformer["moe_router_group_topk"] == 4
    assert v3.transformer["moe_router_topk_scaling_factor"] == 2.5
    assert v3.transformer["moe_layer_freq"] == [0, 0, 0] + [1] * 58
    assert v3.extras.experts_per_group_score == 2
    assert v2.extras.experts_per_group_score == 1
    assert table_for(published_configs.DEEPSEEK_V2_LITE).extras.experts_per_group_score is None
    assert not table_for(published_configs.QWEN3_30B_A3B).transformer["moe_router_pre_softmax"]
    assert table_for({**published_configs.QWEN3_30B_A3B, "norm_topk_prob": False}).transformer["moe_router_pre_softmax"]


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "noaux_tc"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob true"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob false"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"attention_bias": True}, "biases"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "gelu"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0}}, "only one of mscale"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.1}}, "attention_factor"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "one expert per token"),
        ("qwen3_moe", {"attention_bias": True}, "biases"),
    ],
)
def test_what_would_not_be_computed_is_named(family: str, changes: dict[str, Any], what: str) -> None:
    assert table_for(tiny_config(family)).not_built == ()
    assert what in "; ".join(table_for(tiny_config(family, **changes)).not_built)
