"""Group "routers": counts of a router's tokens without padding.

megatron-core has to change one expression for each patch: the padding mask [tokens] gets a second
dim in `TopKRouter._apply_expert_bias`, and the number of tokens under a mask is at least 1.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.patch import Function, Patch, around

_MOE = "megatron.core.transformer.moe"


@around
def _apply_expert_bias(
    original: Function,
    router: Any,
    routing_map: torch.Tensor,
    padding_mask: torch.Tensor | None = None,
) -> None:
    # not the original, which is compiled for the device on import
    if router.enable_expert_bias and torch.is_grad_enabled():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += routing_map.sum(dim=0)


@around
def _count_tokens(original: Function, *args: Any, **kwargs: Any) -> Any:
    *counts, total = original(*args, **kwargs)
    # a number without a mask
    return *counts, total.clamp(min=1) if isinstance(total, torch.Tensor) else total


PATCHES = (
    Patch(
        "routers.expert_bias",
        "routers",
        f"{_MOE}.router:TopKRouter._apply_expert_bias",
        "combines its routing map [tokens, experts] with a padding mask [tokens], which fails",
        build=_apply_expert_bias,
        remove_when="the method adds a dimension to the padding mask",
    ),
    Patch(
        "routers.token_count",
        "routers",
        f"{_MOE}.moe_utils:get_tokens_per_expert_and_token_count",
        "counts 0 tokens in a micro batch of padding, by which auxiliary losses divide: NaN",
        build=_count_tokens,
        remove_when="auxiliary losses of a micro batch of padding are 0",
    ),
)
