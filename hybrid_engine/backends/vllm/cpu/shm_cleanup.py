"""Shared memory of vLLM's CPU ranks: unlinked once it is mapped, and checked for size.

A file in /dev/shm stays if all processes that know its name are killed. vLLM 0.32 makes

- buffers through which the CPU ranks of a tensor or pipeline parallel group exchange tensors, 4 MiB
  per thread. They are unlinked here as soon as the group has mapped them. vLLM's kernels for CPUs
  without AVX-512 make none: there tensors go through gloo;
- a queue of 24 MiB for each tensor parallel group, for `broadcast_object`. Nothing calls that while
  vLLM generates inside the ranks, and without the queue it goes through the process group. So
  isolation.py disables the queue and its sockets;
- 128 bytes, for the milliseconds in which ranks check whether they are on one host. vLLM removes
  these itself.

So a file stays only if all ranks are killed within those milliseconds, or between the making of a
group's buffers and their mapping, together with Python's resource trackers.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.private_names import Function, around
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.memory import MIB
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.job import Job

ENGINE_TOKEN = "HYBRID_ENGINE_VLLM_TOKEN"
"""Environment variable with a name shared by all ranks of one engine, unique on the host."""

_SHM = Path("/dev/shm")
# csrc/cpu/shm.cpp: two buffers of 2 MiB, and the state of their writers
_BYTES_PER_THREAD = (4 << 20) + 256
_PAGE = os.sysconf("SC_PAGE_SIZE")
_Need = tuple[tuple[str, int | None], int]
"""Host of a rank and device of /dev/shm there; bytes that the rank needs."""
_REMEDY = (
    "Give it more (mount -o remount,size=... /dev/shm; in a container --shm-size=... or "
    "--ipc=host), or use fewer threads a rank (OMP_NUM_THREADS) or "
    "generate_config.infer_tensor_parallel_size: 1"
)


@contextmanager
def unnamed_shared_memory(agreement: Agreement) -> Iterator[None]:
    """Give vLLM's shared memory a unique name in this context, and unlink it once it is mapped.

    Enter it around the building of vLLM's groups. Collective.
    """
    tokens = agreement.gather(secrets.token_hex(8), str, "naming vLLM's shared memory")
    os.environ[ENGINE_TOKEN] = tokens[0]

    def share_unnamed(share: Function, communicator: Any) -> Any:
        try:
            return share(communicator)  # ends with a barrier of the group: all have mapped it
        finally:
            for path in _SHM.glob(f"*{glob.escape(communicator.group_name)}*"):
                path.unlink(missing_ok=True)

    try:
        with internals.SHARE_MEMORY.replaced(around(share_unnamed)):
            yield
    finally:
        del os.environ[ENGINE_TOKEN]


def check_room(settings: InferenceSettings, job: Job) -> None:
    """Raise ConfigError on all ranks if /dev/shm is too small for the ranks of a host.

    Collective. Without this check vLLM would be killed by SIGBUS, or fail on some ranks only.
    """
    place = (job.hosts[job.rank], _SHM.stat().st_dev if _SHM.is_dir() else None)
    needs = job.agreement.gather((place, nbytes_needed(settings)), _Need, "room in /dev/shm")
    with job.agreement.phase("room in /dev/shm"):
        # Containers on one host may have separate /dev/shm.
        needed = sum(nbytes for other, nbytes in needs if other == place)
        if not needed or not _SHM.is_dir():
            return
        free = shutil.disk_usage(_SHM).free
        if free < needed:
            raise ConfigError.of(
                "/dev/shm",
                f"{free / MIB:.1f} MiB are free, but vLLM's ranks on this host exchange tensors "
                f"through {needed / MIB:.1f} MiB there, 4 MiB a thread "
                f"({torch.get_num_threads()} threads a rank)",
                _REMEDY,
                code="shared-memory-too-small",
            )


def nbytes_needed(settings: InferenceSettings) -> int:
    """Return the bytes in /dev/shm of this rank while vLLM's groups live."""
    if not hasattr(internals.KERNELS, "init_shm_manager"):
        return 0
    num_groups = sum(size > 1 for size in (settings.sizes.tensor, settings.sizes.pipeline))
    num_pages = -(-torch.get_num_threads() * _BYTES_PER_THREAD // _PAGE)
    return num_groups * num_pages * _PAGE
