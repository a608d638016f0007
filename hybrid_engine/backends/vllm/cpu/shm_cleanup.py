"""Unlinks vLLM's shared-memory files as soon as every rank has mapped them, and checks that there is room for them.

What has a name in /dev/shm stays there when everybody who knew the name is killed. vLLM 0.32 names

- the buffers through which the CPU ranks of a tensor or pipeline parallel group exchange tensors, 4 MiB a thread. Their
  names go as soon as the group has mapped them, here. vLLM's kernels for CPUs without AVX-512 make none: there tensors
  go through gloo;
- a queue of 24 MiB beside each tensor parallel group, for `broadcast_object`. Nothing calls that while vLLM generates
  inside the ranks, and without the queue it goes through the process group, so no queue is made, nor its sockets
  (isolation.py);
- 128 bytes, for the milliseconds in which ranks find out whether they are on one host. vLLM removes these itself.

So something stays only if all ranks are killed within those milliseconds, or between the making of a group's buffers
and their mapping, with Python's resource trackers among them.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.memory import MIB
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.job import Job

ENGINE_TOKEN = "HYBRID_ENGINE_VLLM_TOKEN"
"""Environment variable with a name that all ranks of one engine share and no other engine on the host has."""

_SHM = Path("/dev/shm")
_BYTES_PER_THREAD = (4 << 20) + 256  # csrc/cpu/shm.cpp: two buffers of 2 MiB, and the state of who has written
_PAGE = os.sysconf("SC_PAGE_SIZE")
_Need = tuple[tuple[str, int | None], int]
"""Of a rank: its host, the device of /dev/shm, and bytes."""


@contextlib.contextmanager
def unnamed_shared_memory(agreement: Agreement) -> Iterator[None]:
    """Around the building of vLLM's groups: what they share has names of this engine's own, and no longer than needed.

    Collective.
    """
    os.environ[ENGINE_TOKEN] = agreement.gather(secrets.token_hex(8), str, "naming vLLM's shared memory")[0]

    def build(share: Callable[[Any], int]) -> Callable[[Any], int]:
        @functools.wraps(share)
        def share_unnamed(self: Any) -> int:
            try:
                return share(self)  # ends with a barrier of the group: all have mapped it
            finally:
                for path in _SHM.glob(f"*{glob.escape(self.group_name)}*"):
                    path.unlink(missing_ok=True)

        return share_unnamed

    try:
        with internals.SHARE_MEMORY.replaced(build):
            yield
    finally:
        del os.environ[ENGINE_TOKEN]


def check_room(settings: InferenceSettings, job: Job) -> None:
    """Raise ConfigError on all ranks where /dev/shm has less room than the ranks of a host need; vLLM would be killed
    by SIGBUS, or fail on some ranks only. Collective."""
    place = (job.hosts[job.rank], _SHM.stat().st_dev if _SHM.is_dir() else None)
    needs = job.agreement.gather((place, nbytes_needed(settings)), _Need, "room in /dev/shm")
    with job.agreement.phase("room in /dev/shm"):
        needed = sum(nbytes for other, nbytes in needs if other == place)
        if needed and _SHM.is_dir() and (free := shutil.disk_usage(_SHM).free) < needed:
            raise ConfigError([Violation("/dev/shm", _too_small(needed, free), _REMEDY)])


def nbytes_needed(settings: InferenceSettings) -> int:
    """In /dev/shm by this rank, while vLLM's groups live."""
    if not hasattr(internals.KERNELS.load(), "init_shm_manager"):
        return 0
    num_groups = sum(size > 1 for size in (settings.sizes.tensor, settings.sizes.pipeline))
    return num_groups * -(-torch.get_num_threads() * _BYTES_PER_THREAD // _PAGE) * _PAGE


_REMEDY = (
    "Give it more (mount -o remount,size=... /dev/shm; in a container --shm-size=... or --ipc=host), or use fewer "
    "threads a rank (OMP_NUM_THREADS) or generate_config.infer_tensor_parallel_size: 1"
)


def _too_small(needed: int, free: int) -> str:
    return (
        f"{free / MIB:.1f} MiB are free, but vLLM's ranks on this host exchange tensors through {needed / MIB:.1f} "
        f"MiB there, 4 MiB a thread ({torch.get_num_threads()} threads a rank)"
    )
