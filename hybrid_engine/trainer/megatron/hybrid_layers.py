"""Megatron's HybridModel: the layers of a GPT, taken apart into attention and MLP (megatron-core 0.19).

Imported only where a pattern is given: earlier versions have no such model.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from hybrid_engine.trainer.megatron.specs import final_norm, gpt_layer

__all__ = ["HybridModel", "stack_spec_for"]

_ATTENTION, _MLP = ("input_layernorm", "self_attention", "self_attn_bda"), ("pre_mlp_layernorm", "mlp", "mlp_bda")
"""Submodules of a GPT's layer that each of the two keeps."""


class _Stack(HybridStack):
    """HybridStack, whose final norm is the one given and not always Transformer Engine's."""

    def __init__(self, config: TransformerConfig, *args: Any, final_norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def stack_spec_for(config: TransformerConfig, transformer_engine: bool) -> ModuleSpec:
    """The layers of a HybridModel, of the modules that a GPTModel's have."""
    dense = gpt_layer(config, None, transformer_engine)
    attention = "mla_layer" if config.multi_latent_attention else "attention_layer"
    kinds = {attention: _alone(dense, *_ATTENTION), "mlp_layer": _alone(dense, *_MLP)}
    if config.num_moe_experts is not None:
        kinds["moe_layer"] = _alone(gpt_layer(config, config.num_moe_experts, transformer_engine), *_MLP)
    norm = final_norm(config, transformer_engine)
    return ModuleSpec(module=_Stack, params={"final_norm": norm}, submodules=HybridStackSubmodules(**kinds))


def _alone(layer: ModuleSpec, *parts: str) -> ModuleSpec:
    """A layer with these of another's parts, and no others."""
    kept = {name: getattr(layer.submodules, name) for name in parts}
    return ModuleSpec(module=layer.module, submodules=TransformerLayerSubmodules(**kept))
