"""What a stage of `check-gpu` needs of each GPU that it runs on, and what a GPU lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybrid_engine.verification.gpu.gpus import GIB, Gpu, too_little, unusable
from hybrid_engine.verification.gpu.small_job import MEMORY_SHARE

_FREE = {1: GIB, 2: 20 * GIB, 3: 8 * GIB}
"""Bytes, by stage; what stage 1 moves is cut to what is there."""
_TAKEN_BEFORE_VLLM = 2 * GIB
"""Bytes of a GPU that its rank has when vLLM looks: the context, Megatron's and vLLM's communicators, what an offload
leaves. An estimate, never measured."""


def what_a_gpu_lacks(number: int, index: int, gpu: Gpu) -> Iterator[str]:
    """Why a stage cannot run on a GPU, each with a remedy.

    Args:
        number: of the stage.
        index: of the GPU, as torch counts.
        gpu: what it said of itself.
    """
    where = f"GPU {index} ({gpu.name})"
    if number > 1 and not gpu.has_bfloat16:
        yield f"{where} has compute capability {gpu.capability}, and 8.0 (Ampere) is needed for bfloat16"
    if gpu.problem:
        yield unusable(where, gpu.problem, gpu.users)
    elif gpu.free_nbytes < (nbytes := _needed_on(gpu, number)):
        yield too_little(where, gpu.free_nbytes, nbytes, gpu.users)


def _needed_on(gpu: Gpu, number: int) -> int:
    """Bytes; vLLM refuses to start where its share of the GPU is not free."""
    if number == 1:
        return _FREE[number]
    return max(_FREE[number], math.ceil(MEMORY_SHARE * gpu.total_nbytes) + _TAKEN_BEFORE_VLLM)
