"""Private names of megatron-core that the backend uses, each with its reason.

Tests look every name up in the installed megatron-core; `nox -s core-tests` does so in each
supported version. Replacements of Megatron's names at run time are patch records, in
`megatron_patches`.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_mscale,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from hybrid_engine.backends.training_side import dtype_name
from hybrid_engine.ranks.torch_internals import PrivateName

_EMBEDDINGS = "megatron.core.models.common.embeddings"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

PRIVATE_NAMES = (
    PrivateName(
        f"{_DISTRIBUTED}._get_model_param_range_map",
        "locates the part of a parameter that this rank steps on, for checkpoints",
    ),
    PrivateName(
        f"{_DISTRIBUTED}._copy_main_params_to_model_params",
        "copies float32 weights, read from a checkpoint, to the model as a step does",
    ),
    PrivateName(
        "megatron.core.optimizer.optimizer:"
        "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
        "the same, without the distributed optimizer",
    ),
    PrivateName(
        "megatron.core.parallel_state:_global_process_group_list",
        "lists Megatron's process groups, which destroy_model_parallel() forgets but does not end",
    ),
    PrivateName(
        "megatron.core.parallel_state:_GLOBAL_MEMORY_BUFFER",
        "is None without a memory buffer, for which get_global_memory_buffer() fails an assertion",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.forward.cache_clear",
        "keeps embeddings of every sequence length on the device, in an lru_cache",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward.cache_clear",
        "keeps embeddings like RotaryEmbedding.forward",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.get_emb",
        "computes the angles of YaRN, which are in no attribute: `inv_freq` is unscaled",
    ),
    PrivateName(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:_yarn_get_mscale",
        "is the square root of the factor by which latent attention with YaRN scales its scores",
    ),
    PrivateName(
        f"{_DISTRIBUTED}._get_main_param_and_optimizer_states",
        "reads the state for each format of checkpoints, also for one that asks no torch optimizer",
    ),
    PrivateName(
        f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
        "writes the state that was read from any format of checkpoints",
    ),
    PrivateName(
        "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher._comm_manager",
        "keeps routing maps and probabilities of the last forward pass",
    ),
    PrivateName(
        "megatron.core.transformer.moe.router:TopKRouter.router_replay",
        "chooses the experts if it is set, the only way to replace the router's own selection",
    ),
    PrivateName(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention._resolve_qk_norm_config",
        "ignores the spec's modules if queries are not compressed, so specs.py overrides it",
        since="0.19.0",
    ),
    PrivateName(
        "megatron.core.transformer.multi_token_prediction:_compute_mtp_acceptance_counts",
        "reads the logits of MTP layers, which the trainer computes in chunks, for a log alone",
        since="0.19.0",
    ),
    PrivateName(
        "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward_torch_softmax",
        "applies its window instead of its mask; a fused kernel has no window: see softmax_of",
    ),
    PrivateName(
        "megatron.core.transformer.moe.router_replay:RouterReplay.get_replay_topk",
        "is the only method of a RouterReplay that the router calls",
    ),
)

METHODS_WITH_STATE = (
    "prepare_grads",
    "reload_model_params",
    "_get_main_param_and_optimizer_states",
    "_set_main_param_and_optimizer_states",
    "load_parameter_state_from_dp_zero_legacy",
)
"""Methods of Megatron's optimizers that read or write gradients, main parameters and moments.

All others that do so call one of these, or the torch optimizer, which has hooks.
"""

CHANGED_BY_TRAINING = frozenset(
    {
        # Callbacks of the training loop in the configuration.
        "finalize_model_grads_func",
        "grad_scale_func",
        "grad_sync_func",
        "no_sync_func",
        "param_sync_func",
        "timers",
        # Input and micro batch of a stage, and counts of tokens for the balance of experts.
        "input_tensor",
        "current_microbatch",
        "ga_steps",
        "global_tokens_per_expert",
        "local_tokens_per_expert",
        # Key of the tables that YaRN caches.
        "dtype_cached",
        "offset_cached",
        "packed_seq_cached",
        # Where Transformer Engine's layers are in an iteration, and their scales for 8 bits.
        "activation_dtype",
        "fp8",
        "fp8_calibration",
        "fp8_initialized",
        "fp8_meta",
        "fp8_meta_tensors_initialized",
        "is_first_microbatch",
        "modules_with_is_first_microbatch",
        "quantizers",
        "_fp8_workspaces",
        "_fused_impl",
    }
)
"""Attributes and buffers that modules of megatron-core and Transformer Engine change themselves."""

TopK = tuple[torch.Tensor, torch.Tensor]
"""Scores and expert numbers of each token, both [tokens, k]."""

ExpertChoice = Callable[[torch.Tensor, int, int, int], TopK]
"""Function that chooses k experts of each token.

