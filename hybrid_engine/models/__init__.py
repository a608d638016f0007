"""Name tables: Hugging Face names on one side, Megatron's on the other. One file per family, found by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_engine.errors import UnknownModelError
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


def table_for(config: Mapping[str, Any]) -> ModelTable:
    """The table for a Hugging Face config (the contents of config.json).

    Raises UnknownModelError when `architectures` names no model that has a table.
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


__all__ = ["TABLES", "ModelTable", "table_for"]
