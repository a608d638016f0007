"""Features of some architectures for which megatron-core has no setting.

    extend(...)        changes the specs of layers before they are built
    rank_groups(...)   replaces the selection of experts in routers
    finish_model(...)  changes a model chunk after it was built
    ValueHead          output layer of a value model

`Extras` in `models/table.py` selects the features. All of them work with megatron-core's own
modules and with Transformer Engine's.
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

from hybrid_engine.backends.megatron.internals import TopK, chooser_of, mark_sequence_parallel
from hybrid_engine.backends.megatron.megatron_config import scaled_frequencies
from hybrid_engine.models.table import Extras

WithBias = tuple[torch.Tensor, torch.Tensor | None]
"""Output of a linear layer, and the bias that Megatron leaves to the caller to add."""


# -- specs of layers -------------------------------------------------------------------------------


def extend(
    block: TransformerBlockSubmodules,
    extras: Extras,
    config: TransformerConfig,
    transformer_engine: bool,
) -> TransformerBlockSubmodules:
    """Add windows, soft caps, rotary bases and post norms to Megatron's layers.

    If `config` requires norms that multiply by 1 + weight, megatron-core's norms are replaced;
    Transformer Engine's have an option for it.

    Args:
        block: one spec per layer of the checkpoint.
        extras: features to add.
        config: of the model.
        transformer_engine: the layers are Transformer Engine's.
    """
    replaces_norms = config.layernorm_zero_centered_gamma and not transformer_engine
    norm = ZeroCenteredRMSNorm if replaces_norms else block.layer_norm
    windows = extras.windows or (None,) * len(block.layer_specs)
    layers = []
    for layer, window in zip(block.layer_specs, windows, strict=True):
        layer = _with_attention(layer, extras, window)
        if replaces_norms:
            layer = _with_norms(layer, norm)
        if extras.post_norms:
            layer = replace(layer, module=PostNormLayer, params={**layer.params, "post_norm": norm})
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _with_attention(layer: ModuleSpec, extras: Extras, window: int | None) -> ModuleSpec:
    """Return the layer with `window`, soft cap and rotary base in its attention."""
    attention = layer.submodules.self_attention
    core = _core_attention(attention.submodules.core_attention, window, extras.attention_softcap)
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    if window is not None and extras.window_rotary_base is not None:
        params = {**attention.params, "rotary_base": extras.window_rotary_base}
        attention = replace(attention, module=SelfAttentionWithRotaryBase, params=params)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _with_norms(layer: ModuleSpec, norm: type) -> ModuleSpec:
    """Return the layer with each of its norms replaced by the class `norm`."""
    submodules = layer.submodules
    attention = submodules.self_attention
    attention_norms = _norms_among(attention.submodules, "q_layernorm", "k_layernorm")
    attention = replace(
        attention,
        submodules=replace(attention.submodules, **dict.fromkeys(attention_norms, norm)),
    )
    layer_norms = _norms_among(submodules, "input_layernorm", "pre_mlp_layernorm")
    return replace(
        layer,
        submodules=replace(
            submodules,
            self_attention=attention,
            **dict.fromkeys(layer_norms, norm),
        ),
    )


def _norms_among(submodules: Any, *names: str) -> list[str]:
    """Return the names of norms that the submodules have; an identity stands for none."""
    return [name for name in names if getattr(submodules, name) not in (None, IdentityOp)]


# -- modules of layers -----------------------------------------------------------------------------


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight, computed in float32.

    Accepts the arguments that Megatron passes to any norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        if config.sequence_parallel:
            mark_sequence_parallel(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize over the last dim."""
        values = hidden.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return (values * (1.0 + self.weight.float())).type_as(hidden)