Its arguments are scores [tokens, experts], k, number of groups, and number of groups to choose
from.
"""


def process_groups() -> list[torch.distributed.ProcessGroup]:
    """Return the process groups that Megatron has created."""
    return list(parallel_state._global_process_group_list or ())


def shared_caches() -> Iterator[tuple[str, torch.Tensor, Callable[[], None]]]:
    """Yield (name, tensor, function to empty the cache) of caches for all models of the process.

    They are scratch memory for gathered activations and scores, and rotary embeddings by sequence
    length.
    """
    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        scratch = parallel_state.get_global_memory_buffer().buffer
        for (name, _), tensor in scratch.items():
            owner = f"megatron-core's memory buffer {name}, {dtype_name(tensor)}"
            yield owner, tensor, scratch.clear
    for owner in (RotaryEmbedding, YarnRotaryEmbedding):
        cache: Any = owner.forward  # an lru_cache object
        if not cache.cache_info().currsize:
            continue
        # An lru_cache cannot list its results, but the garbage collector lists its references.
        referents = [
            result
            for referent in gc.get_referents(cache)
            for result in (referent if isinstance(referent, tuple) else (referent,))
            if isinstance(result, torch.Tensor)
        ]
        for number, tensor in enumerate(referents):
            yield f"{owner.__name__}'s cache {number}", tensor, cache.cache_clear


def holders_of_routing(layer: MoELayer) -> list[object]:
    """Return the objects of a layer with experts that keep tensors of its last forward pass."""
    dispatcher = layer.token_dispatcher
    holders = (dispatcher, getattr(dispatcher, "_comm_manager", None), layer.shared_experts)
    return [holder for holder in holders if holder is not None]


def yarn_angles(rotary: YarnRotaryEmbedding) -> tuple[torch.Tensor, float]:
    """Return angles of the second token in radians, one per pair of elements, and a factor.

    The embedding multiplies rotated elements by the factor.
    """
    angles, scale = rotary.get_emb(2)
    pairs, _ = angles[1].flatten().chunk(2)
    return pairs, scale


def score_factor_of_yarn(scaling_factor: float, mscale_all_dim: float) -> float:
    """Return the square root of the factor by which latent attention with YaRN scales scores."""
    return _yarn_get_mscale(scaling_factor, mscale_all_dim)


def softmax_of(attention: DotProductAttention) -> FusedScaleMaskSoftmax:
    """Return the module that masks the scores of megatron-core's own attention.

    Its `window_size` and its fusion determine which mask it applies.
    """
    softmax = attention.scale_mask_softmax
    # A softmax that caps the scores first wraps another softmax, which masks them.
    while not isinstance(softmax, FusedScaleMaskSoftmax):
        softmax = softmax.softmax
    return softmax


def mark_sequence_parallel(weight: Any) -> None:
    """Make Megatron sum a weight's gradient over tensor parallel ranks.

    Each of them computes the gradient of its part of the sequence.
    """
    weight.sequence_parallel = True


def mark_of_expert(weight: Any, like: Any, *, counted: bool) -> None:
    """Make Megatron reduce a weight's gradient over the ranks of an expert's weight `like`.

    `counted`: its gradient counts in the norm on this rank. A rank's place in the tensor parallel
    group, by which Megatron decides that for other layers, means nothing for experts.
    """
    # megatron-core reduces parameters without this flag over all data parallel ranks, those with
    # `allreduce` False over the ranks of the same experts.
    weight.allreduce = like.allreduce
    weight.shared = not counted


def padding_mask_of(router: TopKRouter) -> PassInput:
    """Return the masks [tokens] that a router gets from now on, True for padding."""
    masks = PassInput()

    def add_mask(_router: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        mask = masks.take()
        return None if mask is None else (inputs[0], mask)

    router.register_forward_pre_hook(add_mask)
    return masks


class PassInput:
    """Tensor that a router takes in its forward passes, by `given`.

    Recomputation in a backward pass repeats forward passes of the router, in their order and after
    the block of `given`, and takes the same tensors.

    Attributes:
        current: of the forward pass; None: none, or that of a recomputed pass.
        recomputed: of the passes that may be recomputed.
    """

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None
        self.recomputed: deque[torch.Tensor] = deque()

    def clear(self) -> None:
        """Forget all tensors; call when no backward pass can follow."""
        self.current = None
        self.recomputed.clear()

    def take(self) -> torch.Tensor | None:
        """Return the tensor of this forward pass; None: there is none."""
        # Outside the block of `given` the pass can only be a recomputed one.
        if self.current is None and self.recomputed:
            return self.recomputed.popleft()
        return self.current


@contextmanager
def given(tensors: Mapping[PassInput, torch.Tensor]) -> Iterator[None]:
    """Give routers tensors for a forward pass in the block, and for its recomputation."""
    for place, tensor in tensors.items():
        place.current = tensor
        if torch.is_grad_enabled():
            place.recomputed.append(tensor)
    try:
        yield
    finally:
        for place in tensors:
            place.current = None


class ExpertChooser:
    """Selection of experts, in the place of Megatron's `RouterReplay`, which it wraps if there.

    Attributes:
        choose: selects experts; None: the router itself.
        replayed: choices [tokens, k] int64 that are taken instead. A token with a negative number
            is left to the router.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.choose: ExpertChoice | None = None
        self.replayed = PassInput()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int,
        group_topk: int,
        default: Any,
    ) -> TopK:
        select: Any = self.choose or default
        replayed = self.replayed.take()

        def select_or_take(
            scores: torch.Tensor,
            topk: int,
            num_groups: Any = None,
            group_topk: Any = None,
        ) -> TopK:
            values, experts = select(scores, topk, num_groups, group_topk)
            if replayed is None:
                return values, experts
            is_replayed = (replayed >= 0).all(dim=1, keepdim=True)
            experts = torch.where(is_replayed, replayed, experts)
            # The router's own scores of the replayed experts, so that gradients reach the router.
            return scores.gather(1, experts), experts

        if self._inner is None:
            return select_or_take(scores, topk, num_groups, group_topk)
        # A user's RouterReplay records the experts that compute, and replays in place of them.
        chosen: TopK = self._inner.get_replay_topk(
            scores, topk, num_groups, group_topk, select_or_take
        )
        return chosen


def chooser_of(router: TopKRouter) -> ExpertChooser:
    """Return the router's selection of experts, which is put in place of its own if needed."""
    if not isinstance(router.router_replay, ExpertChooser):
        router.router_replay = ExpertChooser(router.router_replay)
    return router.router_replay
