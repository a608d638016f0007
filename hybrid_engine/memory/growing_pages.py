"""Host memory of our own mapping: it grows without a copy, forks do not inherit it, and a GPU can read it directly.

    grow      mmap, later mremap: what is in it stays, maybe elsewhere
    pinned    huge pages -> populated by several threads -> cudaHostRegister

Registering populates too, but in one thread, 4 KiB at a time: that would take most of the first switch. A forked child
(a DataLoader's worker) gets no copy: the kernel would copy pages that a device reads at once, all of them. **Pinning
has never been run on a GPU yet.**
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.borrowed import tensor_over
from hybrid_engine.memory.libc import libc, raise_errno

PINNED_IN_HUGE_PAGES = True
"""Whether the kernel is asked for pages of 2 MiB behind pinned memory. Not measured on a machine with a GPU."""
NUM_THREADS = 8
"""That populate, at most. They take pages near the processors on which they may run: bind ranks to NUMA nodes."""

_HUGE_PAGE = 2 * 2**20
_SLICE_NBYTES = 256 * 2**20  # that one thread populates at a time
_PROT_READ, _PROT_WRITE, _PRIVATE, _ANONYMOUS = 1, 2, 2, 0x20  # <sys/mman.h> on Linux
_MAY_MOVE = 1
_DONTFORK, _HUGEPAGE, _POPULATE_WRITE = 10, 14, 23
_FAILED = ctypes.c_void_p(-1).value


@dataclass
class _Mapping:
    """What there is to give back. `registered`: its address as the device's driver knows it; 0 if it does not."""

    address: int = 0
    nbytes: int = 0
    registered: int = 0


class GrowingPages:
    """A range of host memory, unmapped when the last tensor over it and this object are gone.

    Attributes:
        nbytes: that tensors may use.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._mapping = _Mapping()
        end = weakref.finalize(self, _end, self._mapping)
        end.atexit = False  # a copy may be under way until the very end; the system unmaps

    def tensor(self) -> torch.Tensor:
        """All of it, as bytes; valid until it grows."""
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return tensor_over(self._mapping.address, self.nbytes, torch.device("cpu"), self)

    def grow(self, nbytes: int, *, pinned: bool) -> None:
        """Have `nbytes`, page-locked if `pinned`; what was there stays, what is new is undefined.

        Raises OffloadError: then it is as large as before, and no longer page-locked.
        """
        mapping = self._mapping
        _unregister(mapping)
        known, size = mapping.nbytes, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        try:
            if size > mapping.nbytes:
                _map(mapping, size)
            if pinned:
                _populate(mapping, known)
                _register(mapping)
        except OSError as error:
            raise OffloadError(f"{nbytes} bytes of host memory cannot be had: {error}") from error
        self.nbytes = nbytes


def _map(mapping: _Mapping, size: int) -> None:
    if mapping.address:
        found = libc().mremap(mapping.address, mapping.nbytes, size, _MAY_MOVE)
    else:
        found = libc().mmap(0, size, _PROT_READ | _PROT_WRITE, _PRIVATE | _ANONYMOUS, -1, 0)
    if found == _FAILED:
        raise_errno(f"mapping {size} bytes")
    mapping.address, mapping.nbytes = found, size
    if libc().madvise(found, size, _DONTFORK):
        raise_errno("keeping it from forks")


def _populate(mapping: _Mapping, start: int) -> None:
    """Have pages behind everything from `start` on; kernels before 5.14 leave that to the registration."""
    if PINNED_IN_HUGE_PAGES:
        libc().madvise(mapping.address, mapping.nbytes, _HUGEPAGE)  # without effect where there are none
    slices = [
        (mapping.address + at, min(_SLICE_NBYTES, mapping.nbytes - at))
        for at in range(start, mapping.nbytes, _SLICE_NBYTES)
    ]
    with ThreadPoolExecutor(min(NUM_THREADS, len(os.sched_getaffinity(0)))) as threads:
        for _ in threads.map(lambda part: _populate_slice(*part), slices):
            pass


def _populate_slice(address: int, nbytes: int) -> None:
    if libc().madvise(address, nbytes, _POPULATE_WRITE) and ctypes.get_errno() != errno.EINVAL:
        raise_errno("populating it")


def _register(mapping: _Mapping) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(mapping.address, mapping.nbytes, 0))
    if code != 0:
        raise OffloadError(
            f"page-locking {mapping.nbytes} bytes of host memory failed with CUDA error {code}. In a container its "
            "limit may be the reason (`ulimit -l`)"
        )
    mapping.registered = mapping.address


def _unregister(mapping: _Mapping) -> None:
    if mapping.registered:
        torch.cuda.cudart().cudaHostUnregister(mapping.registered)
        mapping.registered = 0


def _end(mapping: _Mapping) -> None:
    _unregister(mapping)
    if mapping.address:
        libc().munmap(mapping.address, mapping.nbytes)
