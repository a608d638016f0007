"""Reads the device memory of another process on the same host.

**Never run on a GPU yet**; tested with a model of the driver on the CPU, across processes.

    peer = DevicePeer(handle, driver)            once: an address range of this process, nothing mapped
    with peer.mapped(extents, keep) as flat:     descriptors fetched, chunks mapped that are not yet
        copy from flat[start:stop]
                                                 stream waited for, chunks unmapped but for those to be read again

Descriptors of device memory are not files, so /proc/<pid>/fd cannot reopen them. pidfd_getfd(2) copies them (Linux 5.6)
without a thread or socket of the owner. The kernel allows it where it would allow a debugger to attach: same
user, and either kernel.yama.ptrace_scope 0, or CAP_SYS_PTRACE, or the owner's consent by prctl(PR_SET_PTRACER), which
it gives when it exports. A container's seccomp profile can forbid it too (Docker's does without CAP_SYS_PTRACE); at
set-up the ranks try it, and send messages where it is forbidden (switch/peer_access.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from hybrid_engine.errors import DeviceMemoryError, StateError, TransportError
from hybrid_engine.memory.borrowed import tensor_over
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.device_pages import AWAY, DESCRIPTOR, SERIAL, DeviceHandle, table_of
from hybrid_engine.memory.host_pages import map_pages
from hybrid_engine.memory.libc import libc
from hybrid_engine.records.layout import Extent

_PIDFD_GETFD = 438  # the system call's number on every architecture but Alpha


class DevicePeer:
    """A peer's flat tensor on a device, mapped into this process only while it is read.

    Not longer than the reader says, since a mapping keeps a chunk's memory allocated after its owner released it, and a
    restored chunk is different memory. The memory may be on another GPU than the one this process uses, if the two can
    reach each other.
    """

    def __init__(self, handle: DeviceHandle, driver: CudaDriver) -> None:
        """Raises TransportError when the owner is on another host, has ended or closed the buffer."""
        self._pid, self._handle, self._driver = handle.table.pid, handle, driver
        self._pidfd = _open_process(self._pid)
        self._close_pidfd = weakref.finalize(self, os.close, self._pidfd)
        # In this order: the table's random name shows that the process opened above is still the owner.
        self._table = table_of(map_pages(handle.table))
        self._range = _Range(driver, handle.reserved_nbytes, handle.chunk_nbytes)
        self._is_read = False
        nbytes = handle.numel * getattr(torch, handle.dtype).itemsize
        start = self._range.address + handle.offset
        self._tensor = tensor_over(start, nbytes, driver.device, self._range).view(getattr(torch, handle.dtype))

    @contextmanager
    def mapped(self, extents: Sequence[Extent] = (), keep: Container[int] = ()) -> Iterator[torch.Tensor]:
        """The flat tensor; these elements (default: all) may be read within the `with` block, by work queued in it too.

        Elsewhere, and for other elements, reading is an illegal access. What lies between the extents is left alone:
        its owner may have released it. After a success the chunks in `keep` stay mapped, and are mapped anew only if
        their owner released them meanwhile; until they are unmapped, that gives no memory back.

        Raises TransportError when a chunk of an extent is away at its owner, when the descriptors may not be fetched,
        and, at the end, when the owner released a chunk meanwhile: what was read may then be outdated.
        """
        chunks = self.chunks(extents or [Extent(0, self._handle.numel)])
        if self._is_read:
            raise StateError(f"the buffer of process {self._pid} is mapped already; end that block first")
        serials = self._table[chunks, SERIAL].copy()
        if (serials == AWAY).any():
            away = [chunk for chunk, serial in zip(chunks, serials.tolist(), strict=True) if serial == AWAY]
            raise TransportError(
                f"process {self._pid} has released chunks {away} of its buffer ({self._handle.chunk_nbytes} bytes "
                "each): there was no fence before the read, or the owner has offloaded its weights"
            )
        kept: Container[int] = ()
        self._is_read = True
        try:
            for index, serial in zip(chunks, serials.tolist(), strict=True):
                self._map(index, serial)
            self._raise_if_changed(chunks, serials)
            yield self._tensor
            self._driver.finish_stream()
            self._raise_if_changed(chunks, serials)
            kept = keep
        finally:
            self._is_read = False
            self._range.clear(kept)

    def unmap(self) -> None:
        """Keep no chunk mapped."""
        self._range.clear()

    def close(self) -> None:
        """Close the peer; idempotent."""
        self._range.clear()
        self._close_pidfd()

    def chunks(self, extents: Sequence[Extent]) -> list[int]:
        """Numbers of the chunks in which these elements lie, in order."""
        itemsize, chunk = self._tensor.element_size(), self._handle.chunk_nbytes
        touched: set[int] = set()
        for extent in extents:
            if extent.stop > self._handle.numel:
                raise ValueError(
                    f"invalid elements [{extent.start}, {extent.stop}) of a tensor of {self._handle.numel}"
                )
            first, last = (self._handle.offset + bound * itemsize for bound in (extent.start, extent.stop))
            touched.update(range(first // chunk, -(-last // chunk)))
        return sorted(touched)

    def _map(self, index: int, serial: int) -> None:
        """Map a chunk, unless it is and still the same."""
        if not self._close_pidfd.alive:
            raise StateError("the peer is closed")
        if self._range.mapped.get(index) == serial:
            return
        descriptor = _copy_descriptor(self._pidfd, self._pid, int(self._table[index, DESCRIPTOR]))
        try:
            self._range.map(index, serial, descriptor)
        except DeviceMemoryError as error:
            raise TransportError(
                f"chunk {index} of process {self._pid} cannot be mapped: {error}. If it lies on another GPU, the two "
                "must reach each other (nvidia-smi topo -p2p r); else choose the collective transport"
            ) from error
        finally:
            os.close(descriptor)

    def _raise_if_changed(self, chunks: list[int], serials: np.ndarray) -> None:
        if (self._table[chunks, SERIAL] != serials).any():
            raise TransportError(
                f"process {self._pid} released chunks of its buffer while they were read; fence the switch"
            )


class _Range:
    """An address range of this process and what is mapped in it; given back with the last tensor over it.

    Attributes:
        mapped: serial numbers of the chunks that are, by their number.
    """

    def __init__(self, driver: CudaDriver, nbytes: int, chunk_nbytes: int) -> None:
        """`chunk_nbytes`: of every chunk but the last, which has what remains."""
        self.address = driver.reserve(nbytes)
        self.mapped: dict[int, int] = {}
        self._nbytes, self._chunk_nbytes = nbytes, chunk_nbytes
        self._driver = driver
        end = weakref.finalize(self, driver.unreserve, self.address, nbytes)
        end.atexit = False

    def map(self, index: int, serial: int, descriptor: int) -> None:
        """Map another process's chunk, in the place of an older one if there is any."""
        if index in self.mapped:
            self._unmap(index)
        handle = self._driver.import_descriptor(descriptor)
        try:
            self._driver.map(*self._place(index), handle)
        finally:
            self._driver.release(handle)  # the mapping alone keeps the memory
        self.mapped[index] = serial

    def clear(self, keep: Container[int] = ()) -> None:
        """Unmap all chunks but these, once what is queued on the current stream has read them."""
        if gone := [index for index in self.mapped if index not in keep]:
            self._driver.finish_stream()
            for index in gone:
                self._unmap(index)

    def _unmap(self, index: int) -> None:
        self._driver.unmap(*self._place(index))
        del self.mapped[index]

    def _place(self, index: int) -> tuple[int, int]:
        start = index * self._chunk_nbytes
        return self.address + start, min(self._chunk_nbytes, self._nbytes - start)


def _open_process(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise TransportError(f"process {pid} cannot be opened ({error.strerror}): it ended") from error


def _copy_descriptor(pidfd: int, pid: int, descriptor: int) -> int:
    """Return a copy of another process's descriptor. Raises TransportError with the remedy."""
    copied, code = _pidfd_getfd(pidfd, descriptor)
    if copied >= 0:
        return copied
    remedies = {
        errno.EPERM: "not permitted. Run the ranks of a host as one user with kernel.yama.ptrace_scope 0 or 1, or "
        "CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE), or choose the collective transport",
        errno.ENOSYS: "Linux before 5.6 cannot; choose the collective transport",
        errno.EBADF: "the owner released the chunk meanwhile; fence the switch",
        errno.ESRCH: "the owner ended",
        errno.EMFILE: "too many open files; raise the limit (`ulimit -n`)",
    }
    raise TransportError(
        f"pidfd_getfd of descriptor {descriptor} of process {pid}: {remedies.get(code, os.strerror(code))}"
    )


def _pidfd_getfd(pidfd: int, descriptor: int) -> tuple[int, int]:
    """Return the copy or -1, and the error number."""
    return libc().syscall(_PIDFD_GETFD, pidfd, descriptor, 0), ctypes.get_errno()
