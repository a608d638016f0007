"""Device memory whose chunks come and go under one address, and how peers on the host read it.

Run on an H200 and an H100, by two processes that read each other's; between GPUs only in software (tests/software_gpu).

    create     one address range; chunks of physical memory, created, mapped
    release    wait for the stream -> tell peers -> close descriptor -> unmap -> free the chunk
    restore    a new chunk of physical memory at the old address; contents undefined

A restored chunk is new physical memory, so an older mapping of a peer is stale. Peers therefore map, like any host
pages, a table with every chunk's serial number, 0 while it has no memory, and ask the owner for the descriptor of that
number (descriptors.py), as CUDA means them to be passed. A peer maps chunks only while it reads them: during that time
their memory stays allocated, whatever the owner releases.

    peer = DevicePeer(handle, driver)            once: an address range of this process, nothing mapped
    with peer.mapped(extents, keep) as flat:     descriptors fetched, chunks mapped that are not yet
        copy from flat[start:stop]
                                                 stream waited for, chunks unmapped but for those to be read again

Touching a released range on the device is an illegal access, which ends the process's CUDA context.

A child that is forked (a DataLoader's worker) inherits the descriptors, and memory is freed only when none is open in
any process: the child closes them at once. It can use the memory for nothing; CUDA does not work in it.
"""

from __future__ import annotations

import functools
import os
import resource
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hybrid_engine.errors import DeviceMemoryError, MessageError, StateError, TransportError
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.descriptors import MOST_AT_ONCE, Descriptor, fetch, sending
from hybrid_engine.memory.host_pages import BufferHandle, HostMemory, map_pages, require_within, tensor_over
from hybrid_engine.messages import Record
from hybrid_engine.records.layout import Extent

CHUNK_NBYTES = 32 * 2**20
"""Approximate size of a chunk: release works in whole chunks. To map one takes 0.1 ms on an H100, to free one 0.1 to
0.3, and copies wait meanwhile."""
_LARGE_CHUNKS = 64
"""Into which a buffer is cut that comes and goes as a whole, if that makes larger chunks."""
MAX_CHUNKS = MOST_AT_ONCE
"""Of one buffer; larger buffers have larger chunks. Every exported chunk costs its owner an open descriptor."""

AWAY = 0
"""Serial number of a chunk without memory."""


