"""Host memory for offloaded state, and the copies to and from it.

Forked children do not inherit the memory, and a GPU can read it directly:

    allocation  mmap -> populated by several threads, in huge pages -> cudaHostRegister
    growth      a new allocation, to which contents are copied; if it fails, the old one stays

Registering populates too, but in one thread, 4 KiB at a time. A fork would immediately copy all
pages that a device reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.host_pages import libc, map_memory, raise_errno, round_up, tensor_over

logger = logging.getLogger("hybrid_engine")

NUM_THREADS = 8
"""Maximum number of populating threads.

They allocate pages near the processors on which they may run: bind ranks to NUMA nodes.
"""

_HUGE_PAGE = 2 * 2**20
# Bytes that a thread populates at a time.
_SLICE_NBYTES = 256 * 2**20

# MADV_* of <sys/mman.h> on Linux.
_DONTFORK = 10
_HUGEPAGE = 14
_POPULATE_WRITE = 23


class _HostAllocation:
    """Memory that forks do not inherit, page-locked if `pinned`; contents are undefined.

    It is freed when neither this object nor a tensor over it is left. Raises OSError.
    """

    def __init__(self, nbytes: int, *, pinned: bool, copier: Copier) -> None:
        self.nbytes = nbytes
        resources = contextlib.ExitStack()
        end = weakref.finalize(self, resources.close)
        # At exit a copy may still be under way. The system unmaps the memory.
        end.atexit = False
        try:
            self.address = map_memory(nbytes)
            resources.callback(libc().munmap, self.address, nbytes)
            if libc().madvise(self.address, nbytes, _DONTFORK):
                raise_errno("madvise(MADV_DONTFORK)")
            if pinned:
                _populate(self.address, nbytes)
                code = _call_cuda("cudaHostRegister", self.address, nbytes, 0)
                if code:
                    raise OSError(
                        f"page-locking {nbytes} bytes of host memory failed with CUDA error "
                        f"{code}. In a container its limit may be the reason (`ulimit -l`)"
                    )
                # Callbacks run last in, first out: the page lock ends before
                # the memory is unmapped.
                resources.callback(_unregister, self.address, copier)
        except BaseException:
            end()
            raise

    def tensor(self) -> torch.Tensor:
        """Return a flat uint8 tensor over the allocation."""
        return tensor_over(self.address, self.nbytes, torch.device("cpu"), self)


class Arena:
    """Host memory for the copied contents of one kind; grows with the inventory, never shrinks.

    Args:
        copier: its copies end before memory is freed; after a lost rank nothing else waits.
        pinned: page-lock the memory.

    Attributes:
        nbytes: bytes that tensors may use.
    """

    def __init__(self, copier: Copier, *, pinned: bool) -> None:
        self.nbytes = 0
        self._copier = copier
        self._is_pinned = pinned
        self._allocation: _HostAllocation | None = None

    @property
    def memory(self) -> torch.Tensor:
        """Flat uint8 tensor [nbytes]. Do not keep it: the memory moves when it grows."""
        if self._allocation is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._allocation.tensor()[: self.nbytes]

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes`.

        Existing contents are copied, new memory is undefined. No copy may be under way. Raises
        OffloadError: the arena is then unchanged, and a later call may succeed.
        """
        nbytes = max(nbytes, self.nbytes)
        if nbytes > (0 if self._allocation is None else self._allocation.nbytes):
            rounded = round_up(nbytes, _HUGE_PAGE)
            try:
                allocation = _HostAllocation(rounded, pinned=self._is_pinned, copier=self._copier)
            except OSError as error:
                raise OffloadError(
                    f"cannot allocate {nbytes} bytes of host memory: {error}",
                    code="no-host-memory",
                ) from error
            # Until the old allocation is dropped below, the host holds both.
            allocation.tensor()[: self.nbytes].copy_(self.memory)
            self._allocation = allocation
        self.nbytes = nbytes


