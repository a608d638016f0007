"""Host memory for offloaded state: it grows without a copy, forks do not inherit it, and a GPU can read it directly.

    grow      mmap, later mremap: what is in it stays, maybe elsewhere
    pinned    huge pages -> populated by several threads -> cudaHostRegister
    failed    back to the size before, page-locked as before

Registering populates too, but in one thread, 4 KiB at a time: that would take most of the first switch. A forked child
(a DataLoader's worker) gets no copy: the kernel would copy pages that a device reads at once, all of them. **Pinning
has never been run on a GPU yet.**
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.borrowed import host_tensor_over
from hybrid_engine.memory.libc import libc, raise_errno

logger = logging.getLogger(__name__)

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
    """What there is to give back. `is_registered`: its device's driver knows it, all of it."""

    address: int = 0
    nbytes: int = 0
    is_registered: bool = False


class Arena:
    """Host memory for the copied contents of one kind; grows with the inventory, never shrinks.

    It is unmapped when the last tensor over it and this object are gone.

    Attributes:
        nbytes: that tensors may use.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._mapping = _Mapping()
        end = weakref.finalize(self, _end, self._mapping)
        end.atexit = False  # a copy may be under way until the very end; the system unmaps

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes; not to be kept, for it may move when it grows."""
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return host_tensor_over(self._mapping.address, self.nbytes, torch.uint8, self.nbytes, self)

    def reserve(self, nbytes: int, *, pinned: bool) -> None:
        """Have `nbytes` at least, page-locked if `pinned`; what is there stays, what is new is undefined.

        No copy may be under way. What a growth that failed left without page-locking is page-locked again, even if it
        is large enough.

        Raises OffloadError: then it is as before, but maybe elsewhere, and a later call may succeed. Where it cannot be
        page-locked again, a warning says so.
        """
        nbytes = max(nbytes, self.nbytes)
        size = max(-(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, self._mapping.nbytes)
        if size > self._mapping.nbytes or (size and pinned and not self._mapping.is_registered):
            try:
                _remap(self._mapping, size, pinned=pinned)
            except OSError as error:
                raise OffloadError(f"{nbytes} bytes of host memory cannot be had: {error}") from error
        self.nbytes = nbytes


def _remap(mapping: _Mapping, nbytes: int, *, pinned: bool) -> None:
    """Have a mapping of `nbytes`, page-locked if `pinned`, or after a failure the one before."""
    before = replace(mapping)
    try:
        _unregister(mapping)  # it may move
        _resize(mapping, nbytes)
        if pinned:
            _populate(mapping, before.nbytes if before.is_registered else 0)
            _register(mapping)
    except BaseException:
        _go_back(mapping, before)
        raise


def _go_back(mapping: _Mapping, before: _Mapping) -> None:
    if mapping == before:
        return
    try:
        _unregister(mapping)
        _resize(mapping, before.nbytes)
        if before.is_registered:
            _register(mapping)
    except OSError as error:  # nothing is lost, and why it could not grow is raised
        logger.warning("host memory for offloaded state is not as it was before it could not grow: %s", error)


def _resize(mapping: _Mapping, nbytes: int) -> None:
    if nbytes == mapping.nbytes:
        return
    if not nbytes:
        _unmap(mapping)
        return
    if mapping.address:
        found = libc().mremap(mapping.address, mapping.nbytes, nbytes, _MAY_MOVE)
    else:
        found = libc().mmap(0, nbytes, _PROT_READ | _PROT_WRITE, _PRIVATE | _ANONYMOUS, -1, 0)
    if found == _FAILED:
        raise_errno(f"mapping {nbytes} bytes")
    mapping.address, mapping.nbytes = found, nbytes
    if libc().madvise(found, nbytes, _DONTFORK):
        raise_errno("keeping it from forks")


def _unmap(mapping: _Mapping) -> None:
    if mapping.address:
        libc().munmap(mapping.address, mapping.nbytes)
        mapping.address = mapping.nbytes = 0


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
    if code := _call_cuda("cudaHostRegister", mapping.address, mapping.nbytes, 0):
        raise OSError(
            f"page-locking {mapping.nbytes} bytes of host memory failed with CUDA error {code}. In a container its "
            "limit may be the reason (`ulimit -l`)"
        )
    mapping.is_registered = True


def _unregister(mapping: _Mapping) -> None:
    if mapping.is_registered:
        if code := _call_cuda("cudaHostUnregister", mapping.address):
            raise OSError(f"giving up page-locked host memory failed with CUDA error {code}")
        mapping.is_registered = False


def _call_cuda(name: str, *arguments: int) -> int:
    """Return the code of a call of CUDA's runtime, 0 for a success."""
    code = int(getattr(torch.cuda.cudart(), name)(*arguments))
    if code:
        _clear_error()
    return code


def _clear_error() -> None:
    """Let what failed be over: CUDA keeps the error of a thread's last call until somebody asks for it.

    torch asks after each kernel that it launches, and raises what it finds there. `torch.cuda.cudart()` has no
    `cudaGetLastError` (torch/csrc/cuda/shared/cudart.cpp), so a kernel is launched that nobody needs.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _end(mapping: _Mapping) -> None:
    try:
        _unregister(mapping)
    except OSError as error:  # a finalizer has nobody to raise to
        logger.warning("host memory for offloaded state ends page-locked: %s", error)
    finally:
        _unmap(mapping)
