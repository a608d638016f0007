"""Sizes of the checks on a GPU, on the software GPU (tests/software_gpu), and on the CPU without
either.

The software GPU computes on the CPU, so its model is tiny and times are not judged. Everything else
is the same: calls of the driver, of vLLM and of both engines, contents, bytes of memory and the
order of streams.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.flat_models import TINY, ModelShape

GIB = 2**30
MIB = 2**20
NUM_SWITCHES = int(os.environ.get("NUM_SWITCHES", "5"))
"""Switches of both engines, and of a trainer with a server; each measures device memory."""
SLACK = 1.05
"""Factor for the peak of a switch: the driver's units are 2 MiB, and libraries take some."""
MEMORY_SHARE = 0.3
"""vLLM's share of a GPU. It refuses to start if less is free after it has made its
communicators."""
_ADAM_NBYTES = 18  # Per bfloat16 parameter.
_NUM_PARAMETERS = 0.75e9  # Of the model on a GPU.

_TINY_MODEL = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
_GPU_MODEL = {
    **{
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "vocab_size": 32000,
    },
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes and requirements of the checks.

    Attributes:
        shape: model of stage 1; None: as many layers of `ModelShape` as fit on device and host.
        layers_read: model that two processes read in stage 3.
        flat_bucket_nbytes: bucket size of stage 1's switches.
        matrix_size: rows of the matrices that keep another stream busy.
        are_times_judged: whether a rate below its limit is a failure.
        vllm: engine arguments that avoid kernels missing on the device.
        model: changes of Qwen3-8B's config.json in stage 2.
        params_dtype: dtype of training and of vLLM.
        bucket_mb, kv_cache_mb: sizes in stages 2 and 3.
        free_by_stage: bytes that must be free on each GPU.
        taken_before_vllm: bytes of a GPU that its rank holds when vLLM checks the memory: context,
            communicators, remains of an offload. On an H200 they were 3.6 GB.
        needed_on_host: bytes of host memory that stage 2 needs for offloads and libraries.
    """

    shape: ModelShape | None
    layers_read: ModelShape
    flat_bucket_nbytes: int
    matrix_size: int
    are_times_judged: bool
    vllm: Mapping[str, Any]
    model: Mapping[str, Any]
    params_dtype: str
    bucket_mb: int
    kv_cache_mb: int
    free_by_stage: Mapping[int, int]
    taken_before_vllm: int
    needed_on_host: int


GPU = Sizes(
    shape=None,
    layers_read=ModelShape(2),
    flat_bucket_nbytes=256 * MIB,
    matrix_size=2048,
    are_times_judged=True,
    vllm={},
    model=_GPU_MODEL,
    params_dtype="bfloat16",
    bucket_mb=64,
    kv_cache_mb=512,
    free_by_stage={1: GIB, 2: 20 * GIB, 3: 8 * GIB},
    taken_before_vllm=2 * GIB,
    needed_on_host=int(1.5 * _ADAM_NBYTES * _NUM_PARAMETERS),
)
SOFTWARE_GPU = Sizes(
    shape=ModelShape(2, 512, 1024, 8, 4, 2000),
    layers_read=ModelShape(2, 512, 1024, 8, 4, 2000),
    flat_bucket_nbytes=MIB,
    matrix_size=64,
    are_times_judged=False,
    vllm={
        "attention_backend": "TRITON_ATTN",
        "disable_custom_all_reduce": True,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL",
        },  # Inductor would compile for a GPU.
        # No compilation; vLLM's warm-up would drop tensors that are still being copied.
        "kernel_config": {"enable_jit_warmup": False},
    },
    model=_TINY_MODEL,
    params_dtype="bfloat16",
    bucket_mb=1,
    kv_cache_mb=16,
    free_by_stage={1: GIB, 2: GIB, 3: GIB},
    taken_before_vllm=GIB,
    needed_on_host=GIB,
)
CPU = Sizes(
    shape=TINY,
    layers_read=TINY,
    flat_bucket_nbytes=2**15,
    matrix_size=8,
    are_times_judged=False,
    vllm={},
    model=_TINY_MODEL,
    params_dtype="float32",
    bucket_mb=1,
    kv_cache_mb=8,
    free_by_stage={},
    taken_before_vllm=0,
    needed_on_host=0,
)


def most_in_switches(train_nbytes: int, infer_nbytes: int, bucket_mb: int) -> int:
    """Return the permitted peak of a device: the larger side of a switch, and two buckets."""
    return max(train_nbytes, infer_nbytes) + 2 * bucket_mb * MIB


def is_software_gpu() -> bool:
    """Return whether CUDA is the software GPU of tests, by a variable of its launcher."""
    return "SOFTWARE_GPU_LIBRARIES" in os.environ


def sizes_of(device: str) -> Sizes:
    """Return the sizes for `--device` "cuda" or "cpu"."""
    if device == "cpu":
        return CPU
    return SOFTWARE_GPU if is_software_gpu() else GPU
