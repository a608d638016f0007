"""What some architectures compute and megatron-core has no setting for; `Extras` in `models/table.py` says which.

    extend(...)         changes the specs of layers before they are built
    finish_model(...)   changes a model chunk after it was built
    put_value_head(...) gives a value model its output layer

All work with megatron-core's own modules and with Transformer Engine's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from hybrid_engine.backends.megatron.internals import TopK, choose_experts, mark_sequence_parallel
from hybrid_engine.backends.megatron.megatron_config import scaled_frequencies
from hybrid_engine.models.table import Extras

WithBias = tuple[torch.Tensor, torch.Tensor | None]
"""A linear layer's output, and the bias that Megatron leaves to the caller to add."""


def extend(
    block: TransformerBlockSubmodules, extras: Extras, config: TransformerConfig, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Add windows, soft caps, rotary bases and post norms to Megatron's layers, as `extras` says.

    Norms get weights that are added to 1 where `config` says so; Transformer Engine's have that option themselves.
    `block` holds one spec per layer of the checkpoint.
    """
    own_norm = config.layernorm_zero_centered_gamma and not transformer_engine
    norm = ZeroCenteredRMSNorm if own_norm else block.layer_norm
    windows = extras.windows or (None,) * len(block.layer_specs)
    layers = []
    for layer, window in zip(block.layer_specs, windows, strict=True):
        layer = _with_attention(layer, extras, window)
        layer = _with_norms(layer, norm) if own_norm else layer
        if extras.post_norms:
            layer = replace(layer, module=PostNormLayer, params={**layer.params, "post_norm": norm})
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def finish_model(model: LanguageModule, extras: Extras) -> LanguageModule:
    """Scale rotary frequencies and embeddings, cap logits; returns the model. Called once, on a new model."""
    if extras.rotary_scaling is not None:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = scaled_frequencies(rotary.inv_freq, extras.rotary_scaling)
    if extras.embedding_scale is not None and model.pre_process:
        model.embedding.register_forward_hook(_scale_output(extras.embedding_scale))
    if extras.logit_softcap is not None and model.post_process:
        model.output_layer.register_forward_hook(_cap_logits(extras.logit_softcap))
    return model


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight, computed in float32. Accepts what Megatron passes to any norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        if config.sequence_parallel:
            mark_sequence_parallel(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Over the last dim."""
        values = hidden.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return (values * (1.0 + self.weight.float())).type_as(hidden)


class PostNormLayer(TransformerLayer):
    """A layer that normalises the outputs of attention and MLP before adding them to the residual.

    `post_norm` is the class of these norms; their names are those of slime and mbridge for GLM-4.
    """

    def __init__(self, config: TransformerConfig, *args: Any, post_norm: type, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        settings = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = post_norm(**settings)
        self.post_mlp_layernorm = post_norm(**settings)
        norms = {"self_attn_bda": self.post_self_attn_layernorm, "mlp_bda": self.post_mlp_layernorm}
        for name, norm in norms.items():
            setattr(self, name, _normed(getattr(self, name), norm))


class SelfAttentionWithRotaryBase(SelfAttention):
    """Self attention with unscaled rotary frequencies of its own base in place of the model's."""

    def __init__(self, config: TransformerConfig, *args: Any, rotary_base: float, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotary_pos_emb = RotaryEmbedding(
            config.kv_channels,
            rotary_percent=1.0,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )

    def forward(self, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As SelfAttention; of `rotary_pos_emb` [sequence, 1, 1, head_dim] only the length is used."""
        length = rotary_pos_emb.shape[0] * self.config.context_parallel_size
        return super().forward(*args, rotary_pos_emb=self.rotary_pos_emb(length), **kwargs)


class CappedSoftmax(torch.nn.Module):
    """Attention scores s become cap * tanh(s / cap), in float32, before they are masked and `softmax` is taken."""

    def __init__(self, softmax: torch.nn.Module, cap: float) -> None:
        super().__init__()
        self.softmax = softmax
        self.cap = cap

    def forward(self, scores: torch.Tensor, *masks: torch.Tensor | None) -> torch.Tensor:
        """As FusedScaleMaskSoftmax: scores [batch, heads, queries, keys]."""
        return self.softmax(_capped(scores.float(), self.cap), *masks)


def _with_attention(layer: ModuleSpec, extras: Extras, window: int | None) -> ModuleSpec:
    attention = layer.submodules.self_attention
    core = _core_attention(attention.submodules.core_attention, window, extras.attention_softcap)
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    if window is not None and extras.window_rotary_base is not None:
        params = {**attention.params, "rotary_base": extras.window_rotary_base}
        attention = replace(attention, module=SelfAttentionWithRotaryBase, params=params)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _core_attention(base: type, window: int | None, softcap: float | None) -> type[torch.nn.Module]:
    """The attention of one layer. Only megatron-core's own can be capped.

    Each layer has its own window, because Megatron's setting goes by layer numbers, which count no-op layers. A class,
    because megatron-core 0.15 would take a function for the attention itself.
    """

    parent: type = base if softcap is None else DotProductAttention
    own_window = window if issubclass(parent, DotProductAttention) else None

    class CoreAttention(parent):
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            config = copy.copy(config)
            # tokens before, tokens after
            config.window_size = None if window is None or own_window is not None else (window - 1, 0)
            config.window_attn_skip_freq = None
            super().__init__(config, *args, **kwargs)
            self.own_window = own_window
            if softcap is not None:
                self.scale_mask_softmax = CappedSoftmax(self.get_submodule("scale_mask_softmax"), softcap)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            """As the parent's. There a window is in place of `mask`, here it is added to it."""
            if self.own_window is not None:
                mask = _with_window(mask, self.own_window, key)
            return super().forward(query, key, value, mask, *args, **kwargs)

    return CoreAttention


def _with_window(mask: torch.Tensor | None, window: int, key: torch.Tensor) -> torch.Tensor:
    """`mask` [..., queries, keys], default: causal, True also where a key is `window` tokens before the query or more.

    `key` [keys, ...].
    """
    everywhere = torch.ones(len(key), len(key), dtype=torch.bool, device=key.device)
    mask = everywhere.triu(1)[None, None] if mask is None else mask
    return mask | everywhere.tril(-window)


def _with_norms(layer: ModuleSpec, norm: type) -> ModuleSpec:
    """The layer with every norm of class `norm`."""
    parts = layer.submodules
    attention = parts.self_attention
    names = [name for name in ("q_layernorm", "k_layernorm") if _is_there(getattr(attention.submodules, name))]
    attention = replace(attention, submodules=replace(attention.submodules, **dict.fromkeys(names, norm)))
    names = [name for name in ("input_layernorm", "pre_mlp_layernorm") if _is_there(getattr(parts, name))]
    return replace(layer, submodules=replace(parts, self_attention=attention, **dict.fromkeys(names, norm)))


def _is_there(part: Any) -> bool:
    return part is not None and part is not IdentityOp


def _normed(bias_dropout_add: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """Megatron's bias-dropout-add, with the output normalised, its bias included, before it is added."""

    def choose(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = bias_dropout_add(training, fused)

        def normalise_and_add(output_with_bias: WithBias, *residual_and_dropout: Any) -> torch.Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), *residual_and_dropout)

        return normalise_and_add

    return choose


def _scale_output(scale: float) -> Callable[..., torch.Tensor]:
    """A forward hook."""

    def hook(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.tensor(scale, dtype=output.dtype).item()

    return hook


def _cap_logits(cap: float) -> Callable[..., WithBias]:
    """A forward hook of Megatron's output layer."""

    def hook(_layer: torch.nn.Module, _inputs: Any, outputs: WithBias) -> WithBias:
        logits, bias = outputs
        return _capped(logits, cap), bias

    return hook


def _capped(values: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(values / cap)


def rank_groups(model: torch.nn.Module, extras: Extras) -> None:
    """Have the model's routers rank groups of experts as `extras.experts_per_group_score` says, if it does.

    Raises:
        ModelError: on a megatron-core before 0.16, whose routers have no such setting.
    """
    if extras.experts_per_group_score is None:
        return
    for module in model.modules():
        if isinstance(module, TopKRouter):
            choose_experts(module, partial(best_of_groups, extras.experts_per_group_score))


def best_of_groups(num_summed: int, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int) -> TopK:
    """Scores and numbers [tokens, topk] of the best experts in the `group_topk` groups with the largest sum of their
    `num_summed` best scores; `scores` [tokens, experts]."""
    groups = scores.unflatten(1, (num_groups, -1))  # [tokens, groups, experts of a group]
    rank = groups.topk(num_summed, dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(group_topk, dim=1).indices, True)
    # -inf keeps out experts of other groups, as long as the chosen groups together have topk experts
    return groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1).topk(topk, dim=1)


class ValueHead(torch.nn.Module):
    """Whole on every tensor parallel rank. Accepts what Megatron passes to any output layer.

    New ones are zero: every value is 0 until the head was trained, in any layout.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        if config.sequence_parallel:
            mark_sequence_parallel(self.weight)

    def forward(self, hidden: torch.Tensor, **_unused: Any) -> tuple[torch.Tensor, None]:
        """[s, b, hidden_size], a part of the sequence with sequence parallelism, to [S, b, 1] of all of it."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # every rank goes on with the whole, so that each has the whole gradient and takes its part of it
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(model: LanguageModule) -> None:
    """Replace the output layer of the chunk that has one."""
    if model.post_process:
        model.output_layer = ValueHead(model.config)
