"""Which table an architecture has: `TABLES`, to which a new family is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_engine.errors import ConfigError, UnknownModelError, Violation, clipped, shortened
from hybrid_engine.files.documents import read_json
from hybrid_engine.models import config_json, deepseek, gpt2, llama, moe
from hybrid_engine.models.table import ModelTable


class Architecture(NamedTuple):
    """A function that makes a table, and the schema of config.json that it takes."""

    table: Callable[[Any], ModelTable]
    schema: type[config_json.Schema]


TABLES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(deepseek.deepseek_v2, config_json.DeepseekV2),
    "DeepseekV3ForCausalLM": Architecture(deepseek.deepseek_v3, config_json.DeepseekV3),
    "GPT2LMHeadModel": Architecture(gpt2.gpt2, config_json.Gpt2),
    "Gemma2ForCausalLM": Architecture(llama.gemma2, config_json.Gemma2),
    "Gemma3ForCausalLM": Architecture(llama.gemma3, config_json.Gemma3),
    "Glm4ForCausalLM": Architecture(llama.glm4, config_json.Glm),
    "GlmForCausalLM": Architecture(llama.glm, config_json.Glm),
    "LlamaForCausalLM": Architecture(llama.llama, config_json.GroupedQuery),
    "MixtralForCausalLM": Architecture(moe.mixtral, config_json.Mixtral),
    "Qwen2ForCausalLM": Architecture(llama.qwen2, config_json.Qwen),
    "Qwen2MoeForCausalLM": Architecture(moe.qwen2_moe, config_json.Qwen2Moe),
    "Qwen3ForCausalLM": Architecture(llama.qwen3, config_json.Qwen3),
    "Qwen3MoeForCausalLM": Architecture(moe.qwen3_moe, config_json.Qwen3Moe),
}
"""By an entry of config.json's `architectures`."""


def table_for(config: Mapping[str, Any], source: str | Path = "config.json") -> ModelTable:
    """Return the table for a Hugging Face config.

    Args:
        config: the contents of config.json.
        source: what errors call it.

    Raises:
        UnknownModelError: when none of its `architectures` has a table.
        ConfigError: with everything that is wrong in it; keys of the findings are its own.
    """
    source = clipped(str(source))
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"Input should be a list of names, found {shortened(names)}, in {source}"
        raise ConfigError([Violation("architectures", problem, "Name one of transformers' model classes")])
    known_name = next((name for name in names if name in TABLES), None)
    if known_name is None:
        known = ", ".join(TABLES)
        raise UnknownModelError(
            f"no name table for architectures {shortened(names, 1000)} in {source}; known: {known}. "
            "A table is one file under hybrid_engine/models"
        )
    architecture = TABLES[known_name]
    table = architecture.table(config_json.read_config(config, architecture.schema, source))
    return replace(table, architecture=known_name)


def read_model(directory: Path, key: str = "model") -> tuple[ModelTable, dict[str, Any]]:
    """Return the table and the contents of config.json. Raises ConfigError under `key` without config.json or table."""
    path = directory / "config.json"
    config = read_json(path, key, "Name a Hugging Face model directory")
    try:
        return table_for(config, path), config
    except UnknownModelError as error:
        raise ConfigError([Violation(key, str(error), "Choose a supported model or add a table")]) from None
