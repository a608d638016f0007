"""The attention of a Megatron model's layers, to be compared with vLLM's (`probes.Attention`).

live_attention     what the modules of this rank compute
latent_attention   what megatron-core would build by a configuration with latent attention (MLA)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.attention import Attention as MegatronAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention

from hybrid_engine.backends.megatron.forward_probe import is_of_transformer_engine
from hybrid_engine.backends.megatron.internals import score_factor_of_yarn, softmax_of, yarn_angles
from hybrid_engine.probes import Attention, Rotary

_NOT_ROTATED = ("learned_absolute", "none")


def live_attention(model: Any) -> dict[int, Attention]:
    """Return the attention of a model chunk's decoder, by index of the layer in this chunk.

    Layers without attention are left out. Of a core attention that is neither megatron-core's nor
    Transformer Engine's nothing is known but the rotation before it.
    """
    attention = {}
    for index, layer in enumerate(model.decoder.layers):
        mixer = getattr(layer, "self_attention", None)
        if isinstance(mixer, MegatronAttention):
            attention[index] = Attention(
                scale=_scale(mixer.core_attention),
                window=_window(mixer.core_attention),
                softcap=getattr(getattr(mixer.core_attention, "scale_mask_softmax", None), "cap", None),
                rotary=_rotary(model, mixer),
            )
    return attention


def latent_attention(config: Any) -> Attention:
    """Return what megatron-core's latent attention computes by this MLATransformerConfig."""
    query_size = config.qk_head_dim + config.qk_pos_emb_head_dim
    score_factor = score_factor_of_yarn(config.rotary_scaling_factor, config.mscale_all_dim)
    settings = {"rotary_base": config.rotary_base, "use_cpu_initialization": True}
    if config.rope_type == "yarn":
        settings |= {
            "scaling_factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
        }
        rotary = YarnRotaryEmbedding(config.qk_pos_emb_head_dim, **settings)
    else:
        rotary = RotaryEmbedding(config.qk_pos_emb_head_dim, config.rotary_percent, **settings)
    return Attention(scale=score_factor**2 / math.sqrt(query_size), rotary=rotary_of(rotary))


def rotary_of(module: Any) -> Rotary | None:
    """Return what a rotary embedding of megatron-core's computes; None for another module."""
    if isinstance(module, YarnRotaryEmbedding):
        angles, scale = yarn_angles(module)
        return Rotary(tuple(angles.tolist()), scale)
    if isinstance(module, RotaryEmbedding):
        # the angles of the second token: interpolation is not in `inv_freq`
        return Rotary(tuple(module.get_freqs_non_repeated(2)[1].tolist()))
    return None


def _rotary(model: Any, mixer: MegatronAttention) -> Rotary | None:
    """Rotation of one layer: by a module of its own, as latent attention has, else by the model's."""
    skips = mixer.config.no_rope_freq if hasattr(mixer.config, "no_rope_freq") else None
    if model.position_embedding_type in _NOT_ROTATED and not hasattr(mixer, "rotary_pos_emb"):
        return Rotary()
    if isinstance(skips, list) and skips[mixer.layer_number - 1]:
        return Rotary()
    return rotary_of(getattr(mixer, "rotary_pos_emb", None) or getattr(model, "rotary_pos_emb", None))


def _scale(core: torch.nn.Module) -> float | None:
    """Factor of the attention scores; None where it cannot be read."""
    if isinstance(core, DotProductAttention):
        return core.softmax_scale * (softmax_of(core).scale or 1.0)  # it may be split into two factors
    if is_of_transformer_engine(core):
        return getattr(core, "softmax_scale", None) or getattr(
            getattr(core, "unfused_attention", None), "softmax_scale", None
        )
    return None


def _window(core: Any) -> int | None:
    """Tokens that a query sees; None where it sees all."""
    own = getattr(core, "own_window", None)  # added to the mask by trainer/megatron/model_variants.py
    sizes = (
        softmax_of(core).window_size if isinstance(core, DotProductAttention) else getattr(core, "window_size", None)
    )
    if own is not None or sizes is None or sizes[0] < 0:
        return own
    return sizes[0] + 1
