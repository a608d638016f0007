"""Layers of models for which megatron-core has specs with Transformer Engine only, or none.

The modules are megatron-core's, except for norms. Of the packages that megatron-core imports for
kernels, which no CPU runs, stand-ins in torch take the place: `l2norm` of flash-linear-attention,
scan and gated norm of mamba_ssm.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import gated_delta_net, mamba_block, mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from hybrid_engine.trainer.megatron.model_variants import ZeroCenteredRMSNorm


class NormOverHeads(torch.nn.Module):
    """RMSNorm over all heads of queries or keys, as in MiniMax-M2; `weight` has the elements of
    this rank's heads.
    """

    def __init__(
        self, num_heads: int, config: TransformerConfig, hidden_size: int, eps: float
    ) -> None:
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
    """Make vLLM's router on a CPU, which takes sigmoids for groups of experts only, take one group
    of all experts.

    A group of all experts is chosen always, so this is the routing of models without groups.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute = CPURouter._compute_routing

    def compute_by_groups(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return compute(self, *args, **kwargs)

    CPURouter._compute_routing = compute_by_groups


def with_norms_over_heads(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return layers with experts and attention whose queries and keys are normalized over all
    heads.
    """
    layer = _attention_layer(config)
    submodules = layer.submodules.self_attention.submodules
    for name, num_heads in (
        ("q_layernorm", config.num_attention_heads),
        ("k_layernorm", config.num_query_groups),
    ):
        setattr(submodules, name, ModuleSpec(NormOverHeads, params={"num_heads": num_heads}))
    norm = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)


def with_gated_delta_nets(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return layers with gated delta nets, of which every fourth has gated attention instead."""
    # A module, and since megatron-core 0.19 a package.
    imported = getattr(gated_delta_net, "common", gated_delta_net)
    imported.HAVE_FLA = True
    imported.l2norm = _l2norm
    layers = []
    for position in range(config.num_layers):
        layer = _attention_layer(config)
        modules = layer.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = ZeroCenteredRMSNorm
        attention = modules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ZeroCenteredRMSNorm
        if (position + 1) % config.linear_attention_freq:
            projections = gated_delta_net.GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear,
                out_norm=ZeroCenteredRMSNorm,
                out_proj=RowParallelLinear,
            )
            modules.self_attention = ModuleSpec(
                gated_delta_net.GatedDeltaNet, submodules=projections
            )
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ZeroCenteredRMSNorm)


def _attention_layer(config: TransformerConfig) -> ModuleSpec:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )


def _l2norm(values: torch.Tensor, eps: float = 1e-6, **_unused: Any) -> torch.Tensor:
    """Return values divided by their length along the last dim, as flash-linear-attention's
    function does.
    """
    return values * torch.rsqrt(values.float().pow(2).sum(-1, keepdim=True) + eps).type_as(values)


def one_block_per_layer(config: TransformerConfig) -> ModuleSpec:
    """Return the stack of a MambaModel, with Mamba, attention and MLP by megatron-core's local
    modules.
    """
    attention = _attention_layer(config).submodules
    norm = attention.input_layernorm
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GatedGroupNorm
    mamba_mixer.mamba_chunk_scan_combined = _scan
    # The module that has the class changed with megatron-core 0.18.
    sys.modules[mamba_block.MambaStack.__module__].TENorm = norm
    mixer = mamba_mixer.MambaMixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
    )
    return ModuleSpec(
        mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=norm,
                    mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=mixer),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=norm,
                    self_attention=attention.self_attention,
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=attention.pre_mlp_layernorm,
                    mlp=attention.mlp,
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
        ),
    )


class GatedGroupNorm(torch.nn.Module):
    """RMSNorm of groups after a gate, in place of mamba_ssm's `RMSNorm`, with its arguments."""

    def __init__(
        self, hidden: int, eps: float, group_size: int, dtype: torch.dtype, **_unused: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden, dtype=dtype))

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalize the last dim, in groups."""
        values = hidden.float() * torch.nn.functional.silu(gate.float())
        groups = values.unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        return (groups.flatten(-2) * self.weight.float()).type_as(hidden)


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    _chunk_size: int,
    **settings: Any,
) -> torch.Tensor:
    """Return the outputs of Mamba-2, token by token, in place of mamba_ssm's
    `mamba_chunk_scan_combined`.

    x: [batch, length, heads, head size]; dt: [batch, length, heads]; a: [heads]; b, c: [batch,
    length, groups, state].
    """
    steps = torch.nn.functional.softplus(dt.float() + settings["dt_bias"])
    per_group = x.shape[2] // b.shape[2]
    b, c = (values.float().repeat_interleave(per_group, dim=2) for values in (b, c))
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3], dtype=torch.float32)
    outputs = []
    for token in range(x.shape[1]):
        step = steps[:, token, :, None, None]
        added = x[:, token, :, :, None].float() * b[:, token, :, None, :]
        state = state * (step * a[:, None, None]).exp() + step * added
        outputs.append((state * c[:, token, :, None, :]).sum(-1))
    return (torch.stack(outputs, 1) + x.float() * settings["D"][:, None]).type_as(x)
