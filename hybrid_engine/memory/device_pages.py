"""Device memory that is released and restored in chunks at a constant address, and read by peers.

Run on an H200 and an H100; between GPUs only in software (tests/software_gpu).

    create     one address range; chunks of physical memory, created, mapped
    release    wait for the stream -> notify peers -> close descriptor -> unmap: the chunk is free
    restore    a new chunk of physical memory at the old address; contents undefined

A restored chunk is new memory, so a peer's older mapping is stale. Peers therefore map a table, as
host pages, with the serial number of every chunk, 0 while it has no memory, and fetch the
descriptor of that number from the owner (descriptors.py). A peer maps chunks only while it reads
them: until it unmaps them, memory that the owner has released stays allocated.

    peer = DevicePeer(handle, driver)            once: an address range of this process, unmapped
    chunks = handle.chunks(extents)              once
    with peer.mapped(chunks) as flat:            descriptors fetched, absent chunks mapped
        copy from flat[start:stop]
                                                 stream waited for, chunks unmapped

Memory that inference shares (pool.py) stays where it is: its release and restore are notes, its
serial number stays, and peers keep it mapped.

Touching a released range on the device is an illegal access, which ends the process's CUDA context.

A forked child inherits the descriptors, and memory is freed only when none is open in any process.
The child closes them at once; CUDA does not work in it anyway.
"""

from __future__ import annotations

import functools
import os
import resource
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch

from hybrid_engine.errors import DeviceMemoryError, MessageError, TransportError
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.descriptors import MAX_DESCRIPTORS, Descriptor, fetch, sending
from hybrid_engine.memory.host_pages import (
    BufferHandle,
    HostMemory,
    PoolPiece,
    map_pages,
    require_within,
    round_up,
    tensor_over,
)
from hybrid_engine.messages import Record
from hybrid_engine.records.layout import Extent

CHUNK_NBYTES = 32 * 2**20
"""Approximate size of a chunk, the unit of release.

On an H100 it takes 0.1 ms to map a chunk and 0.1 to 0.3 ms to free one, during which copies wait.
"""

AWAY = 0
"""Serial number of a chunk without memory."""

_SHARED = 1 << 62
"""Added to the serial number of a chunk of a pool, which peers keep mapped.

The sum is negative while the chunk has no contents.
"""


