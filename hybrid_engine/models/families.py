"""Which table an architecture has: `TABLES`, to which a new family is added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, UnknownModelError, Violation, clipped
from hybrid_engine.files.documents import read_json
from hybrid_engine.models import deepseek, gemma, glm, gpt2, llama, moe
from hybrid_engine.models.table import ModelTable, Table

TABLES: dict[str, Table] = {
    "DeepseekV2ForCausalLM": deepseek.deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.deepseek_v3,
    "GPT2LMHeadModel": gpt2.gpt2,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Glm4ForCausalLM": glm.glm4,
    "GlmForCausalLM": glm.glm,
    "LlamaForCausalLM": llama.llama,
    "MixtralForCausalLM": moe.mixtral,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen2MoeForCausalLM": moe.qwen2_moe,
    "Qwen3ForCausalLM": llama.qwen3,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
}
"""An entry of config.json's `architectures` -> what makes its table from config.json."""


def table_for(config: Mapping[str, Any]) -> ModelTable:
    """Return the table for a Hugging Face config (the contents of config.json).

    Raises UnknownModelError when none of its `architectures` has a table.
    """
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in TABLES:
            return TABLES[architecture](config)
    known = ", ".join(TABLES)
    raise UnknownModelError(
        f"no name table for architectures {list(architectures)}; known: {known}. "
        "A table is one file under hybrid_engine/models"
    )


def read_model(directory: Path, key: str = "model") -> tuple[ModelTable, dict[str, Any]]:
    """Return the table and the contents of config.json. Raises ConfigError under `key` without config.json or table."""
    path = directory / "config.json"
    config = read_json(path, key, "Name a Hugging Face model directory")
    try:
        return table_for(config), config
    except UnknownModelError as error:
        found = Violation(key, clipped(str(error), 2000), "Choose a supported model or add a table")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        problem = f"{path} cannot be used: {clipped(repr(error))}"
        found = Violation(key, problem, "Name a directory with a complete config.json")
    raise ConfigError([found])
