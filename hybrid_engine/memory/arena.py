"""Host memory for offloaded state, and the copies to and from it.

Forks do not inherit the memory, and a GPU can read it directly:

    pages     mmap -> populated by several threads, in huge pages -> cudaHostRegister
    grow      new pages, to which contents are copied; if they cannot be had, the old ones stay

Registering populates too, but in one thread, 4 KiB at a time: that would take most of the first switch. A forked child
(a DataLoader's worker) gets no copy: the kernel would copy pages that a device reads at once, all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.host_pages import host_tensor_over, libc, map_memory, raise_errno

logger = logging.getLogger("hybrid_engine")

NUM_THREADS = 8
"""That populate, at most. They take pages near the processors on which they may run: bind ranks to NUMA nodes."""

_HUGE_PAGE = 2 * 2**20
_SLICE_NBYTES = 256 * 2**20  # that one thread populates at a time
_DONTFORK, _HUGEPAGE, _POPULATE_WRITE = 10, 14, 23  # <sys/mman.h> on Linux


@dataclass
class _Mapping:
    """Memory to give back. `is_registered`: its device's driver knows it, all of it."""

    address: int = 0
    nbytes: int = 0
    is_registered: bool = False


class _Pages:
    """Memory that forks do not inherit, page-locked if `pinned`; contents are undefined. Raises OSError.

    It ends when the last tensor over it and this object are gone.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.mapping = mapping = _Mapping(nbytes=nbytes)
        end = weakref.finalize(self, _end, mapping)
        end.atexit = False  # a copy may be under way until the very end; the system unmaps
        try:
            mapping.address = map_memory(nbytes)
            if libc().madvise(mapping.address, nbytes, _DONTFORK):
                raise_errno("keeping it from forks")
            if pinned:
                _populate(mapping)
                _register(mapping)
        except BaseException:
            end()
            raise

    def tensor(self) -> torch.Tensor:
        """All of it, as bytes."""
        return host_tensor_over(self.mapping.address, self.mapping.nbytes, torch.uint8, self.mapping.nbytes, self)


class Arena:
    """Host memory for the copied contents of one kind; grows with the inventory, never shrinks.

    Attributes:
        nbytes: that tensors may use.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._pages: _Pages | None = None

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes; not to be kept, for it moves when it grows."""
        if self._pages is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._pages.tensor()[: self.nbytes]

    def reserve(self, nbytes: int, *, pinned: bool) -> None:
        """Have `nbytes` at least, page-locked if `pinned`; what is there is copied, what is new is undefined.

        No copy may be under way. Raises OffloadError: then it is as before, and a later call may succeed.
        """
        before, nbytes = self._pages, max(nbytes, self.nbytes)
        if before is None or before.mapping.nbytes < nbytes or before.mapping.is_registered < pinned:
            if not nbytes:
                return
            try:
                pages = _Pages(-(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, pinned=pinned)
            except OSError as error:
                raise OffloadError(f"{nbytes} bytes of host memory cannot be had: {error}") from error
            pages.tensor()[: self.nbytes].copy_(self.memory)
            self._pages = pages
        self.nbytes = nbytes


def _populate(mapping: _Mapping) -> None:
    """Have pages behind all of it; kernels before 5.14 leave that to the registration."""
    # 6.1 instead of 2.1 GB/s with one thread on an H100's host; without effect where there are none
    libc().madvise(mapping.address, mapping.nbytes, _HUGEPAGE)
    slices = [
        (mapping.address + at, min(_SLICE_NBYTES, mapping.nbytes - at))
        for at in range(0, mapping.nbytes, _SLICE_NBYTES)
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


def _call_cuda(name: str, *arguments: int) -> int:
    """Return the code of a call of CUDA's runtime, 0 for a success.

    CUDA keeps the error of a thread's last call until somebody asks for it. torch asks after each kernel that it
    launches, and raises what it finds there. `torch.cuda.cudart()` has no `cudaGetLastError`
    (torch/csrc/cuda/shared/cudart.cpp), so a kernel is launched that nobody needs.
    """
    if code := int(getattr(torch.cuda.cudart(), name)(*arguments)):
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code


def _end(mapping: _Mapping) -> None:
    """Give everything back; called once. A finalizer has nobody to raise to."""
    if mapping.is_registered and (code := _call_cuda("cudaHostUnregister", mapping.address)):
        logger.warning("host memory for offloaded state ends page-locked: cudaHostUnregister: CUDA error %d", code)
    if mapping.address:
        libc().munmap(mapping.address, mapping.nbytes)


Direction = Literal["to host", "to device"]
_CHUNK = 64 * 1024**2  # bytes per copy on CUDA, so that both directions and other traffic take turns on the bus


class BackgroundCopy:
    """A copy that a thread may make in the meantime; it is made once, and never after it was called off.

    The future says who makes it: a thread that has begun, or, once it is cancelled, whoever waits.
    """

    def __init__(self, make: Callable[[], float], *, is_queued: bool = False) -> None:
        """`make` copies, or waits for a copy that is queued, and returns its seconds."""
        self._make, self._is_queued = make, is_queued
        self._by_thread: Future[float] = Future()
        self._seconds: float | None = None

    def run(self) -> None:
        """Make it in a thread, unless somebody has; what fails is left to `wait`, which tries again."""
        if self._by_thread.set_running_or_notify_cancel():
            try:
                self._by_thread.set_result(self._make())
            except BaseException as error:
                self._by_thread.set_exception(error)

    def wait(self) -> float:
        """Return when it is made, by the caller if nobody has begun; how many seconds it took, less the wait here."""
        started = time.perf_counter()
        is_by_thread = not self._by_thread.cancel() and self._by_thread.exception() is None
        if self._seconds is None:
            self._seconds = self._by_thread.result() if is_by_thread else self._make()
        return max(0.0, self._seconds - (time.perf_counter() - started))

    def cancel(self) -> None:
        """Let it not be made any more; one that is being made, or that is queued, is made first."""
        if not self._by_thread.cancel():
            self._by_thread.exception()
        elif self._is_queued and self._seconds is None:
            self._make()


class Copier:
    """Copies bytes between a device and an arena.

    On CUDA copies are queued, in chunks, on streams: one for each direction, so that both overlap with each other and
    with the device's other work, and one more for what is to go on in the background. On the CPU a copy is done when
    the call returns, in the background by a thread.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, Direction, bool], torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction) -> Callable[[], None]:
        """Copy flat bytes; neither side may be freed or written before the copy is done.

        Returns what waits for this copy, and so for all before it in this direction on this device. So does `finish`.
        """
        device = source.device if direction == "to host" else destination.device
        if device.type != "cuda":
            destination.copy_(source)
            return _wait_for_nothing
        stream = self._stream(device, direction, background=False)
        _queue_copy(destination, source, stream)
        event = torch.cuda.Event()
        event.record(stream)
        return event.synchronize

    def begin_copy(
        self, copies: list[BackgroundCopy], destination: torch.Tensor, source: torch.Tensor, direction: Direction
    ) -> None:
        """Begin to copy flat bytes in the background, as one of `copies`; both sides are to be left alone until then.

        Where no thread can be had, whoever waits for the copy makes it.
        """
        device = source.device if direction == "to host" else destination.device
        if device.type == "cuda":
            stream = self._stream(device, direction, background=True)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            _queue_copy(destination, source, stream)
            end.record(stream)
            copies.append(BackgroundCopy(lambda: _seconds_between(begin, end), is_queued=True))
            return
        copy = BackgroundCopy(lambda: _timed_copy(destination, source))
        copies.append(copy)  # before a thread has it: it never runs without somebody who waits for it
        try:
            self._thread = self._thread or ThreadPoolExecutor(1, "offload")
            self._thread.submit(copy.run)
        except RuntimeError as error:
            logger.info("no thread for a copy in the background (%s): it is made when its contents are needed", error)

    def finish(self, direction: Direction) -> None:
        """Wait until every copy in this direction is done, but for those in the background."""
        for (_, queued, background), stream in self._streams.items():
            if queued == direction and not background:
                stream.synchronize()

    def _stream(self, device: torch.device, direction: Direction, background: bool) -> torch.cuda.Stream:
        key = (device, direction, background)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        return self._streams[key]


def _wait_for_nothing() -> None:
    """The copy was done when the call returned."""


def _queue_copy(destination: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    stream.wait_stream(torch.cuda.current_stream(stream.device))  # what is computed there, and memory just taken
    with torch.cuda.stream(stream):
        for start in range(0, source.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            destination[part].copy_(source[part], non_blocking=True)


def _seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Waits for the second."""
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _timed_copy(destination: torch.Tensor, source: torch.Tensor) -> float:
    started = time.perf_counter()
    destination.copy_(source)
    return time.perf_counter() - started