class PostNormLayer(TransformerLayer):
    """Layer that normalizes the outputs of attention and MLP before adding them to the residual.

    `post_norm` is the class of these norms; their names are those of slime and mbridge for GLM-4.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        post_norm: type,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        settings = {
            "config": config,
            "hidden_size": config.hidden_size,
            "eps": config.layernorm_epsilon,
        }
        self.post_self_attn_layernorm = post_norm(**settings)
        self.post_mlp_layernorm = post_norm(**settings)
        # Megatron adds an output to the residual through these attributes
        norms = {"self_attn_bda": self.post_self_attn_layernorm, "mlp_bda": self.post_mlp_layernorm}
        for name, norm in norms.items():
            setattr(self, name, _normalized(getattr(self, name), norm))


def _normalized(bias_dropout_add: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """Return Megatron's bias-dropout-add with the output, including its bias, normalized first."""

    def choose(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = bias_dropout_add(training, fused)

        def normalize_and_add(
            output_with_bias: WithBias,
            *residual_and_dropout: Any,
        ) -> torch.Tensor:
            output, bias = output_with_bias
            normalized = norm(output if bias is None else output + bias)
            return add((normalized, None), *residual_and_dropout)

        return normalize_and_add

    return choose


class SelfAttentionWithRotaryBase(SelfAttention):
    """Self attention with its own rotary base, unscaled, instead of the model's frequencies."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        rotary_base: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotary_pos_emb = RotaryEmbedding(
            config.kv_channels,
            rotary_percent=1.0,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; only the length of `rotary_pos_emb` [sequence, 1, 1, head_dim] is used."""
        length = rotary_pos_emb.shape[0] * self.config.context_parallel_size
        return super().forward(*args, rotary_pos_emb=self.rotary_pos_emb(length), **kwargs)


class CappedSoftmax(torch.nn.Module):
    """Softmax of attention scores s that are first replaced by cap * tanh(s / cap), in float32.

    `softmax` also applies the mask.
    """

    def __init__(self, softmax: torch.nn.Module, cap: float) -> None:
        super().__init__()
        self.softmax = softmax
        self.cap = cap

    def forward(self, scores: torch.Tensor, *masks: torch.Tensor | None) -> torch.Tensor:
        """Return probabilities of scores [batch, heads, queries, keys].

        Has the arguments of FusedScaleMaskSoftmax.
        """
        return self.softmax(_capped(scores.float(), self.cap), *masks)


def _core_attention(base: type, window: int | None, softcap: float | None) -> type[torch.nn.Module]:
    """Return the attention class of one layer.

    Only megatron-core's own attention supports soft caps. Each layer gets its own window, because
    Megatron's setting depends on layer numbers, which count no-op layers. It is a class, because
    megatron-core 0.15 would take a function for the attention itself.
    """

    parent: type = base if softcap is None else DotProductAttention
    # megatron-core ignores masks in layers with a window, so the window is added to the mask here
    own_window = window if issubclass(parent, DotProductAttention) else None

    class CoreAttention(parent):
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            config = copy.copy(config)
            config.window_size = None
            if window is not None and own_window is None:
                # tokens before, tokens after
                config.window_size = (window - 1, 0)
            config.window_attn_skip_freq = None
            super().__init__(config, *args, **kwargs)
            self.own_window = own_window
            if softcap is not None:
                # built by the parent
                softmax = self.get_submodule("scale_mask_softmax")
                self.scale_mask_softmax = CappedSoftmax(softmax, softcap)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            """Attend as the parent, with the window in addition to `mask`."""
            if self.own_window is not None:
                # True where a query must not see a key, which `None` says of all later ones.
                everywhere = torch.ones(len(key), len(key), dtype=torch.bool, device=key.device)
                mask = everywhere.triu(1)[None, None] if mask is None else mask
                # The window includes the query's own token.
                # With a window of 2, query 3 sees keys 2 and 3: tril(-2) hides 0 and 1.
                mask = mask | everywhere.tril(-self.own_window)
            return super().forward(query, key, value, mask, *args, **kwargs)

    return CoreAttention


def _capped(values: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(values / cap)


# -- models ----------------------------------------------------------------------------------------


def finish_model(model: LanguageModule, extras: Extras) -> LanguageModule:
    """Scale rotary frequencies and embeddings, and cap logits. Returns the model.

    Call it once, on a new model.
    """
    if extras.rotary_scaling is not None:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = scaled_frequencies(rotary.inv_freq, extras.rotary_scaling)
    if extras.embedding_scale is not None and model.pre_process:
        model.embedding.register_forward_hook(partial(_scale_output, extras.embedding_scale))
    if extras.logit_softcap is not None and model.post_process:
        model.output_layer.register_forward_hook(partial(_cap_logits, extras.logit_softcap))
    return model


def _scale_output(
    scale: float,
    _module: torch.nn.Module,
    _inputs: Any,
    output: torch.Tensor,
) -> torch.Tensor:
    """Scale the output of a module: a forward hook."""
    # rounded to the output's dtype first, as transformers does
    # Gemma 7B multiplies by 3072**0.5 = 55.43, in bfloat16 by 55.5.
    return output * torch.tensor(scale, dtype=output.dtype).item()


def _cap_logits(cap: float, _layer: torch.nn.Module, _inputs: Any, outputs: WithBias) -> WithBias:
    """Cap the logits: a forward hook of Megatron's output layer."""
    logits, bias = outputs
    return _capped(logits, cap), bias


def rank_groups(model: torch.nn.Module, extras: Extras) -> None:
    """Make the model's routers rank groups of experts by `extras.experts_per_group_score`, if set.

    Raises ModelError on a megatron-core before 0.16, whose routers have no such setting.
    """
    if extras.experts_per_group_score is None:
        return
    for module in model.modules():
        if isinstance(module, TopKRouter):
            chooser_of(module).choose = partial(best_of_groups, extras.experts_per_group_score)


def best_of_groups(
    num_summed: int,
    scores: torch.Tensor,
    topk: int,
    num_groups: int,
    group_topk: int,
) -> TopK:
    """Return scores and numbers [tokens, topk] of the best experts in the best groups.

    Args:
        num_summed: the score of a group is the sum of this many of its best scores.
        scores: [tokens, experts].
        topk: number of experts to select.
        num_groups: number of groups.
        group_topk: number of groups from which experts are selected.
    """
    groups = scores.unflatten(1, (num_groups, -1))  # [tokens, groups, experts of a group]
    group_scores = groups.topk(num_summed, dim=-1).values.sum(dim=-1)
    best_groups = group_scores.topk(group_topk, dim=1).indices
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, True)
    # -inf excludes experts of other groups if the best groups together have at least topk experts
    eligible = groups.masked_fill(~is_best.unsqueeze(-1), float("-inf"))
    return eligible.flatten(1).topk(topk, dim=1)


class ValueHead(torch.nn.Module):
    """Output layer with one value per token, unsharded on every tensor parallel rank.

    Its weights start at zero, so every value is 0 until the head was trained, in any layout.
    Accepts the arguments that Megatron passes to any output layer.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.sequence_parallel = config.sequence_parallel
        if config.sequence_parallel:
            mark_sequence_parallel(self.weight)

    def forward(self, hidden: torch.Tensor, **_unused: Any) -> tuple[torch.Tensor, None]:
        """Return values [S, b, 1] of hidden states [s, b, hidden_size].

        With sequence parallelism s is this rank's part of the sequence S.
        """
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # all ranks compute the same loss from all values, so each of them has the complete
            # gradient, and takes its part of it
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
