"""Name tables: Hugging Face tensors, Megatron's parameters and their packing, per architecture.

    families.py        `TABLES`: architecture -> table and config; the table of a model directory
    derived.py         tables of all other architectures, from transformers' classes
    conventions.py     rules of Megatron's parameters for those with the usual names
    config_json.py     config.json by transformers' classes, and checks of its values
    table.py           `ModelTable`: rules, dims, shapes, features that megatron-core lacks
    packing.py         packing of canonical tensors in one Megatron parameter: QKV, gate/up, ...
    blocks.py          rules and shapes shared by families
    llama.py           Llama 2 and 3, Qwen2, Qwen2.5, Qwen3, GLM-4, Gemma-2 and Gemma-3
    gpt2.py            GPT-2
    moe.py             Mixtral, Qwen2-MoE, Qwen3-MoE, and parts shared by families with experts
    deepseek.py        DeepSeek-V2 and V3: latent attention, shared experts, multi-token prediction
    recurrent.py       rules of layers with a recurrent state: gated delta nets, Mamba
    lora_tensors.py    tensors of LoRA adapters, by PEFT's names
    block_quantization.py    formats of weights in blocks and their scales, by names of checkpoints
    quantization_configs.py  the quantization_config of such checkpoints

A canonical tensor is a tensor of a Hugging Face checkpoint. To add a family, write its table, and
add a line to `TABLES` in families.py; see docs/models.md. This package imports no engine,
transformers to read a config.json only, and torch for a derived table only.
"""

from hybrid_engine.models.families import TABLES, table_for
from hybrid_engine.models.table import ModelTable

__all__ = ["TABLES", "ModelTable", "table_for"]