class DeviceHandle(Record, frozen=True, tag=True):
    """Location of a flat tensor in the device memory of another process on the same host.

    Attributes:
        table: the owner's int64 table [chunks] of serial numbers.
        reserved_nbytes: bytes of the owner's address range.
        chunk_nbytes: bytes of every chunk except the last, which has the rest.
        offset: start of the tensor in the range, in bytes.
        numel: elements of the tensor.
        dtype: torch's name of its dtype, without the prefix.

    Construction raises MessageError unless `dtype` is a dtype of torch, the tensor lies in whole
    elements within the range, and the table has a number for every chunk.
    """

    table: BufferHandle
    reserved_nbytes: int
    chunk_nbytes: int
    offset: int
    numel: int
    dtype: str

    def __post_init__(self) -> None:
        require_within(self.reserved_nbytes, self.offset, self.numel, self.dtype)
        table = self.table
        is_valid = (
            table.dtype == "int64"
            and self.chunk_nbytes > 0
            and table.numel == -(-self.reserved_nbytes // self.chunk_nbytes)
        )
        if not is_valid:
            raise MessageError(
                f"a buffer of {self.reserved_nbytes} bytes in chunks of {self.chunk_nbytes} bytes "
                f"does not fit a table of {table.numel} elements of {table.dtype}",
                code="malformed-handle",
            )

    def chunks(self, extents: Iterable[Extent]) -> list[int]:
        """Return the sorted numbers of the chunks that contain these elements."""
        itemsize = getattr(torch, self.dtype).itemsize
        touched: set[int] = set()
        for extent in extents:
            first = self.offset + extent.start * itemsize
            last = self.offset + extent.stop * itemsize
            touched.update(range(first // self.chunk_nbytes, -(-last // self.chunk_nbytes)))
        return sorted(touched)


def chunk_nbytes_for(nbytes: int, granule: int) -> int:
    """Return the chunk size of a buffer of `nbytes`, a multiple of the driver's `granule`.

    See CHUNK_NBYTES.
    """
    # Every exported chunk costs its owner an open descriptor; larger buffers have larger chunks.
    # With 253 chunks of 32 MiB a buffer has 7.9 GiB; one of 100 GiB has chunks of 406 MiB.
    target = min(nbytes, max(CHUNK_NBYTES, -(-nbytes // MAX_DESCRIPTORS)))
    return round_up(target, granule)


class _ChunkedRange:
    """An address range of a device, reserved whole and mapped in chunks.

    Attributes:
        address, reserved_nbytes: the range.
        granularity: bytes of every chunk except the last, which has the rest.
    """

    def __init__(self, driver: CudaDriver, reserved_nbytes: int, chunk_nbytes: int) -> None:
        self.driver = driver
        self.reserved_nbytes = reserved_nbytes
        self.granularity = chunk_nbytes
        self.address = driver.reserve(reserved_nbytes)

    def _place(self, index: int) -> tuple[int, int]:
        """Return address and bytes of a chunk."""
        start = index * self.granularity
        return self.address + start, min(self.granularity, self.reserved_nbytes - start)


class Chunks(_ChunkedRange):
    """The chunks of an address range, and the table that peers read. Independent of tensors."""

    def __init__(self, driver: CudaDriver, nbytes: int, label: str) -> None:
        """Reserve addresses for `nbytes`, without memory."""
        granule = driver.granularity()
        chunk_nbytes = chunk_nbytes_for(nbytes, granule)
        count = -(-nbytes // chunk_nbytes)
        self._next_serial = AWAY + 1
        self._is_exported = False
        self._table_memory = HostMemory(count * torch.int64.itemsize, f"{label}.chunks")
        self._table = self._table_memory.view(0, count, torch.int64).numpy()
        super().__init__(driver, round_up(nbytes, granule), chunk_nbytes)
        # Descriptors of exported chunks, by number.
        self._descriptors: dict[int, Descriptor] = {}
        # Numbers of the chunks that may be touched.
        self._present: set[int] = set()
        # Pieces of a pool behind the chunks.
        self._pieces: dict[int, list[PoolPiece]] = {}
        self._is_settled = False
        self._is_inherited = False
        _all_chunks.add(self)

    @property
    def device(self) -> torch.device:
        return self.driver.device

    def within(self, first: int, last: int) -> range:
        """Return the numbers of the chunks of bytes [first, last)."""
        return range(first // self.granularity, -(-last // self.granularity))

    def release(self, first: int, last: int) -> None:
        """Free the chunks of bytes [first, last), whole ones, after the current stream's work.

        Work on other streams that uses the chunks must have ended.
        """
        present = self._present.intersection(self.within(first, last))
        if present:
            # Once for all chunks. Unmapping does not wait for kernels.
            self.driver.finish_stream()
        for index in sorted(present):
            self._unmap(index)

    def restore(self, first: int, last: int) -> None:
        """Allocate the chunks of bytes [first, last) that have no memory; others keep contents.

        Raises DeviceMemoryError for lack of memory; a later call continues from there.
        """
        for index in self.within(first, last):
            if index not in self._present:
                self._map(index)

    def resident(self) -> Iterator[tuple[int, int, int]]:
        """Yield number, address and bytes of the resident chunks."""
        for index in sorted(self._present):
            yield index, *self._place(index)

    @property
    def is_late(self) -> bool:
        """True if inference uses none of this memory before its weights are filled."""
        return len([*self.late_ranges()]) == self._table.size

    def late_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges that inference uses only after its weights are filled, or never."""
        # A chunk may hold several pieces, of which each must be late.
        for index, pieces in self._pieces.items():
            if all(piece.is_late for piece in pieces):
                start = index * self.granularity
                yield start, start + self._place(index)[1]

    def resident_nbytes(self) -> int:
        """Return the bytes of physical memory behind the range now."""
        return sum(nbytes for _, _, nbytes in self.resident())

    def settle(self, pieces: Sequence[tuple[int, PoolPiece]]) -> None:
        """Note that a pool has mapped the whole range, of which nothing was resident.

        `pieces`: bytes and piece, in order of addresses.
        """
        self._is_settled = True
        start = 0
        for nbytes, piece in pieces:
            # Pieces and chunks have different sizes: a chunk collects all pieces that touch it.
            for index in self.within(start, start + nbytes):
                self._pieces.setdefault(index, []).append(piece)
            start += nbytes
        self._permit("NONE")

    def lend(self, index: int, piece: PoolPiece) -> None:
        """Note that a resident chunk keeps its memory, as this piece of a pool."""
        self._pieces[index] = [piece]
        if self._table[index] != AWAY:
            self._table[index] |= _SHARED
        piece.take("training", (self.address, index))

    def leave_pool(self) -> None:
        """Free memory of a pool that has no contents here; chunks that were lent keep contents.

        Does nothing outside of a pool.
        """
        for index, pieces in self._pieces.items():
            for piece in pieces:
                piece.leave((self.address, index))
            if self._is_settled:
                self._present.discard(index)
            elif index in self._present:
                self._table[index] &= ~_SHARED
            else:
                self._free(index)
        if self._is_settled:
            self.driver.unmap(self.address, self.reserved_nbytes)
        self._is_settled = False
        self._pieces.clear()

    def _map(self, index: int) -> None:
        """Give a chunk memory; after a failure it is absent as before."""
        if index in self._pieces:
            for piece in self._pieces[index]:
                piece.take("training", (self.address, index))
            if self._present.isdisjoint(self._pieces):
                self._permit("READWRITE")
        else:
            self.driver.create_at(*self._place(index))
        # Only a resident chunk can be published, and `_unmap` undoes a publication.
        self._present.add(index)
        if self._table[index] != AWAY:
            # Negative since `_unmap`: the same memory, so peers that have
            # it mapped may read it again.
            self._table[index] = abs(self._table[index])
        elif self._is_exported:
            try:
                self._publish(index)
            except BaseException:
                self._unmap(index)
                raise

    def _unmap(self, index: int) -> None:
        """Free a chunk, or leave the memory of a pool to inference."""
        if index not in self._pieces:
            self._free(index)
            self._present.discard(index)
            return
        # A peer that reads it now gets an error, and keeps it mapped.
        self._table[index] = -self._table[index]
        self._present.discard(index)
        for piece in self._pieces[index]:
            piece.leave((self.address, index))
        if self._present.isdisjoint(self._pieces):
            # Whoever still touches it must not find the contents of inference.
            self._permit("NONE")

    def _permit(self, right: str) -> None:
        """Give this right to all memory of a pool, in one call for each range without gaps."""
        # Chunks 3 4 5 9 less their positions 0 1 2 3 are 3 3 3 6: equal numbers are one range.
        for _, run in groupby(enumerate(sorted(self._pieces)), lambda place: place[1] - place[0]):
            places = [self._place(index) for _, index in run]
            self.driver.permit(places[0][0], sum(nbytes for _, nbytes in places), right)

    def _free(self, index: int) -> None:
        # First, so that a peer that fetches the descriptor later gets an error.
        self._table[index] = AWAY
        # While a descriptor is being sent, dropping it here would not close it.
        with sending:
            self._descriptors.pop(index, None)
        self.driver.unmap(*self._place(index))

    def handle(self, offset: int, numel: int, dtype: torch.dtype) -> DeviceHandle:
        """Return a handle for peers, of `numel` elements from byte `offset`.

        From the first call on every resident chunk is exported.
        """
        _raise_limit()
        # Chunks that were published before keep their serial numbers.
        for index in self._present:
            if self._table[index] == AWAY:
                self._publish(index)
        self._is_exported = True
        return DeviceHandle(
            table=self._table_memory.handle(0, self._table.size, torch.int64),
            reserved_nbytes=self.reserved_nbytes,
            chunk_nbytes=self.granularity,
            offset=offset,
            numel=numel,
            dtype=str(dtype).removeprefix("torch."),
        )

    def end(self) -> None:
        """Free everything; the range must not be used afterwards."""
        if self._is_inherited:
            return
        # Kernels on any stream may still use the memory.
        self.driver.synchronize()
        self.leave_pool()
        for index in self._present:
            self._free(index)
        self.driver.unreserve(self.address, self.reserved_nbytes)

    def _publish(self, index: int) -> None:
        try:
            fd = self.driver.export(self._place(index)[0])
        except DeviceMemoryError as error:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            num_open = len(os.listdir("/proc/self/fd"))
            raise DeviceMemoryError(
                f"chunk {index} of {self._table.size} ({self._place(index)[1]} bytes) cannot be "
                f"exported: {error}. This process has {num_open} of {limit} file descriptors open. "
                "Raise the limit (`ulimit -n`) if it is reached",
                code="cannot-export",
            ) from error
        # Programs that this process starts must not keep the memory allocated.
        os.set_inheritable(fd, False)
        # No local variable refers to it: in a traceback it would keep the descriptor open.
        self._descriptors[index] = Descriptor(fd)
        self._descriptors[index].offer(_name(self._table_memory.token, self._next_serial))
        shared = _SHARED if index in self._pieces else 0
        # Last: a peer may fetch the descriptor as soon as it reads the number.
        self._table[index] = self._next_serial | shared
        self._next_serial += 1


_all_chunks: weakref.WeakSet[Chunks] = weakref.WeakSet()


def _disown_all() -> None:
    """Close inherited descriptors in a forked child; tables and memory are the parent's."""
    for chunks in _all_chunks:
        chunks._is_inherited = True
        chunks._descriptors.clear()


os.register_at_fork(after_in_child=_disown_all)


def _name(table: str, serial: int) -> str:
    """Return the name under which the descriptor of a chunk is offered."""
    return f"{table}/{serial}"


@functools.cache
def _raise_limit() -> None:
    """Allow as many open descriptors as the system permits: every exported chunk needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class DevicePeer(_ChunkedRange):
    """A peer's flat tensor on a device, mapped into this process only while it is read.

    The memory may be on another GPU than the one this process uses, if they reach each other.
    """

    def __init__(self, handle: DeviceHandle, driver: CudaDriver) -> None:
        """Map the peer's table, and reserve an address range for its chunks.

        Raises TransportError when the owner is on another host, has ended or freed the buffer.
        """
        self._handle = handle
        self._table = map_pages(handle.table).numpy()
        super().__init__(driver, handle.reserved_nbytes, handle.chunk_nbytes)
        # Serial numbers of the mapped chunks, by chunk number.
        self._mapped: dict[int, int] = {}
        # The last tensor over the range keeps this object.
        end = weakref.finalize(self, driver.unreserve, self.address, handle.reserved_nbytes)
        end.atexit = False

    @contextmanager
    def mapped(self, chunks: list[int] | None = None) -> Iterator[torch.Tensor]:
        """Yield the flat tensor, of which the elements in `chunks` (default: all) may be read.

        Work queued inside the `with` block may read them too; reading other elements, or later, is
        an illegal access. Blocks do not overlap. Chunks of a pool stay mapped.

        Raises TransportError when the owner has released one of the chunks, also at the end (the
        bytes read may be outdated), and when the descriptors cannot be fetched.
        """
        if chunks is None:
            chunks = self._handle.chunks([Extent(0, self._handle.numel)])
        serials = self._table[chunks]
        # Negative numbers are of a pool's chunks without contents (`Chunks.unmap`).
        away = [chunk for chunk, serial in zip(chunks, serials, strict=True) if serial <= AWAY]
        if away:
            raise TransportError(
                f"the owner has released chunks {away} of its buffer "
                f"({self._handle.chunk_nbytes} bytes each): the read was not fenced, "
                "or the owner has offloaded its weights",
                code="chunks-are-released",
            )
        try:
            self._map(chunks, serials.tolist())
            # The owner may have released a chunk since its number was read.
            self._raise_if_changed(chunks, serials)
            dtype = getattr(torch, self._handle.dtype)
            nbytes = self._handle.numel * dtype.itemsize
            start = self.address + self._handle.offset
            try:
                yield tensor_over(start, nbytes, self.driver.device, self).view(dtype)
            finally:
                # Unmapping does not wait for queued work.
                self.driver.finish_stream()
            self._raise_if_changed(chunks, serials)
        finally:
            # Numbers of a pool are at least _SHARED, so its chunks stay mapped.
            self._unmap(index for index, serial in self._mapped.items() if serial < _SHARED)

    def trim(self) -> None:
        """Unmap the chunks that have left a pool."""
        self._unmap(index for index in self._mapped if self._table[index] == AWAY)

    def close(self) -> None:
        """Unmap all chunks; idempotent."""
        self._unmap(self._mapped)

    def _map(self, chunks: list[int], serials: list[int]) -> None:
        """Map the chunks that are not mapped, or mapped under an older serial number."""
        pairs = zip(chunks, serials, strict=True)
        # A chunk that joined or left a pool has another number than the one it was mapped under.
        missing = [(index, serial) for index, serial in pairs if self._mapped.get(index) != serial]
        if not missing:
            return
        table = self._handle.table
        descriptors = fetch(
            table.address, [_name(table.token, serial & ~_SHARED) for _, serial in missing]
        )
        try:
            for (index, serial), descriptor in zip(missing, descriptors, strict=True):
                if index in self._mapped:
                    self._unmap([index])
                self.driver.import_at(*self._place(index), descriptor)
                self._mapped[index] = serial
        except DeviceMemoryError as error:
            raise TransportError(
                f"chunk {index} of a peer's buffer cannot be mapped: {error}. If it lies on "
                "another GPU, the two must reach each other (nvidia-smi topo -p2p r); "
                "otherwise use the collective transport",
                code="cannot-map",
            ) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _raise_if_changed(self, chunks: list[int], serials: np.ndarray) -> None:
        if (self._table[chunks] != serials).any():
            raise TransportError(
                "the owner released chunks of its buffer while they were read; fence the switch",
                code="chunks-are-released",
            )

    def _unmap(self, mapped: Iterable[int]) -> None:
        """Unmap these chunks; queued reads must have ended."""
        for index in list(mapped):
            self.driver.unmap(*self._place(index))
            del self._mapped[index]
