"""Private names of megatron-core that the backend uses, each with its reason.

Tests look every name up in the installed megatron-core; `nox -s core-tests` does so in each supported version. What
replaces a name of Megatron's at run time is a patch record, in `megatron_patches`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, _yarn_get_mscale
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from hybrid_engine.ranks.torch_internals import PrivateName

_EMBEDDINGS = "megatron.core.models.common.embeddings"

PRIVATE_NAMES = (
    PrivateName(
        "megatron.core.parallel_state:_global_process_group_list",
        "lists Megatron's process groups, which destroy_model_parallel() forgets without ending them",
    ),
    PrivateName(
        "megatron.core.parallel_state:_GLOBAL_MEMORY_BUFFER",
        "is None where there is no memory buffer: get_global_memory_buffer() asserts that there is one",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.forward.cache_clear",
        "keeps embeddings of every sequence length on the device, in an lru_cache",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward.cache_clear",
        "as RotaryEmbedding.forward",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.get_emb",
        "computes the angles of YaRN, which no attribute has: its `inv_freq` is unscaled",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:_yarn_get_mscale",
        "is the square root of the factor by which latent attention with YaRN scales its scores",
    ),
    PrivateName(
        "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher._comm_manager",
        "keeps routing maps and probabilities of the last forward pass",
    ),
    PrivateName(
        "megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias",
        "undoes Float16Module's rounding of the biases; left to the first forward pass it would give them new storage",
    ),
    PrivateName(
        "megatron.core.transformer.moe.router:TopKRouter.router_replay",
        "chooses the experts where it is set: the only way to rank groups of experts by another score",
    ),
    PrivateName(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention._resolve_qk_norm_config",
        "chooses other modules than the spec names where queries are not compressed: specs.py overrides it",
        since="0.19.0",
    ),
    PrivateName(
        "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward_torch_softmax",
        "takes its window in place of the mask that it is given; a fused kernel takes none: see softmax_of",
    ),
    PrivateName(
        "megatron.core.transformer.moe.router_replay:RouterReplay.get_replay_topk",
        "is what the router calls of it",
    ),
)

TopK = tuple[torch.Tensor, torch.Tensor]
"""Scores and numbers [tokens, k] of the experts of each token."""


ExpertChoice = Callable[[torch.Tensor, int, int, int], TopK]
"""(scores [tokens, experts], k, number of groups, groups to choose from) -> the experts of each token."""


def process_groups() -> list[torch.distributed.ProcessGroup]:
    return list(parallel_state._global_process_group_list or ())


def memory_buffer() -> dict[tuple[str, torch.dtype], torch.Tensor]:
    """Megatron's scratch memory for gathered activations and scores, by name and dtype; live, and empty if unused."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        return {}
    return parallel_state.get_global_memory_buffer().buffer


def cached_embeddings() -> Iterator[tuple[str, torch.Tensor, Callable[[], None]]]:
    """(name, tensor, what empties the cache it is in) of the rotary embeddings kept by sequence length."""
    for owner in (RotaryEmbedding, YarnRotaryEmbedding):
        cache: Any = owner.forward  # an lru_cache object
        if cache.cache_info().currsize:
            for number, tensor in enumerate(_results_in(cache)):
                yield f"{owner.__name__}'s cache {number}", tensor, cache.cache_clear


def _results_in(cache: object) -> Iterator[torch.Tensor]:
    # an lru_cache has no way to list its results; the garbage collector sees what the object refers to
    for found in gc.get_referents(cache):
        results = found if isinstance(found, tuple) else (found,)
        yield from (result for result in results if isinstance(result, torch.Tensor))


def holders_of_routing(layer: MoELayer) -> list[object]:
    """The objects of a layer with experts that keep tensors of its last forward pass."""
    dispatcher = layer.token_dispatcher
    holders = (dispatcher, getattr(dispatcher, "_comm_manager", None), layer.shared_experts)
    return [holder for holder in holders if holder is not None]


def yarn_angles(rotary: YarnRotaryEmbedding) -> tuple[torch.Tensor, float]:
    """Angles of the second token in radians, one for each pair of elements, and the factor of rotated elements."""
    angles, scale = rotary.get_emb(2)
    pairs, _ = angles[1].flatten().chunk(2)
    return pairs, scale


def score_factor_of_yarn(scaling_factor: float, mscale_all_dim: float) -> float:
    return _yarn_get_mscale(scaling_factor, mscale_all_dim)


def softmax_of(attention: DotProductAttention) -> FusedScaleMaskSoftmax:
    """What masks the scores of megatron-core's own attention; its `window_size` and fusion say which mask it heeds."""
    softmax = attention.scale_mask_softmax
    while not isinstance(softmax, FusedScaleMaskSoftmax):  # one that caps them first
        softmax = softmax.softmax
    return softmax


def mark_sequence_parallel(weight: Any) -> None:
    """Have Megatron sum a weight's gradient over tensor parallel ranks, each of which sees a part of the sequence."""
    weight.sequence_parallel = True


def restore_float32_bias(router: TopKRouter) -> None:
    router._maintain_float32_expert_bias()


def choose_experts(router: TopKRouter, choose: ExpertChoice) -> None:
    router.router_replay = _InPlaceOfReplay(choose)


class _InPlaceOfReplay:
    """What a router takes for its `RouterReplay`."""

    def __init__(self, choose: ExpertChoice) -> None:
        self._choose = choose

    def get_replay_topk(self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, _default: Any) -> TopK:
        return self._choose(scores, topk, num_groups, group_topk)
