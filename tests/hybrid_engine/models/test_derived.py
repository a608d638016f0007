"""Tables derived from transformers' classes, compared with saved checkpoints and written tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from hybrid_engine.config import load_config
from hybrid_engine.errors import ConfigError, UnknownModelError
from hybrid_engine.models import TABLES, table_for
from hybrid_engine.models.conventions import conventional_rules
from hybrid_engine.models.derived import derived_table, model_class
from tests.harness.errors import refused, violated
from tests.harness.values import Values
from tests.hybrid_engine.models.small_configs import SMALL, small_config
from tests.zoo.families import FAMILIES, tiny_config, write_config
from tests.zoo.vision_models import SMALL_VISION

UNUSUAL = {"gpt2", "gemma2", "gemma3"}  # families with other names in checkpoints
DTYPES = {"F32": "float32", "BF16": "bfloat16", "I64": "int64"}


@pytest.mark.parametrize("architecture", SMALL)
def test_a_derived_table_equals_a_saved_checkpoint(architecture: str, tmp_path: Path) -> None:
    config = small_config(architecture)
    write_config(tmp_path, config)
    hf_config = AutoConfig.from_pretrained(tmp_path)
    model = model_class(architecture)._from_config(hf_config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    shapes = {}
    dtypes = {}
    with safe_open(tmp_path / "saved" / "model.safetensors", "torch") as file:
        names = file.keys()
        for name in names:
            tensor = file.get_slice(name)
            shapes[name] = tuple(tensor.get_shape())
            if tensor.get_dtype() != "BF16":
                dtypes[name] = DTYPES[tensor.get_dtype()]
    table = table_for(config)
    assert (table.architecture, table.is_derived) == (architecture, True)
    assert table.shapes == shapes
    assert table.dtypes == dtypes
    assert not table.left_out & table.shapes.keys()


@pytest.mark.parametrize(("actor", "is_derived"), [({"fsdp": {}}, True), ({}, False)])
def test_fsdp2_asks_no_written_table(actor: Values, is_derived: bool, tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config("qwen3"))
    actor = {"params_dtype": "float32", "seq_length": 32, **actor}
    config = load_config({"model": str(tmp_path), "random_weights": True, "actor_config": actor}, 1)
    assert config.table().is_derived == is_derived


@pytest.mark.parametrize("family", FAMILIES)
def test_a_derived_table_equals_the_written_table_in_every_size(family: str) -> None:
    config = tiny_config(family)
    written = table_for(config)
    derived = derived_table(config, written.architecture)
    assert derived.shapes == {
        name: shape for name, shape in written.shapes.items() if written.is_served(name)
    }
    # transformers' classes have no layers for multi-token prediction.
    assert derived.dtypes == written.dtypes
    assert derived.dims == replace(written.dims, num_mtp_layers=0)
    for name, size in derived.sizes.items():
        if derived.dims.num_experts or "moe" not in name:
            assert (size or None) == (written.sizes.get(name) or None), name


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_by_convention_equal_the_written_rules(family: str) -> None:
    config = tiny_config(family)
    written = table_for(config)
    derived = derived_table(config, written.architecture)
    assert bool(derived.rules) == (family not in UNUSUAL)
    for rule in derived.rules:
        for name in rule.names:
            numbered = name.format(layer=1, expert=1)
            match = written.match(numbered)
            assert match is not None, name
            assert match == derived.match(numbered)


def test_rules_by_convention_cover_all_tensors_or_none() -> None:
    with_rules = {name for name in SMALL if table_for(small_config(name)).rules}
    assert with_rules == {
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "NemotronHForCausalLM",
        "Phi3ForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
    }
    table = table_for(small_config("MistralForCausalLM"))
    shapes = {**table.shapes, "model.layers.2.self_attn.scales": (4,)}
    assert conventional_rules(shapes, table.dims) == ()  # scales follow no convention


def test_experts_in_one_tensor_are_boxes_of_a_finer_shape() -> None:
    table = table_for(small_config("GptOssForCausalLM"))
    experts = "model.layers.3.mlp.experts."
    finer = {experts + "gate_up_proj": (8, 128, 128, 2), experts + "gate_up_proj_bias": (8, 128, 2)}
    refined = {name for name, shape in table.refined_shapes.items() if table.shapes[name] != shape}
    assert refined == {
        name.replace("layers.3", f"layers.{layer}") for layer in range(4) for name in finer
    }
    assert {name: table.refined_shapes[name] for name in finer} == finer


def test_tensors_ignored_by_the_class_are_ignored() -> None:
    table = table_for(small_config("Qwen3NextForCausalLM"))
    assert table.is_ignored("mtp.layers.0.mlp.gate.weight")
    assert not table.is_ignored("model.layers.0.mlp.gate.weight")
    tied = table_for({**small_config("SmolLM3ForCausalLM"), "tie_word_embeddings": True})
    assert tied.dims.tied_embeddings
    assert tied.is_ignored("lm_head.weight")
    assert "lm_head.weight" not in tied.shapes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, ("NoSuchForCausalLM", "no such class")),
        ({"architectures": ["AutoModelForCausalLM"]}, ("no such class",)),
        ({**small_config("MistralForCausalLM"), "num_attention_heads": "x"}, ("builds no",)),
        ({**small_config("MistralForCausalLM"), "model_type": "nothing"}, ("builds no", "nothing")),
    ],
)
def test_a_model_without_a_class_is_refused(config: Values, words: tuple[str, ...]) -> None:
    with refused(UnknownModelError, "unknown-architecture", *words):
        table_for(config)


def test_megatron_needs_rules_and_builds_only_models_with_tables(tmp_path: Path) -> None:
    actor = {"seq_length": 32, "micro_batch_size": 1, "params_dtype": "float32"}
    values = {
        "model": str(tmp_path),
        "random_weights": True,
        "generate_config": {"max_model_len": 64},
    }
    write_config(tmp_path, small_config("AfmoeForCausalLM"))
    with violated(ConfigError, ("model", "unknown-architecture")) as refusal:
        load_config({**values, "actor_config": actor}, 1)
    assert all(name in str(refusal.value) for name in ("AfmoeForCausalLM", *TABLES))
    load_config({**values, "actor_config": {**actor, "fsdp": {}}}, 1)

    write_config(tmp_path, small_config("MistralForCausalLM"))
    with violated(ConfigError, ("model", "not-built")):
        load_config({**values, "actor_config": actor}, 1)
    # The user builds the model.
    load_config({**values, "actor_config": actor}, 1, own_loop=True, own_weights=True)


@pytest.mark.parametrize("layers", [-2, 2, [1, -2], -1])
def test_vision_towers_have_the_names_of_published_checkpoints(layers: int | list[int]) -> None:
    """vLLM builds no layer of a tower behind those whose features the model uses."""
    architecture = "LlavaForConditionalGeneration"
    config = {
        "architectures": [architecture],
        **SMALL_VISION[architecture],
        "vision_feature_layer": layers,
    }
    table = table_for(config)
    tower = [name for name in table.shapes if name.startswith("vision_tower.")]
    assert all(name.startswith("vision_tower.vision_model.") for name in tower)
    behind = [name for name in tower if ".layers.2." in name or "post_layernorm" in name]
    assert len(behind) == 18
    assert [name for name in tower if not table.is_served(name)] == ([] if layers == -1 else behind)
