"""Layer specs of megatron-core 0.19's HybridModel: each layer is either attention or MLP.

Import this module only for a configuration with `hybrid_layer_pattern`: earlier versions of
megatron-core have no such model.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from hybrid_engine.trainer.megatron.specs import final_norm, gpt_layer

__all__ = ["HybridModel", "stack_spec_for"]

# submodules of a GPT layer that each of its two halves keeps
_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")


class _Stack(HybridStack):
    """HybridStack with a selectable final norm; HybridStack always has Transformer Engine's."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        final_norm: Any,
        **kwargs: Any,
    ) -> None:
        # the parent builds no norm, but its forward pass applies this one
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = final_norm(
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )


def stack_spec_for(config: TransformerConfig, transformer_engine: bool) -> ModuleSpec:
    """Return the spec of a HybridModel's layers, made of the same modules as a GPTModel's."""
    dense = gpt_layer(config, None, transformer_engine)
    attention = "mla_layer" if config.multi_latent_attention else "attention_layer"
    layers = {attention: _part_of(dense, *_ATTENTION), "mlp_layer": _part_of(dense, *_MLP)}
    if config.num_moe_experts is not None:
        sparse = gpt_layer(config, config.num_moe_experts, transformer_engine)
        layers["moe_layer"] = _part_of(sparse, *_MLP)
    return ModuleSpec(
        module=_Stack,
        params={"final_norm": final_norm(config, transformer_engine)},
        submodules=HybridStackSubmodules(**layers),
    )


def _part_of(layer: ModuleSpec, *names: str) -> ModuleSpec:
    """Return the layer with only these submodules; Megatron replaces the others by identities."""
    submodules = {name: getattr(layer.submodules, name) for name in names}
    return ModuleSpec(module=layer.module, submodules=TransformerLayerSubmodules(**submodules))
