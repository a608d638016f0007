"""Release of the device memory of NCCL communicators while they are idle.

A communicator holds buffers as long as it lives, and Megatron has one for each of its groups.
verl's users report 7 to 10 GB per device in large jobs (its issue 6266). NCCL can release the
buffers and keep the communicator.

    suspend()   release the buffers of all communicators; their groups cannot run collectives
    resume()    allocate them again; the groups work as before

References: ncclCommSuspend of NCCL 2.29.7; `Backend.suspend` of torch. Tested only with a software
implementation of NCCL (tests/software_gpu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.errors import ConfigError, DeviceMemoryError
from hybrid_engine.ranks.signals_and_forks import signals_held
from hybrid_engine.ranks.torch_internals import can_suspend, nccl_of

_NEEDED_NCCL = (2, 29, 7)


def require_suspension(key: str) -> None:
    """Raise ConfigError with `key` if torch or its NCCL cannot suspend communicators."""
    version = torch.cuda.nccl.version()
    if can_suspend() and version >= _NEEDED_NCCL:
        return
    installed = f"torch {torch.__version__} with NCCL {'.'.join(map(str, version))}"
    needed = ".".join(map(str, _NEEDED_NCCL))
    problem = f"suspending communicators needs NCCL {needed} and torch 2.13, this is {installed}"
    remedy = "Leave it out, or install them"
    raise ConfigError.of(key, problem, remedy, code="needs-package")


class IdleCommunicators:
    """Communicators of some process groups, which are suspended together.

    Args:
        groups: returns the groups, in the same order on all ranks of a group; called by each
            `suspend`.
    """

    def __init__(self, groups: Callable[[], Iterable[dist.ProcessGroup]]) -> None:
        self._groups = groups
        self._suspended: list[Any] = []
        self._nbytes = 0  # released by the suspended communicators

    def suspend(self) -> int:
        """Release the buffers of all communicators; return the bytes. Collective over each group.

        Waits for operations that are queued on the device. A group that was not used yet has no
        communicator, and is skipped.
        """
        # A rank that stopped half-way would keep the others in NCCL's barrier.
        with signals_held():
            for group in self._groups():
                backend = nccl_of(group)
                if backend is None or backend in self._suspended:
                    continue
                try:
                    nbytes = backend.memory_stats()["suspend"]
                except RuntimeError as error:
                    if "not initialized" not in str(error):
                        raise
                    continue
                backend.suspend()
                self._suspended.append(backend)
                self._nbytes += nbytes
        return self._nbytes

    def require_room(self) -> None:
        """Raise DeviceMemoryError if `resume` would fail for lack of memory.

        The other ranks would wait in it without a timeout.
        """
        if not self._suspended:
            return
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < self._nbytes:
            raise DeviceMemoryError(
                f"resuming NCCL's communicators needs {self._nbytes} bytes of the device, but only "
                f"{free} are free: lower generate_config.gpu_memory_utilization, or set "
                "generate_config.suspend_communicators to false",
                code="no-memory-to-resume",
            )

    def resume(self) -> None:
        """Allocate the buffers again; idempotent.

        Collective over each group, whose ranks wait without a timeout.
        """
        with signals_held():
            # One by one: after an error those that are left are still known as suspended.
            while self._suspended:
                self._suspended[0].resume()
                del self._suspended[0]
            self._nbytes = 0
