"""Megatron's fused kernels, and recomputation: on where a GPU is and what they need, by Megatron's own conditions.

    setting                        needs                           left out
    bias_activation_fusion         SwiGLU                          GELU: the kernel's is the tanh approximation
    bias_dropout_fusion            nothing
    gradient_accumulation_fusion   apex, also with Transformer Engine: the output layer is Megatron's own
    apply_rope_fusion              Transformer Engine              latent attention, interleaved rotation
    recompute_granularity          no Transformer Engine           with it attention keeps no scores

masked_softmax_fusion stays off: its kernels ignore sliding windows, and with Transformer Engine there are no scores.
persist_layer_norm stays off: without apex Megatron's norms refuse it. cross_entropy_loss_fusion stays off: its backward
pass rounds to bfloat16 whatever the dtype, and it is compiled anew for other lengths. Kernels for experts
(moe_permute_fusion, moe_router_fusion) ask for recent versions of Transformer Engine. `actor_config.overrides` turns
all of them on and off, and `recompute_granularity` comes before what is said here. **Never run on a GPU yet.**
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

_OFF: dict[str, Any] = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}


def fusion_settings(settings: Mapping[str, Any], *, is_cuda: bool, with_te: bool) -> dict[str, Any]:
    """What of the table above is on.

    Args:
        settings: of Megatron's configuration that follow from the model.
        is_cuda: the model is on a GPU; elsewhere everything is off.
        with_te: layers are Transformer Engine's.
    """
    if not is_cuda:
        return _OFF
    is_latent, is_interleaved = settings.get("multi_latent_attention"), settings.get("rotary_interleaved")
    on = {
        "bias_activation_fusion": settings["activation_func"] is torch.nn.functional.silu
        and bool(settings.get("gated_linear_unit")),
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "apply_rope_fusion": with_te and not is_latent and not is_interleaved,
    }
    # a backward pass computes the scores of one layer again, in place of keeping those of all
    scores = {} if with_te else {"recompute_granularity": "selective"}
    return _OFF | on | scores
