"""The GPUs that this process sees, and who has their memory.

    python -m hybrid_engine.verification.gpu.gpus      prints them as JSON

Asked in a process of its own: to ask takes memory of each GPU, and a driver that is broken may never answer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from hybrid_engine.errors import clipped
from hybrid_engine.verification.gpu.checks import CannotCheckError

GIB = 2**30
_MODULE = "hybrid_engine.verification.gpu.gpus"
_SECONDS_TO_ANSWER = 180.0
_SECONDS_OF_NVIDIA_SMI = 30.0
_ASKED = ("gpu_uuid", "pid", "process_name", "used_memory")  # of nvidia-smi, which counts in MiB


@dataclass(frozen=True)
class Gpu:
    """One of them.

    Attributes:
        name: the maker's.
        capability: compute capability: "9.0".
        total_nbytes: of its memory.
        free_nbytes: of that, when it was asked.
        uuid: as nvidia-smi prints it.
        users: processes that had memory of it then, as far as nvidia-smi shows them.
        problem: why it cannot be used; "" where it can. `free_nbytes` is 0 where there is one.
    """

    name: str
    capability: str
    total_nbytes: int
    free_nbytes: int
    uuid: str
    users: tuple[str, ...] = ()
    problem: str = ""

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16."""
        return int(self.capability.partition(".")[0]) >= 8


def visible_gpus() -> tuple[Gpu, ...]:
    """All of them, in torch's order. Raises CannotCheckError with what torch says where none can be asked."""
    command = [sys.executable, "-m", _MODULE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER)
    except subprocess.TimeoutExpired:
        raise CannotCheckError(
            f"no answer within {_SECONDS_TO_ANSWER:g} s: see whether nvidia-smi answers, and dmesg for Xid errors"
        ) from None
    if ended.returncode != 0:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise CannotCheckError(clipped(last) or f"the process that asked them ended with status {ended.returncode}")
    answer = ended.stdout.rpartition("\n")[2]
    try:
        found = json.loads(answer)
    except ValueError:
        raise CannotCheckError(f"the process that asked them wrote no JSON: {clipped(answer) or 'nothing'}") from None
    users = memory_users()
    return tuple(Gpu(**{**each, "users": users.get(each["uuid"], ())}) for each in found)


def memory_users() -> Mapping[str, tuple[str, ...]]:
    """UUID of a GPU -> processes that have memory of it; nothing where nvidia-smi is not there, or does not answer."""
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


def too_little(where: str, free: int, needed: int, users: Sequence[str]) -> str:
    """A sentence with the remedy."""
    return (
        f"{free / GIB:.1f} GiB are free on {where}, and {needed / GIB:.1f} are needed: end what else runs there "
        f"({_shown(users)}), or choose another GPU with CUDA_VISIBLE_DEVICES"
    )


def unusable(where: str, problem: str, users: Sequence[str]) -> str:
    """A sentence with the remedy."""
    return (
        f"{where} cannot be used: {problem}. If it is full, or in exclusive mode, end what else runs there "
        f"({_shown(users)}); otherwise see dmesg for Xid errors, and whether torch is built for it. Or choose another "
        "GPU with CUDA_VISIBLE_DEVICES"
    )


def _shown(users: Sequence[str]) -> str:
    return "; ".join(users) or "nvidia-smi shows nobody here, nor could it show other containers' processes"


def described() -> Iterator[Gpu]:
    """Ask each GPU in this process, which makes a context there. Raises RuntimeError where torch has no driver."""
    import torch

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


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in described()]), end="")
