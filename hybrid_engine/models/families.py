"""Which table an architecture has: `TABLES`, to which a new family is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_engine.errors import ConfigError, UnknownModelError, Violation, clipped, shortened
from hybrid_engine.files.documents import read_json
from hybrid_engine.models import config_schema, deepseek, family_schemas, gemma, glm, gpt2, llama, moe
from hybrid_engine.models.table import ModelTable, Table


class Architecture(NamedTuple):
    """What makes its table from config.json, and what config.json must say for that."""

    table: Table
    schema: type[config_schema.Schema]


TABLES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(deepseek.deepseek_v2, family_schemas.DeepseekV2),
    "DeepseekV3ForCausalLM": Architecture(deepseek.deepseek_v3, family_schemas.DeepseekV3),
    "GPT2LMHeadModel": Architecture(gpt2.gpt2, family_schemas.Gpt2),
    "Gemma2ForCausalLM": Architecture(gemma.gemma2, family_schemas.Gemma2),
    "Gemma3ForCausalLM": Architecture(gemma.gemma3, family_schemas.Gemma3),
    "Glm4ForCausalLM": Architecture(glm.glm4, family_schemas.Glm),
    "GlmForCausalLM": Architecture(glm.glm, family_schemas.Glm),
    "LlamaForCausalLM": Architecture(llama.llama, family_schemas.GroupedQuery),
    "MixtralForCausalLM": Architecture(moe.mixtral, family_schemas.Mixtral),
    "Qwen2ForCausalLM": Architecture(llama.qwen2, family_schemas.Qwen),
    "Qwen2MoeForCausalLM": Architecture(moe.qwen2_moe, family_schemas.Qwen2Moe),
    "Qwen3ForCausalLM": Architecture(llama.qwen3, family_schemas.Qwen3),
    "Qwen3MoeForCausalLM": Architecture(moe.qwen3_moe, family_schemas.Qwen3Moe),
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
    names = config_schema.architectures_of(config, source)
    known_name = next((name for name in names if name in TABLES), None)
    if known_name is None:
        known = ", ".join(TABLES)
        raise UnknownModelError(
            f"no name table for architectures {shortened(names, 1000)} in {source}; known: {known}. "
            "A table is one file under hybrid_engine/models"
        )
    architecture = TABLES[known_name]
    config_schema.require_valid(config, architecture.schema, source)
    table = architecture.table({**architecture.schema.defaults(), **config})
    return replace(table, architecture=known_name)


def read_model(directory: Path, key: str = "model") -> tuple[ModelTable, dict[str, Any]]:
    """Return the table and the contents of config.json. Raises ConfigError under `key` without config.json or table."""
    path = directory / "config.json"
    config = read_json(path, key, "Name a Hugging Face model directory")
    try:
        return table_for(config, path), config
    except UnknownModelError as error:
        raise ConfigError([Violation(key, str(error), "Choose a supported model or add a table")]) from None
