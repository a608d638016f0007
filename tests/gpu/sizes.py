"""Sizes of the checks: on a GPU, on a GPU in software (tests/software_gpu), and on the CPU without either.

A GPU in software computes on the CPU, so its model is tiny, and times are not judged. Everything else is the same: what
is asked of the driver, of vLLM and of both engines, contents, bytes of memory and the order of streams.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.flat_models import TINY, ModelShape

GIB, MIB = 2**30, 2**20
NUM_SWITCHES = int(os.environ.get("NUM_SWITCHES", "5"))
"""Of both engines in one process, and of a trainer beside a server; the device's memory is watched in each."""
SLACK = 1.05
"""Of the most memory in a switch: a driver gives it in units of 2 MiB, and libraries take some."""
MEMORY_SHARE = 0.3
"""vLLM's on a GPU: it refuses to start where less than this share is free after its communicators are made."""
_ADAM_NBYTES = 18  # of a parameter with bfloat16
_NUM_PARAMETERS = 0.75e9  # of the model on a GPU

_TINY_MODEL = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
_MODEL_OF_A_GPU = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "vocab_size": 32000},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}


@dataclass(frozen=True)
class Sizes:
    """What the checks move, and what they need.

    Attributes:
        shape: of the model of stage 1; None: as many layers of `ModelShape` as device and host have room for.
        layers_read: of the model that two processes read in stage 3.
        flat_bucket_nbytes: of stage 1's switches.
        matrix_size: rows of the matrices that keep another stream busy.
        are_times_judged: whether a rate below its limit fails.
        vllm: engine arguments, for what the device has no kernel.
        model: what differs from Qwen3-8B's config.json in stage 2.
        params_dtype: of training; vLLM's is the same.
        bucket_mb, kv_cache_mb: of stages 2 and 3.
        free_by_stage: bytes of each GPU that must be free.
        taken_before_vllm: bytes of a GPU that its rank has when vLLM looks: the context, communicators, what an offload
            leaves. On an H200 3.6 GB were taken beside the state of training and vLLM's weights.
        needed_on_host: bytes of the host that stage 2 needs: what is offloaded, and libraries.
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
    model=_MODEL_OF_A_GPU,
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
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},  # Inductor would compile for a GPU
        # The interpreter compiles nothing. vLLM's warm-up drops tensors that are still being copied, and their results.
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
    """Bytes that a device may take: what is there on either side of a switch, and two buckets."""
    return max(train_nbytes, infer_nbytes) + 2 * bucket_mb * MIB


def is_software_gpu() -> bool:
    """Whether CUDA is the one of tests/software_gpu, by what its launcher sets."""
    return "SOFTWARE_GPU_LIBRARIES" in os.environ


def sizes_of(device: str) -> Sizes:
    """Sizes for `--device`: "cuda" or "cpu"."""
    if device == "cpu":
        return CPU
    return SOFTWARE_GPU if is_software_gpu() else GPU
