"""Which modules the layers of a model consist of, with megatron-core's own modules or with Transformer Engine's.

LAYER_SPECS[table.layer_spec]   the whole model: one spec for each layer of the checkpoint, and the final norm
layer_spec_for(...)             what one pipeline stage builds of it, no-op layers included
mtp_spec_for(...)               the MTP layers, on the stage that has them
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from hybrid_engine.models.table import ModelTable
from hybrid_engine.trainer.megatron.model_variants import extend

LayerSpec = Callable[[ModelTable, TransformerConfig, bool], TransformerBlockSubmodules]
"""(table, config, whether to use Transformer Engine) -> one spec per layer of the checkpoint, and the final norm."""


def layer_spec_for(
    table: ModelTable,
    config: TransformerConfig,
    transformer_engine: bool,
    vp_stage: int | None,
    noop_layers: Collection[int] = (),
) -> TransformerBlockSubmodules:
    """The layers that this rank builds for virtual stage `vp_stage`.

    `noop_layers` are positions (from 0) of layers that pass their input on; `config.num_layers` counts them.
    """
    whole = LAYER_SPECS[table.layer_spec](table, config, transformer_engine)
    layers = iter(whole.layer_specs)
    positions = [_NOOP if position in noop_layers else next(layers) for position in range(config.num_layers)]
    built = (positions[position] for position in _positions_of_stage(config, vp_stage))
    return TransformerBlockSubmodules(layer_specs=list(built), layer_norm=whole.layer_norm)


def mtp_spec_for(
    table: ModelTable, config: TransformerConfig, transformer_engine: bool, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The MTP layers of this stage, made like the decoder's last layer; None where it has none."""
    if not config.mtp_num_layers:
        return None
    last_layer = LAYER_SPECS[table.layer_spec](table, config, transformer_engine).layer_specs[-1]
    return get_gpt_mtp_block_spec(config, last_layer, use_transformer_engine=transformer_engine, vp_stage=vp_stage)


def _default(table: ModelTable, config: TransformerConfig, transformer_engine: bool) -> TransformerBlockSubmodules:
    """Megatron's GPT layers: dense or with experts, with grouped-query or with latent attention."""
    dense = gpt_layer(config, None, transformer_engine)
    if config.num_moe_experts is None:
        layers = [dense] * table.dims.num_layers
    else:
        sparse = gpt_layer(config, config.num_moe_experts, transformer_engine)
        layers = [sparse if has_experts else dense for has_experts in table.transformer["moe_layer_freq"]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm(config, transformer_engine))


def _extended(table: ModelTable, config: TransformerConfig, transformer_engine: bool) -> TransformerBlockSubmodules:
    """Megatron's GPT layers with the changes of `table.extras`."""
    return extend(_default(table, config, transformer_engine), table.extras, config, transformer_engine)


def final_norm(config: TransformerConfig, transformer_engine: bool) -> type:
    """The class of the norm after the last layer."""
    if transformer_engine:
        return TESpecProvider().layer_norm()
    return LocalSpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")


def gpt_layer(config: TransformerConfig, num_experts: int | None, transformer_engine: bool) -> ModuleSpec:
    """One of Megatron's GPT layers, with experts or (None) without."""
    settings = {
        "num_experts": num_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if transformer_engine:
        layer = get_gpt_layer_with_transformer_engine_spec(**settings)
    else:
        layer = get_gpt_layer_local_spec(**settings, normalization=config.normalization)
    if config.multi_latent_attention:
        attention = layer.submodules.self_attention
        attention.module = LatentAttention
        if not transformer_engine:
            attention.submodules.core_attention = LatentDotProductAttention
    return layer


class LatentAttention(MLASelfAttention):
    """megatron-core's own, of exactly the modules that the spec names.

    Since 0.19 it chooses the norms itself, and where queries are not compressed (`q_lora_rank` None) it puts one before
    their projection, which no such model has, or refuses the local spec.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _CHOSEN_BY_MEGATRON}


_CHOSEN_BY_MEGATRON = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentDotProductAttention(DotProductAttention):
    """megatron-core's own attention as latent attention needs it, with two defects of 0.16 to 0.19 worked around.

    Queries and keys have one head size, values another. megatron-core's class does not accept these sizes, and does not
    need them where `config.kv_channels` is the size of a value.

    All heads share the rotary part of the key. The local layer spec splits the projection that makes it over tensor
    parallel ranks and gathers it, but leaves out the gradient of other ranks' heads; here it is summed over all ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        # Megatron first builds one without sizes, and then replaces it
        assert v_channels in (None, config.kv_channels), (v_channels, config.kv_channels)
        super().__init__(config, *args, **kwargs)
        self._sharing = parallel_state.get_tensor_model_parallel_group()

    def forward(self, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`query` and `key` [sequence, batch, heads, qk_head_dim + qk_pos_emb_head_dim]."""
        own, rotary = key.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        rotary = _SharedByRanks.apply(rotary, self._sharing)
        return super().forward(query, torch.cat([own, rotary], dim=-1), *args, **kwargs)


class _SharedByRanks(torch.autograd.Function):
    """Identity, whose gradient is summed over the ranks of a group, all of which use the value.

    megatron-core's own function for this skips the sum where the gradient is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _positions_of_stage(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


_NOOP = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
"""A layer that passes its input on: every part of it is Megatron's identity."""

# A family whose layers are not Megatron's GPT layers registers them here, under the name in its table's `layer_spec`.
LAYER_SPECS: dict[str, LayerSpec] = {"default": _default, "extended": _extended}
