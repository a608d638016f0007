"""Megatron's HybridModel: the layers of a GPT, taken apart into attention and MLP (megatron-core 0.18 and later).

Imported only where a pattern is given: earlier versions have no such model.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from hybrid_engine.backends.megatron.megatron_config import has_transformer_engine
from hybrid_engine.backends.megatron.specs import final_norm, gpt_layer
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.models.table import ModelTable


def build_hybrid_model(
    sizes: TrainParallelism, table: ModelTable, config: TransformerConfig, max_length: int, vp_stage: int | None
) -> HybridModel:
    """One chunk of this rank, of the modules that a GPTModel's layers have."""
    return HybridModel(
        config=config,
        hybrid_stack_spec=_stack_spec(config, has_transformer_engine()),
        vocab_size=sizes.padded_vocabulary(table.dims.vocab_size),
        hybrid_layer_pattern=sizes.hybrid_layer_pattern,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=table.dims.tied_embeddings,
        **{"max_sequence_length": max_length, **table.gpt},
        vp_stage=vp_stage,
    )


class _Stack(HybridStack):
    """HybridStack, whose final norm is the one given and not always Transformer Engine's."""

    def __init__(self, config: TransformerConfig, *args: Any, final_norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def _stack_spec(config: TransformerConfig, transformer_engine: bool) -> ModuleSpec:
    dense = gpt_layer(config, None, transformer_engine)
    attention = "mla_layer" if config.multi_latent_attention else "attention_layer"
    kinds = {attention: _attention_alone(dense), "mlp_layer": _mlp_alone(dense)}
    if config.num_moe_experts is not None:
        kinds["moe_layer"] = _mlp_alone(gpt_layer(config, config.num_moe_experts, transformer_engine))
    norm = final_norm(config, transformer_engine)
    return ModuleSpec(module=_Stack, params={"final_norm": norm}, submodules=HybridStackSubmodules(**kinds))


def _attention_alone(layer: ModuleSpec) -> ModuleSpec:
    parts = layer.submodules
    return ModuleSpec(
        module=layer.module,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.input_layernorm,
            self_attention=parts.self_attention,
            self_attn_bda=parts.self_attn_bda,
        ),
    )


def _mlp_alone(layer: ModuleSpec) -> ModuleSpec:
    parts = layer.submodules
    return ModuleSpec(
        module=layer.module,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
        ),
    )
