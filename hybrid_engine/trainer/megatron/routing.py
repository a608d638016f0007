"""Group-limited routing as DeepSeek's models do it, where megatron-core does it otherwise.

A token goes to experts of a few groups only. megatron-core ranks the groups by the sum of their top k // g scores (k
experts of g groups are chosen), DeepSeek-V2 by the best one and DeepSeek-V3 by the sum of the best two, whatever k
and g are.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.transformer.moe.router import TopKRouter

from hybrid_engine.backends.megatron.internals import TopK, choose_experts
from hybrid_engine.models.variants import Extras


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
