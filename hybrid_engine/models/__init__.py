"""Name tables: for each architecture, Hugging Face tensor names, Megatron's parameter names and the packing between.

    families.py        `TABLES`: architecture -> its table and schema; the table of a model directory
    config_schema.py   config.json is data from outside: what is wrong with it, by its own keys
    family_schemas.py  what it must say for each family
    table.py           what a table is: `ModelTable` with rules, dims, shapes; `match` finds a parameter's rule
    packing.py         how canonical tensors lie in one Megatron parameter: QKV, gate/up, padded vocabulary, ...
    variants.py        what an architecture computes and megatron-core has no setting for, as data
    blocks.py          rules and shapes that families share
    llama.py           Llama 2 and 3, Qwen2, Qwen2.5, Qwen3; `Traits` of families that are nearly the same
    glm.py, gemma.py   GLM-4, Gemma-2 and Gemma-3: Llama's blocks with other traits
    gpt2.py            GPT-2
    moe.py             Mixtral, Qwen2-MoE, Qwen3-MoE, and what all families with experts use
    deepseek.py        DeepSeek-V2 and V3: latent attention, shared experts, multi-token prediction
    value_table.py     a value model's table, from that of its architecture
    lora_tensors.py    the tensors of LoRA adapters, by PEFT's names

A canonical tensor is one of a Hugging Face checkpoint. To add a family, write one file, a schema of the keys that
it reads, and add a line to `TABLES` in families.py; see docs/models.md. Pure: imports neither torch nor an engine.
"""

from hybrid_engine.models.families import TABLES, table_for
from hybrid_engine.models.table import ModelTable

__all__ = ["TABLES", "ModelTable", "table_for"]
