"""Run a command with the software GPU in place of NVIDIA's libraries."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.software_gpu.build import build

SITE = Path(__file__).parent / "site"
SHARED_MEMORY = Path("/dev/shm")

_DEVICE_VARIABLES = {
    "TORCHDYNAMO_DISABLE": "1",  # Inductor would compile for a GPU.
    "TRITON_INTERPRET": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # Has kernels for CUDA only.
}


@dataclass(frozen=True)
class Machine:
    """The devices of a command.

    Attributes:
        num_gpus: number of devices.
        nbytes: memory of each device.
        are_peers: whether devices may read each other's memory.
        reports: file to which the checker appends its reports; None: a temporary file.
    """

    num_gpus: int = 1
    nbytes: int = 80 * 2**30
    are_peers: bool = True
    reports: Path | None = None


@contextmanager
def environment_of(machine: Machine) -> Iterator[dict[str, str]]:
    """Yield variables for commands that share the devices; clean up shared memory at the end."""
    libraries = build()
    identity = secrets.token_hex(4)
    variables = {
        **_DEVICE_VARIABLES,
        "SOFTWARE_GPU_LIBRARIES": str(libraries),
        "SOFTWARE_GPU_ID": identity,
        "SOFTWARE_GPU_COUNT": str(machine.num_gpus),
        "SOFTWARE_GPU_NBYTES": str(machine.nbytes),
        "SOFTWARE_GPU_PEERS": str(int(machine.are_peers)),
        "LD_AUDIT": str(libraries / "redirect.so"),
        "LD_LIBRARY_PATH": _joined(str(libraries), os.environ.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(str(SITE), os.environ.get("PYTHONPATH")),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    try:
        with tempfile.TemporaryDirectory(prefix="software-gpu-") as directory:
            variables["SOFTWARE_GPU_REPORTS"] = str(machine.reports or Path(directory) / "reports")
            yield variables
    finally:
        for path in SHARED_MEMORY.glob(f"software_gpu.{identity}*"):
            with suppress(FileNotFoundError):
                path.unlink()


def _joined(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first
