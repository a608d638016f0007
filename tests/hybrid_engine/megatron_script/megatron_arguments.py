"""Megatron's arguments and transformer config of a small Llama, for scripts without Megatron."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from hybrid_engine.backends.megatron.megatron_config import described_config
from hybrid_engine.models import table_for
from megatron_patches.engines import ReshardingOptions
from tests.harness.values import Values
from tests.zoo.families import served_config

LLAMA = served_config("llama")
ARGS = {
    "world_size": 2,
    "rank": 0,
    "optimizer": "adam",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 2,
    "num_experts": None,
    "sequence_parallel": False,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "make_vocab_size_divisible_by": 8,
    "micro_batch_size": 1,
    "seq_length": 32,
    "seed": 1234,
    "params_dtype": torch.bfloat16,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "max_position_embeddings": 128,
    "untie_embeddings_and_output_weights": True,
    "mtp_num_layers": None,
    "use_rope_scaling": False,
    "padded_vocab_size": 10_000,
}


def transformer_config(hf: Values = LLAMA, **changes: Any) -> TransformerConfig:
    """Return the configuration of model `hf` with changes, which no constructor validates."""
    config = described_config(table_for(hf))
    config.bias_activation_fusion = True
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def script_of(
    options: ReshardingOptions, config: TransformerConfig | None = None, **changes: Any
) -> Any:
    """Return a stand-in for a `MegatronScript`."""
    return SimpleNamespace(
        options=options,
        args=Namespace(**{**ARGS, **changes}),
        transformer_config=lambda: config or transformer_config(),
        flags=None,
    )
