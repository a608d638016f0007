"""Device memory whose chunks come and go under one address, and what its owner tells its peers.

**Never run on a GPU yet**; tested with a model of the driver on the CPU.

    create     one address range; chunks of physical memory, created, mapped
    release    wait for the stream -> tell peers -> close descriptor -> unmap -> free the chunk
    restore    a new chunk of physical memory at the old address; contents undefined

A restored chunk is new physical memory, so an older mapping of a peer is stale. Peers therefore map, like any host
pages, a table with every chunk's serial number (0 while it has no memory) and the owner's descriptor of it. A peer maps
chunks only while it reads them (device_peers.py): during that time their memory stays allocated, whatever the owner
releases.

Touching a released range on the device is an illegal access, which ends the process's CUDA context.

A child that is forked (a DataLoader's worker) inherits the descriptors, and memory is freed only when none is open in
any process: the child closes them at once. It can use the memory for nothing; CUDA does not work in it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybrid_engine.errors import DeviceMemoryError, StateError
from hybrid_engine.memory.borrowed import tensor_over
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.host_pages import BufferHandle, HostMemory
from hybrid_engine.memory.libc import libc

CHUNK_NBYTES = 32 * 2**20
"""Approximate size of a chunk: release works in whole chunks, and mapping takes time for each. Not tuned on a GPU."""
MAX_CHUNKS = 256
"""Of one buffer; larger buffers have larger chunks. Every exported chunk costs its owner an open descriptor."""

SERIAL, DESCRIPTOR = 0, 1
"""Columns of the table."""
AWAY = 0
"""Serial number of a chunk without memory."""

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """How a process finds a flat tensor in the device memory of another process on the same host.

    Attributes:
        table: the owner's int64 table [chunks, 2] of serial numbers and descriptors.
        reserved_nbytes: of the owner's address range.
        chunk_nbytes: of every chunk but the last, which has what remains.
        offset: where the tensor starts in the range, in bytes.
        numel, dtype: of the tensor; dtype is torch's name without the prefix.
    """

    table: BufferHandle
    reserved_nbytes: int
    chunk_nbytes: int
    offset: int
    numel: int
    dtype: str


def table_of(flat: torch.Tensor) -> np.ndarray:
    """The rows of a table that lies in a flat int64 tensor."""
    return flat.numpy().reshape(-1, 2)


def chunk_nbytes_for(nbytes: int, granule: int) -> int:
    """Bytes of a chunk of a buffer of `nbytes`, a multiple of the driver's `granule`; see CHUNK_NBYTES."""
    target = min(nbytes, max(CHUNK_NBYTES, -(-nbytes // MAX_CHUNKS)))
    return -(-target // granule) * granule


class DeviceMemory:
    """An address range of a device with chunks in it, given back when the last tensor over it and this object are
    gone."""

    def __init__(
        self, driver: CudaDriver, numel: int, dtype: torch.dtype, label: str, *, resident: bool = True
    ) -> None:
        """Reserve `numel` elements and, if `resident`, have memory for all; contents are undefined.

        Raises DeviceMemoryError when the device has not enough; nothing is kept then.
        """
        granule = driver.granularity()
        self.numel, self.dtype, self.nbytes = numel, dtype, numel * dtype.itemsize
        self.reserved_nbytes = -(-self.nbytes // granule) * granule
        self.granularity = chunk_nbytes_for(self.nbytes, granule)
        self._is_open = True
        self._chunks = _Chunks(driver, self.reserved_nbytes, self.granularity, label)
        self.address = self._chunks.address
        self._end = weakref.finalize(self, self._chunks.end)
        self._end.atexit = False  # tensors may be read until the very end; the driver frees
        try:
            if resident:
                self.restore(0, self.reserved_nbytes)
        except BaseException:
            self._end()
            raise

    def tensor(self) -> torch.Tensor:
        """The whole memory as it was created."""
        return tensor_over(self.address, self.nbytes, self._chunks.driver.device, self).view(self.dtype)

    def release(self, first: int, last: int) -> None:
        """Give the chunks of bytes [first, last) back; `first` is a multiple of `granularity`, `last` too or the end.

        Waits for the current stream first. Whoever uses them on another one waits for that before.
        """
        self._raise_if_closed()
        resident = [index for index in self._chunks.within(first, last) if self._chunks.is_resident(index)]
        if resident:
            self._chunks.driver.finish_stream()
        for index in resident:
            self._chunks.unmap(index)

    def restore(self, first: int, last: int) -> None:
        """Have memory for the chunks of bytes [first, last) again; those that are there keep their contents.

        Raises DeviceMemoryError when the device has not enough: what came back stays, a later call goes on from there.
        """
        self._raise_if_closed()
        for index in self._chunks.within(first, last):
            if not self._chunks.is_resident(index):
                self._chunks.map(index)

    def resident_nbytes(self) -> int:
        """Bytes of physical memory behind the range now."""
        self._raise_if_closed()
        return self._chunks.resident_nbytes()

    def handle(self, offset: int, numel: int, dtype: torch.dtype) -> DeviceHandle:
        """For peers: `numel` elements from byte `offset`. From the first one on every chunk is exported."""
        self._raise_if_closed()
        return DeviceHandle(
            table=self._chunks.export(),
            reserved_nbytes=self.reserved_nbytes,
            chunk_nbytes=self.granularity,
            offset=offset,
            numel=numel,
            dtype=str(dtype).removeprefix("torch."),
        )

    def close(self) -> None:
        """No peer can map it any more; idempotent."""
        if self._is_open:
            self._is_open = False
            self._chunks.withdraw()

    def _raise_if_closed(self) -> None:
        if not self._is_open:
            raise StateError("the elastic buffer is closed")


class _Chunks:
    """The chunks of one address range, and the table that peers read. Knows nothing of tensors."""

    def __init__(self, driver: CudaDriver, reserved_nbytes: int, chunk_nbytes: int, label: str) -> None:
        self.driver = driver
        self._reserved_nbytes = reserved_nbytes
        self._chunk_nbytes = chunk_nbytes
        count = -(-reserved_nbytes // chunk_nbytes)
        self._handles: list[Any | None] = [None] * count
        self._next_serial = AWAY + 1
        self._is_exported = False
        self._table_memory = HostMemory.create(2 * count, torch.int64, f"{label}.chunks")
        self._table = table_of(self._table_memory.tensor())
        self._table[:, DESCRIPTOR] = -1
        self.address = driver.reserve(reserved_nbytes)
        self._descriptors: dict[int, int] = {}  # of exported chunks; the table is shared, and changes under a child
        self._is_inherited = False
        _all_chunks.add(self)

    def within(self, first: int, last: int) -> range:
        """Numbers of the chunks of bytes [first, last)."""
        return range(first // self._chunk_nbytes, -(-last // self._chunk_nbytes))

    def is_resident(self, index: int) -> bool:
        return self._handles[index] is not None

    def resident_nbytes(self) -> int:
        return sum(self._nbytes(index) for index in range(len(self._handles)) if self.is_resident(index))

    def map(self, index: int) -> None:
        """New physical memory for a chunk; after a failure it is away as before."""
        handle = self.driver.create(self._nbytes(index))
        try:
            self.driver.map(self._address(index), self._nbytes(index), handle)
        except BaseException:
            self.driver.release(handle)
            raise
        self._handles[index] = handle
        if self._is_exported:
            try:
                self._publish(index)
            except BaseException:
                self.unmap(index)
                raise

    def unmap(self, index: int) -> None:
        """Free a chunk; peers are told first, so one that reads the descriptor later finds the serial number gone."""
        self._withdraw(index)
        self.driver.unmap(self._address(index), self._nbytes(index))
        handle, self._handles[index] = self._handles[index], None
        self.driver.release(handle)

    def export(self) -> BufferHandle:
        """Publish every chunk, now and whenever it comes back. Returns where peers find the table."""
        _allow_reading()
        for index in range(len(self._handles)):
            if self.is_resident(index) and self._table[index, SERIAL] == AWAY:
                self._publish(index)
        self._is_exported = True
        return self._table_memory.handle(0, self._table.size, torch.int64)

    def disown(self) -> None:
        """In a forked child: close what it inherited; table and memory are the parent's."""
        self._is_inherited = True
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def withdraw(self) -> None:
        """Nothing is exported any more."""
        if self._is_inherited:
            return
        self._is_exported = False
        for index in range(len(self._handles)):
            self._withdraw(index)
        self._table_memory.close()

    def end(self) -> None:
        """Give everything back; the range must not be used any more."""
        if self._is_inherited:
            return
        self.driver.synchronize()
        self.withdraw()
        for index in range(len(self._handles)):
            if self.is_resident(index):
                self.unmap(index)
        self.driver.unreserve(self.address, self._reserved_nbytes)

    def _publish(self, index: int) -> None:
        try:
            descriptor = self.driver.export_descriptor(self._handles[index])
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"chunk {index} of {len(self._handles)} ({self._nbytes(index)} bytes) cannot be exported: {error}. "
                f"{_num_descriptors()} Raise the limit (`ulimit -n`) if it is reached"
            ) from error
        os.set_inheritable(descriptor, False)  # not by programs that are started either
        self._descriptors[index] = self._table[index, DESCRIPTOR] = descriptor
        self._table[index, SERIAL] = self._next_serial
        self._next_serial += 1

    def _withdraw(self, index: int) -> None:
        self._table[index, SERIAL] = AWAY
        self._table[index, DESCRIPTOR] = -1
        if (descriptor := self._descriptors.pop(index, None)) is not None:
            os.close(descriptor)

    def _address(self, index: int) -> int:
        return self.address + index * self._chunk_nbytes

    def _nbytes(self, index: int) -> int:
        return min(self._chunk_nbytes, self._reserved_nbytes - index * self._chunk_nbytes)


_all_chunks: weakref.WeakSet[_Chunks] = weakref.WeakSet()


def _disown_all() -> None:
    for chunks in _all_chunks:
        chunks.disown()


os.register_at_fork(after_in_child=_disown_all)


@functools.cache
def _allow_reading() -> None:
    """Let peers copy this process's descriptors where only the system's caution forbids it, and have enough of them.

    Yama (kernel.yama.ptrace_scope=1, the default of many systems) wants the owner's consent; a kernel without it
    refuses the call, and needs none. It is given to all processes of the same user.
    """
    libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _num_descriptors() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"This process has {len(os.listdir('/proc/self/fd'))} of {limit} file descriptors open."
