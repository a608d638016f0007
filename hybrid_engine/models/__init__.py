"""Name tables: for each architecture, Hugging Face tensor names, Megatron's parameter names and the packing between.

    families.py        `TABLES`: architecture -> its table and schema; the table of a model directory
    config_json.py     what config.json must say for each family: types, ranges, relations, defaults
    table.py           `ModelTable` with rules, dims, shapes, and what megatron-core has no setting for; value models'
    packing.py         how canonical tensors lie in one Megatron parameter: QKV, gate/up, padded vocabulary, ...
    blocks.py          rules and shapes that families share
    llama.py           Llama 2 and 3, Qwen2, Qwen2.5, Qwen3, GLM-4, Gemma-2 and Gemma-3
    gpt2.py            GPT-2
    moe.py             Mixtral, Qwen2-MoE, Qwen3-MoE, and what all families with experts use
    deepseek.py        DeepSeek-V2 and V3: latent attention, shared experts, multi-token prediction
    lora_tensors.py    the tensors of LoRA adapters, by PEFT's names

A canonical tensor is one of a Hugging Face checkpoint. To add a family, write its table, a schema of the keys
that it reads, and add a line to `TABLES` in families.py; see docs/models.md. Pure: imports neither torch nor an engine.
"""

from hybrid_engine.models.families import TABLES, table_for
from hybrid_engine.models.table import ModelTable

__all__ = ["TABLES", "ModelTable", "table_for"]
