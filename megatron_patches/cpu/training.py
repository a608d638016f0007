"""Group "cpu_training": ``megatron.training`` and its scripts without CUDA, with group "cpu".

For experiments and tests: ``pretrain_gpt.py --distributed-backend gloo --transformer-impl local
--use-cpu-initialization`` and the --no-…-fusion flags. Megatron compiles its data set helpers
itself, which needs a C++ compiler and pybind11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.cpu import cuda_names
from megatron_patches.patch import Function, Patch, around

_TRAINING = "megatron.training"
_ALWAYS = "megatron.training selects its device instead of naming CUDA"
_DRAWS = (
    "draws from the CPU generator, which without CUDA also serves dropout and must stay equal on "
    "ranks without a data loader; and may call tensor.cuda()"
)


def _patch(name: str, target: str, reason: str, build: Callable[[Any], Any], **more: Any) -> Patch:
    options = {"remove_when": _ALWAYS, **more}
    return Patch(f"cpu_training.{name}", "cpu_training", target, reason, build=build, **options)


@around
def _initialize_without_cuda(original: Function, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "allow_no_cuda": True})


@around
def _skip(original: Function, *args: Any, **kwargs: Any) -> None:
    pass


@around
def _newest_architecture(original: Function) -> int:
    return 10


@around
def _keep_generator(original: Function, *args: Any, **kwargs: Any) -> Any:
    state = torch.get_rng_state()
    try:
        with cuda_names.CudaSpelling():
            return original(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


@around
def _stay(original: Function, module: Any, device: Any = None) -> Any:
    """Return the module without moving it."""
    return module


PATCHES: tuple[Patch, ...] = (
    _patch(
        "initialize",
        f"{_TRAINING}.initialize:initialize_megatron",
        "asserts that CUDA is available",
        _initialize_without_cuda,
    ),
    _patch(
        "fused_kernels",
        "megatron.legacy.fused_kernels:load",
        "calls nvcc and compiles kernels that only run on CUDA",
        _skip,
        remove_when="megatron.training no longer loads the legacy kernels",
        until="0.17.0",
    ),
    _patch(
        "warmup",
        f"{_TRAINING}.initialize:_warmup_jit_function",
        "compiles fused kernels before training; on CPU that takes minutes and a C++ compiler, and "
        "they are not used",
        _skip,
    ),
    _patch(
        "architecture",
        f"{_TRAINING}.utils:get_device_arch_version",
        "reads the GPU generation, to require CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell; a "
        "CPU has no such queue",
        _newest_architecture,
    ),
    _patch(
        "module",
        "megatron.core.transformer.module:MegatronModule.cuda",
        "the training script moves every model chunk to CUDA",
        _stay,
    ),
    _patch(
        "spelling.evaluate",
        f"{_TRAINING}.training:evaluate",
        "calls tensor.cuda() on sums of losses",
        cuda_names.under_cuda_spelling,
    ),
    *(
        _patch(
            f"spelling.{name}",
            target,
            "calls functions that call tensor.cuda() on a batch",
            cuda_names.under_cuda_spelling,
            since="0.18.0",
        )
        for name, target in (
            # It calls the script's get_batch.
            ("forward_step", "megatron.core.pipeline_parallel.schedules:forward_step"),
            ("dummy_train_step", f"{_TRAINING}.training:dummy_train_step"),
        )
    ),
    _patch(
        "data.iterators",
        f"{_TRAINING}.training:build_train_valid_test_data_iterators",
        _DRAWS,
        _keep_generator,
    ),
    _patch(
        "data.batch",
        f"{_TRAINING}.utils:get_batch_on_this_tp_rank",
        _DRAWS,
        _keep_generator,
        until="0.18.0",
    ),
    _patch(
        "data.next",
        "megatron.core.rerun_state_machine:RerunDataIterator.__next__",
        _DRAWS,
        _keep_generator,
        since="0.18.0",
    ),
)
