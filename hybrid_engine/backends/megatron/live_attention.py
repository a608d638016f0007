"""Description of the attention of a Megatron model's layers, for comparison with vLLM's.

Both functions return `compute_check.attention`:

    live_attention     attention of the modules on this rank
    latent_attention   latent attention (MLA) that megatron-core builds from a configuration
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.attention import Attention as MegatronAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention

from hybrid_engine.backends.megatron.forward_probe import is_of_transformer_engine
from hybrid_engine.backends.megatron.internals import score_factor_of_yarn, softmax_of, yarn_angles
from hybrid_engine.compute_check.attention import POSITIONS, Attention, Attentions, Rotary

_NOT_ROTATED = ("learned_absolute", "none")
_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Settings of YaRN with the same names in the configuration and in the rotary embedding."""


def live_attention(model: Any, positions: Sequence[int] = POSITIONS) -> Attentions:
    """Return the attention of a model chunk's decoder, by index of the layer in this chunk.

    Layers without attention are left out. If a core attention is neither megatron-core's nor
    Transformer Engine's, only the rotation before it is known.
    """
    attention = {}
    for index, layer in enumerate(model.decoder.layers):
        mixer = getattr(layer, "self_attention", None)
        if isinstance(mixer, MegatronAttention):
            core = mixer.core_attention
            softmax = getattr(core, "scale_mask_softmax", None)
            attention[index] = Attention(
                scale=_scale(core),
                window=_window(core),
                softcap=getattr(softmax, "cap", None),
                rotary=_rotary(model, mixer, positions),
            )
    return attention


def latent_attention(config: Any) -> Attention:
    """Return the latent attention that megatron-core computes with this MLATransformerConfig."""
    query_size = config.qk_head_dim + config.qk_pos_emb_head_dim
    score_factor = score_factor_of_yarn(config.rotary_scaling_factor, config.mscale_all_dim)
    settings = {"rotary_base": config.rotary_base, "use_cpu_initialization": True}
    rotary: Any = RotaryEmbedding(config.qk_pos_emb_head_dim, config.rotary_percent, **settings)
    if config.rope_type == "yarn":
        settings |= {name: getattr(config, name) for name in _YARN}
        settings["scaling_factor"] = config.rotary_scaling_factor
        rotary = YarnRotaryEmbedding(config.qk_pos_emb_head_dim, **settings)
    return Attention(scale=score_factor**2 / math.sqrt(query_size), rotary=rotary_of(rotary))


def rotary_of(module: Any, positions: Sequence[int] = POSITIONS) -> Rotary | None:
    """Return the rotation of a rotary embedding of megatron-core's; None for another module."""
    if isinstance(module, YarnRotaryEmbedding):
        return Rotary.of_frequencies(*yarn_angles(module), positions)
    if isinstance(module, RotaryEmbedding):
        # The second token's angles are the frequencies; `inv_freq` lacks the interpolation.
        return Rotary.of_frequencies(module.get_freqs_non_repeated(2)[1], positions=positions)
    return None


def _rotary(model: Any, mixer: MegatronAttention, positions: Sequence[int]) -> Rotary | None:
    """Return the rotation of a layer."""
    # Latent attention has a rotary embedding per layer; other layers share the model's.
    skips = getattr(mixer.config, "no_rope_freq", None)
    of_layer = getattr(mixer, "rotary_pos_emb", None)
    # `layer_number` counts from 1.
    is_skipped = isinstance(skips, list) and skips[mixer.layer_number - 1]
    if is_skipped or (of_layer is None and model.position_embedding_type in _NOT_ROTATED):
        return Rotary()
    return rotary_of(of_layer or getattr(model, "rotary_pos_emb", None), positions)


def _scale(core: torch.nn.Module) -> float | None:
    """Return the factor of the attention scores; None if it cannot be read."""
    if isinstance(core, DotProductAttention):
        # Megatron may split the factor between the product and the softmax.
        return core.softmax_scale * (softmax_of(core).scale or 1.0)
    if is_of_transformer_engine(core):
        unfused = getattr(core, "unfused_attention", None)
        return getattr(core, "softmax_scale", None) or getattr(unfused, "softmax_scale", None)
    return None


def _window(core: Any) -> int | None:
    """Return the number of tokens that a query sees; None if it sees all."""
    # trainer/megatron/model_variants.py sets this window, and adds it to the mask.
    mask_window = getattr(core, "own_window", None)
    is_local = isinstance(core, DotProductAttention)
    sizes = softmax_of(core).window_size if is_local else getattr(core, "window_size", None)
    if mask_window is not None or sizes is None or sizes[0] < 0:
        return mask_window
    # Megatron counts the tokens before the query, without the query itself.
    return sizes[0] + 1
