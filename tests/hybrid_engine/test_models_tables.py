"""Name tables against the checkpoints that transformers writes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.errors import UnknownModelError
from hybrid_engine.models import TABLES, ModelTable, table_for
from tests.hybrid_engine.tiny_models import SIZES, read_canonical, read_config, save_model
from tests.launch import REPO_ROOT

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
    dims = table_for(config).dims
    assert dims.num_layers == config["num_hidden_layers"]
    assert dims.vocab_size == SIZES["vocab_size"]
    assert dims.num_kv_heads == config["num_key_value_heads"]
    assert dims.tied_embeddings == config["tie_word_embeddings"]


def test_every_canonical_tensor_has_a_megatron_parameter(checkpoint: Path) -> None:
    """In the names of both layer specs; what a rule speaks of and the model has not is no fault of the rule."""
    table = table_for(read_config(checkpoint))
    packed = {pattern for rule in table.rules for pattern in rule.packing.tensors()}
    spoken_of = {pattern.format(layer=layer) for pattern in packed for layer in range(table.dims.num_layers)}
    assert table.shapes.keys() <= spoken_of


def test_both_layer_specs_give_the_same_rule() -> None:
    table = table_for({"architectures": ["LlamaForCausalLM"], **SIZES})
    pairs = [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ]
    for local, transformer_engine in pairs:
        matches = [table.match(f"decoder.layers.11.{name}") for name in (local, transformer_engine)]
        assert matches[0] == matches[1] and matches[0].indices == {"layer": 11}
    assert table.match("decoder.final_layernorm.weight").indices == {}
    for unknown in (
        "decoder.layers.0.unheard_of.weight",
        "decoder.layers.x.input_layernorm.weight",
        "input_layernorm.weight",
    ):
        assert table.match(unknown) is None


@pytest.mark.parametrize("architectures", [[], None, ["OPTForCausalLM", "BertModel"]])
def test_unknown_architectures(architectures: list[str] | None) -> None:
    with pytest.raises(UnknownModelError) as caught:
        table_for({"architectures": architectures, **SIZES})
    assert all(name in str(caught.value) for name in (*TABLES, *(architectures or [])))


def test_the_page_about_models_is_up_to_date() -> None:
    """It lists every architecture and every field, and what it quotes is in the sources."""
    page = (REPO_ROOT / "docs" / "models.md").read_text()
    listed = re.findall(r"^\| (\w+) \|.*\.py \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(TABLES)
    assert [f"`{field.name}`" for field in fields(ModelTable)] == re.findall(r"^\| (`\w+`) \|", _section(page), re.M)
    sources = "".join(path.read_text() for path in (REPO_ROOT / "hybrid_engine" / "models").glob("*.py"))
    quoted = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert quoted and all(code in sources for code in quoted)


def _section(page: str) -> str:
    """The table of the fields of ModelTable."""
    return page.partition("`ModelTable` (")[2].partition("Names in rules")[0]
