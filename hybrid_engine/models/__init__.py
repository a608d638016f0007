"""Name tables: for each architecture, Hugging Face tensor names, Megatron's parameter names and the packing between.

    table.py           what a table is: `ModelTable` with rules, dims, shapes; `match` finds a parameter's rule
    packing.py         how canonical tensors lie in one Megatron parameter: QKV, gate/up, padded vocabulary, ...
    variants.py        what an architecture computes and megatron-core has no setting for, as data
    blocks.py          rules and shapes that families share
    llama.py           Llama 2 and 3, Qwen2, Qwen2.5, Qwen3; `Traits` of families that are nearly the same
    glm.py, gemma.py   GLM-4, Gemma-2 and Gemma-3: Llama's blocks with other traits
    gpt2.py            GPT-2
    moe.py             Mixtral, Qwen2-MoE, Qwen3-MoE, and what all families with experts use
    deepseek.py        DeepSeek-V2 and V3: latent attention, shared experts, multi-token prediction
    lora_tensors.py    the tensors of LoRA adapters, by PEFT's names
    directory.py       the table of a model directory

A canonical tensor is one of a Hugging Face checkpoint. To add a family, write one file and register it in `TABLES`; see
docs/models.md. Pure: imports neither torch nor an engine.
"""

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


__all__ = ["TABLES", "ModelTable", "table_for"]
