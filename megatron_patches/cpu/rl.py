"""Group "cpu_rl": Megatron-LM's RL loop without CUDA, with groups "cpu" and "cpu_training"."""

from __future__ import annotations

from typing import Any

from megatron_patches.cpu import cuda_names
from megatron_patches.errors import CpuUnsupportedError
from megatron_patches.patch import Function, Patch, around

_SINCE = "0.19.0"


@around
def _forward_unpacked(
    original: Function,
    model: Any,
    input_ids: Any,
    *args: Any,
    packed_seq_params: Any = None,
    fp32_output: bool = True,
    **kwargs: Any,
) -> Any:
    # A pack of one sequence needs no packing.
    if packed_seq_params is not None:
        borders = packed_seq_params.cu_seqlens_q.tolist()
        if borders != [0, input_ids.shape[1]]:
            raise CpuUnsupportedError(
                "packing requires Transformer Engine; remove --rl-use-sequence-packing"
            )
    return original(model, input_ids, *args, **kwargs)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "cpu_rl.one_sequence",
        "cpu_rl",
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
        "gets every sequence of the RL loop as a pack of one, which the local attention layer "
        "refuses; with float32 weights, needed for exact comparisons with vLLM, also an argument "
        "that Float16Module would take",
        "the RL loop packs only for Transformer Engine, and omits fp32_output without a "
        "Float16Module",
        _forward_unpacked,
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
