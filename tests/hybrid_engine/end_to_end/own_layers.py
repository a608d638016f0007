"""Layers of models for which megatron-core has specs with Transformer Engine only, or none.

The modules are megatron-core's, except for norms, and for `l2norm` of flash-linear-attention, which gated delta nets
import: no CPU runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from hybrid_engine.trainer.megatron.model_variants import ZeroCenteredRMSNorm


class NormOverHeads(torch.nn.Module):
    """RMSNorm over all heads of queries or keys, as in MiniMax-M2; `weight` has the elements of this rank's heads."""

    def __init__(self, num_heads: int, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.size = num_heads * hidden_size
        num_local = self.size // config.tensor_model_parallel_size
        self.weight: Any = torch.nn.Parameter(torch.ones(num_local, dtype=config.params_dtype))
        self.weight.tensor_model_parallel = True

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize [sequence, batch, local heads, head_dim]."""
        values = heads.float().flatten(2)
        total = values.detach().pow(2).sum(-1, keepdim=True)
        torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        values = values * torch.rsqrt(total / self.size + self.eps)
        return (values * self.weight.float()).view_as(heads).type_as(heads)


def let_vllm_route_by_sigmoids() -> None:
    """Make vLLM's router on a CPU, which takes sigmoids for groups of experts only, take one group of all experts.

    A group of all experts is chosen always, so this is the routing of models without groups.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute: Any = CPURouter._compute_routing

    def compute_by_groups(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return compute(self, *args, **kwargs)

    CPURouter._compute_routing = compute_by_groups


def with_norms_over_heads(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return layers with experts and attention whose queries and keys are normalized over all heads."""
    layer = _attention_layer(config)
    submodules = layer.submodules.self_attention.submodules
    for name, num_heads in (("q_layernorm", config.num_attention_heads), ("k_layernorm", config.num_query_groups)):
        setattr(submodules, name, ModuleSpec(NormOverHeads, params={"num_heads": num_heads}))
    norm = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)


def with_gated_delta_nets(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return layers with gated delta nets, of which every fourth has gated attention instead."""
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = _l2norm
    layers = []
    for position in range(config.num_layers):
        layer = _attention_layer(config)
        modules = layer.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = ZeroCenteredRMSNorm
        attention = modules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ZeroCenteredRMSNorm
        if (position + 1) % config.linear_attention_freq:
            projections = gated_delta_net.GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear, out_norm=ZeroCenteredRMSNorm, out_proj=RowParallelLinear
            )
            modules.self_attention = ModuleSpec(gated_delta_net.GatedDeltaNet, submodules=projections)
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ZeroCenteredRMSNorm)


def _attention_layer(config: TransformerConfig) -> ModuleSpec:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )


def _l2norm(values: torch.Tensor, eps: float = 1e-6, **_unused: Any) -> torch.Tensor:
    """Return values divided by their length along the last dim, as flash-linear-attention's function does."""
    return values * torch.rsqrt(values.float().pow(2).sum(-1, keepdim=True) + eps).type_as(values)