def _populate(address: int, nbytes: int) -> None:
    """Allocate a page behind every address; before kernel 5.14 the registration does it."""
    # 6.1 instead of 2.1 GB/s with one thread on an H100's host; ignored without huge pages.
    libc().madvise(address, nbytes, _HUGEPAGE)
    end = address + nbytes
    addresses = range(address, end, _SLICE_NBYTES)
    sizes = [min(_SLICE_NBYTES, end - start) for start in addresses]
    num_threads = min(NUM_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as threads:
        # Iterating raises the error of a thread.
        for _ in threads.map(_populate_slice, addresses, sizes):
            pass


def _unregister(address: int, copier: Copier) -> None:
    """End the page lock; called by a finalizer, so a failure is only logged."""
    # The device may still read or write the pages.
    copier.finish_all()
    code = _call_cuda("cudaHostUnregister", address)
    if code:
        logger.warning(
            "host memory for offloaded state is freed while page-locked: "
            "cudaHostUnregister: CUDA error %d",
            code,
        )


def _populate_slice(address: int, nbytes: int) -> None:
    # EINVAL: the kernel is older than the flag.
    if libc().madvise(address, nbytes, _POPULATE_WRITE) and ctypes.get_errno() != errno.EINVAL:
        raise_errno("madvise(MADV_POPULATE_WRITE)")


def _call_cuda(name: str, *arguments: int) -> int:
    """Return the code of a call of CUDA's runtime, 0 for a success."""
    code = int(getattr(torch.cuda.cudart(), name)(*arguments))
    if code:
        # CUDA keeps the error of a thread's last call until it is read. torch reads it after each
        # kernel launch, and would raise it at an unrelated operation. `torch.cuda.cudart()` has no
        # `cudaGetLastError` (torch/csrc/cuda/shared/cudart.cpp), so launch a useless kernel here.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code


Direction = Literal["to host", "to device"]

# Bytes per copy on CUDA, so that both directions and other traffic take turns on the bus.
_CHUNK = 64 * 1024**2


class QueuedCopy:
    """A copy on a stream of the device; without events, a copy that is done."""

    def __init__(self, *events: torch.cuda.Event) -> None:
        """Describe a copy; `events`: its begin and its end."""
        self._events = events

    def wait(self) -> float:
        """Wait for the copy, and so for all before it in its direction; return its seconds."""
        if not self._events:
            return 0.0
        begin, end = self._events
        # Waits are made in reverse, so that the host waits once for all copies of a kind.
        if not end.query():
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def seconds_after(self, reached: torch.cuda.Event | None) -> float:
        """Return the seconds from an event to the end of this copy, which is done; at least 0."""
        # If the device has not reached the event by now, the copy ended before it: nothing waited.
        if reached is None or not self._events or not reached.query():
            return 0.0
        return max(0.0, float(reached.elapsed_time(self._events[1])) / 1000)


class Copier:
    """Copies bytes between a device and an arena.

    On CUDA copies are queued, in chunks, on one stream for each direction, beside the device's
    other work. On the CPU a copy is done when the call returns.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, Direction], torch.cuda.Stream] = {}

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, direction: Direction
    ) -> QueuedCopy:
        """Copy flat bytes; neither side may be freed or written before the copy is done."""
        device = source.device if direction == "to host" else destination.device
        if device.type != "cuda":
            destination.copy_(source)
            return QueuedCopy()
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        stream = self._streams[device, direction]
        if direction == "to device":
            # torch must not reuse the memory of a tensor that is freed before a late copy ends.
            destination.record_stream(stream)
        # The current stream may still compute the source, or use memory that was just allocated.
        stream.wait_stream(torch.cuda.current_stream(device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        with torch.cuda.stream(stream):
            for start in range(0, source.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                destination[part].copy_(source[part], non_blocking=True)
        end.record(stream)
        return QueuedCopy(begin, end)

    def finish_all(self) -> None:
        """Wait until no copy is queued. Never raises."""
        for stream in self._streams.values():
            # A failed kernel is reported where its result is used.
            with contextlib.suppress(RuntimeError):
                stream.synchronize()
