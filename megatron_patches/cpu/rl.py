"""Group "cpu_rl": Megatron-LM's RL loop without CUDA, on top of groups "cpu" and "cpu_training"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.cpu import cuda_names
from megatron_patches.errors import CpuUnsupportedError
from megatron_patches.patch import Patch

_SINCE = "0.19.0"


def _build_unpacked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any, input_ids: Any, *args: Any, packed_seq_params: Any = None, fp32_output: bool = True, **kwargs: Any
    ) -> Any:
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_q.tolist() != [0, input_ids.shape[1]]:
            raise CpuUnsupportedError("packing requires Transformer Engine; leave out --rl-use-sequence-packing")
        return original(self, input_ids, *args, **kwargs)

    return forward


PATCHES: tuple[Patch, ...] = (
    Patch(
        "cpu_rl.one_sequence",
        "cpu_rl",
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
        "gets every sequence of the RL loop as a pack of one, which the local attention layer refuses; with float32 "
        "weights, which are exact enough to be compared with vLLM's, also an argument that Float16Module would take",
        "the RL loop packs only for Transformer Engine, and leaves fp32_output out without a Float16Module",
        _build_unpacked,
        since=_SINCE,
    ),
    Patch(
        "cpu_rl.spelling.prepare_data_for_update",
        "cpu_rl",
        "megatron.rl.rl_utils:prepare_data_for_update",
        "calls tensor.cuda() on rollouts",
        "megatron.rl selects its device instead of naming CUDA",
        cuda_names.under_cuda_spelling,
        since=_SINCE,
    ),
)
