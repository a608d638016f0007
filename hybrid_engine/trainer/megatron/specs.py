"""Modules of which the layers of a model consist: megatron-core's own, or Transformer Engine's.

layer_spec_for(...)   layers of one pipeline stage, including no-op layers
mtp_spec_for(...)     MTP layers, on the stage that has them
"""

from __future__ import annotations

from collections.abc import Collection
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
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from hybrid_engine.models.table import ModelTable
from hybrid_engine.trainer.megatron.model_variants import extend


def layer_spec_for(
    table: ModelTable,
    config: TransformerConfig,
    transformer_engine: bool,
    vp_stage: int | None,
    noop_layers: Collection[int],
) -> TransformerBlockSubmodules:
    """Return the layers that this rank builds for virtual stage `vp_stage`.

    `noop_layers`: positions (from 0) of layers that return their input; `config.num_layers` counts
    them, but the checkpoint does not have them.
    """
    whole_model = _whole_model(table, config, transformer_engine)
    # 4 positions with a no-op at 1: layers 0, none, 1, 2 of the checkpoint.
    layers = iter(whole_model.layer_specs)
    by_position = [
        _NOOP if position in noop_layers else next(layers) for position in range(config.num_layers)
    ]
    return TransformerBlockSubmodules(
        layer_specs=[by_position[position] for position in _positions_of_stage(config, vp_stage)],
        layer_norm=whole_model.layer_norm,
    )


def mtp_spec_for(
    table: ModelTable,
    config: TransformerConfig,
    transformer_engine: bool,
    vp_stage: int | None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the MTP layers of this stage, built like the last layer; None if it has none."""
    if not config.mtp_num_layers:
        return None
    last_layer = _whole_model(table, config, transformer_engine).layer_specs[-1]
    return get_gpt_mtp_block_spec(
        config,
        last_layer,
        use_transformer_engine=transformer_engine,
        vp_stage=vp_stage,
    )


def _whole_model(
    table: ModelTable,
    config: TransformerConfig,
    transformer_engine: bool,
) -> TransformerBlockSubmodules:
    """Return a spec per layer of the checkpoint, and the final norm.

    They are Megatron's GPT layers, dense or with experts, with grouped-query or latent attention,
    and with the changes of `table.extras`.
    """
    dense = gpt_layer(config, None, transformer_engine)
    if config.num_moe_experts is None:
        layers = [dense] * table.dims.num_layers
    else:
        # moe_layer_freq has 1 for a layer with experts and 0 for a dense one
        sparse = gpt_layer(config, config.num_moe_experts, transformer_engine)
        layers = [
            sparse if has_experts else dense for has_experts in table.transformer["moe_layer_freq"]
        ]
    block = TransformerBlockSubmodules(
        layer_specs=layers, layer_norm=final_norm(config, transformer_engine)
    )
    if not table.extends_layers:
        return block
    return extend(block, table.extras, config, transformer_engine)


def final_norm(config: TransformerConfig, transformer_engine: bool) -> type:
    """Return the class of the norm after the last layer."""
    if transformer_engine:
        return TESpecProvider().layer_norm()
    return LocalSpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")


def gpt_layer(
    config: TransformerConfig,
    num_experts: int | None,
    transformer_engine: bool,
) -> ModuleSpec:
    """Return the spec of a Megatron GPT layer with `num_experts` experts; None: a dense layer."""
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
        # Megatron returns a new spec, which may be changed
        attention = layer.submodules.self_attention
        attention.module = LatentAttention
        if not transformer_engine:
            attention.submodules.core_attention = LatentDotProductAttention
    return layer


class LatentAttention(MLASelfAttention):
    """megatron-core's latent attention with exactly the modules of its spec.

    Since 0.19 megatron-core selects the norms itself. If queries are not compressed (`q_lora_rank`
    None) it adds a norm before their projection, which no such model has, or rejects the local
    spec.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = (
            "linear_q_proj",
            "linear_q_up_proj",
            "linear_kv_up_proj",
            "q_layernorm",
            "kv_layernorm",
        )
        return {name: getattr(submodules, name) for name in names}


class LatentDotProductAttention(DotProductAttention):
    """megatron-core's dot-product attention for latent attention.

    Works around two defects of 0.16 to 0.19:

    1. Queries and keys have one head size, values another. megatron-core's class does not accept
       these sizes, and does not need them if `config.kv_channels` is the size of a value.
    2. All heads share the rotary part of the key. The local layer spec splits its projection over
       tensor parallel ranks and gathers the result, but omits the gradient of other ranks' heads;
       here it is summed over all ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        # Megatron first builds an instance without sizes, and then replaces it
        assert v_channels in (None, config.kv_channels), (v_channels, config.kv_channels)
        super().__init__(config, *args, **kwargs)
        self._tp_group = parallel_state.get_tensor_model_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend.

        `query` and `key`: [sequence, batch, heads, qk_head_dim + qk_pos_emb_head_dim].
        """
        sizes = [self.config.qk_head_dim, self.config.qk_pos_emb_head_dim]
        unrotated, rotary = key.split(sizes, dim=-1)
        rotary = _SumGradient.apply(rotary, self._tp_group)
        return super().forward(query, torch.cat([unrotated, rotary], dim=-1), *args, **kwargs)


class _SumGradient(torch.autograd.Function):
    """Identity with a gradient that is summed over the ranks of a group, which share the value.

    megatron-core's function for this omits the sum if the gradient is not contiguous.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        group: torch.distributed.ProcessGroup,
    ) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # a copy, because the sum is in place
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _positions_of_stage(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """Return the positions of the layers of this stage, from 0, including no-op layers."""
    layout = config.pipeline_model_parallel_layout
    # an explicit layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return list(range(first, first + num_layers))


_NOOP = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
"""Layer that returns its input: each of its modules is Megatron's identity."""