class DeviceHandle(Record, frozen=True):
    """How a process finds a flat tensor in the device memory of another process on the same host.

    Attributes:
        table: the owner's int64 table [chunks] of serial numbers.
        reserved_nbytes: of the owner's address range.
        chunk_nbytes: of every chunk but the last, which has what remains.
        offset: where the tensor starts in the range, in bytes.
        numel, dtype: of the tensor; dtype is torch's name without the prefix.

    Raises MessageError, whoever makes it, unless the tensor is of a dtype of torch's and lies in whole elements within
    the range, and the table has a number for every chunk.
    """

    table: BufferHandle
    reserved_nbytes: int
    chunk_nbytes: int
    offset: int
    numel: int
    dtype: str

    def __post_init__(self) -> None:
        require_within(self.reserved_nbytes, self.offset, self.numel, self.dtype)
        has_chunks = self.chunk_nbytes > 0 and self.table.numel == -(-self.reserved_nbytes // self.chunk_nbytes)
        if self.table.dtype != "int64" or not has_chunks:
            raise MessageError(
                f"a buffer of {self.reserved_nbytes} bytes in chunks of {self.chunk_nbytes}, with a table of "
                f"{self.table.numel} {self.table.dtype}"
            )


def chunk_nbytes_for(nbytes: int, granule: int, *, in_parts: bool = True) -> int:
    """Bytes of a chunk of a buffer of `nbytes`, a multiple of the driver's `granule`; see CHUNK_NBYTES.

    `in_parts`: parts of it are to come and go by themselves.
    """
    most_chunks = MAX_CHUNKS if in_parts else _LARGE_CHUNKS
    target = min(nbytes, max(CHUNK_NBYTES, -(-nbytes // most_chunks)))
    return -(-target // granule) * granule


class DeviceMemory:
    """An address range of a device with chunks in it, given back when the last tensor over it and this object are
    gone."""

    def __init__(
        self,
        driver: CudaDriver,
        numel: int,
        dtype: torch.dtype,
        label: str,
        *,
        resident: bool = True,
        in_parts: bool = True,
    ) -> None:
        """Reserve `numel` elements and, if `resident`, have memory for all; contents are undefined.

        `in_parts`: see `chunk_nbytes_for`. Raises DeviceMemoryError when the device has not enough: nothing is kept.
        """
        granule = driver.granularity()
        self.numel, self.dtype, self.nbytes = numel, dtype, numel * dtype.itemsize
        self.reserved_nbytes = -(-self.nbytes // granule) * granule
        self.granularity = chunk_nbytes_for(self.nbytes, granule, in_parts=in_parts)
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
        self._table_memory = HostMemory.create(count, torch.int64, f"{label}.chunks")
        self._table = self._table_memory.tensor().numpy()
        self.address = driver.reserve(reserved_nbytes)
        self._descriptors: dict[int, Descriptor] = {}  # of exported chunks
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
        """Free a chunk; peers are told first, so one that asks for the descriptor later finds it gone."""
        self._withdraw(index)
        self.driver.unmap(self._address(index), self._nbytes(index))
        handle, self._handles[index] = self._handles[index], None
        self.driver.release(handle)

    def export(self) -> BufferHandle:
        """Publish every chunk, now and whenever it comes back. Returns where peers find the table."""
        _raise_limit()
        for index in range(len(self._handles)):
            if self.is_resident(index) and self._table[index] == AWAY:
                self._publish(index)
        self._is_exported = True
        return self._table_memory.handle(0, self._table.size, torch.int64)

    def disown(self) -> None:
        """In a forked child: close what it inherited; table and memory are the parent's."""
        self._is_inherited = True
        self._descriptors.clear()

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
        self._descriptors[index] = Descriptor(descriptor)
        self._descriptors[index].offer(_name(self._table_memory.token, self._next_serial))
        self._table[index] = self._next_serial
        self._next_serial += 1

    def _withdraw(self, index: int) -> None:
        self._table[index] = AWAY
        with sending:
            self._descriptors.pop(index, None)

    def _address(self, index: int) -> int:
        return self.address + index * self._chunk_nbytes

    def _nbytes(self, index: int) -> int:
        return min(self._chunk_nbytes, self._reserved_nbytes - index * self._chunk_nbytes)


_all_chunks: weakref.WeakSet[_Chunks] = weakref.WeakSet()


def _disown_all() -> None:
    for chunks in _all_chunks:
        chunks.disown()


os.register_at_fork(after_in_child=_disown_all)


def _name(table: str, serial: int) -> str:
    """Of a chunk's descriptor, which is offered by it."""
    return f"{table}/{serial}"


@functools.cache
def _raise_limit() -> None:
    """Have as many descriptors as the system allows: one for every exported chunk."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _num_descriptors() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"This process has {len(os.listdir('/proc/self/fd'))} of {limit} file descriptors open."


class DevicePeer:
    """A peer's flat tensor on a device, mapped into this process only while it is read.

    Not longer than the reader says, since a mapping keeps a chunk's memory allocated after its owner released it, and a
    restored chunk is different memory. The memory may be on another GPU than the one this process uses, if the two can
    reach each other.
    """

    def __init__(self, handle: DeviceHandle, driver: CudaDriver) -> None:
        """Raises TransportError when the owner is on another host, has ended or closed the buffer."""
        self._handle, self._driver, self._is_closed = handle, driver, False
        self._table = map_pages(handle.table).numpy()
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
            raise StateError("the peer's buffer is mapped already; end that block first")
        serials = self._table[chunks]
        if (serials == AWAY).any():
            away = [chunk for chunk, serial in zip(chunks, serials.tolist(), strict=True) if serial == AWAY]
            raise TransportError(
                f"the owner has released chunks {away} of its buffer ({self._handle.chunk_nbytes} bytes each): there "
                "was no fence before the read, or it has offloaded its weights"
            )
        kept: Container[int] = ()
        self._is_read = True
        try:
            self._map(chunks, serials.tolist())
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
        self._is_closed = True

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

    def _map(self, chunks: list[int], serials: list[int]) -> None:
        """Map chunks that are not, or are outdated."""
        if self._is_closed:
            raise StateError("the peer is closed")
        pairs = zip(chunks, serials, strict=True)
        missing = [(index, serial) for index, serial in pairs if self._range.mapped.get(index) != serial]
        if not missing:
            return
        table = self._handle.table
        descriptors = fetch(table.address, [_name(table.token, serial) for _, serial in missing])
        try:
            for (index, serial), descriptor in zip(missing, descriptors, strict=True):
                self._range.map(index, serial, descriptor)
        except DeviceMemoryError as error:
            raise TransportError(
                f"chunk {index} of a peer's buffer cannot be mapped: {error}. If it lies on another GPU, the two "
                "must reach each other (nvidia-smi topo -p2p r); else choose the collective transport"
            ) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _raise_if_changed(self, chunks: list[int], serials: np.ndarray) -> None:
        if (self._table[chunks] != serials).any():
            raise TransportError("the owner released chunks of its buffer while they were read; fence the switch")


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
