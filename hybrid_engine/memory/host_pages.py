"""Host memory that is released and restored at a constant address, and mapped by peers.

    create     memfd_create -> mmap -> flat tensor, reads zeros, no page resident yet
    release    fallocate(PUNCH_HOLE): pages back to the system, contents lost, address kept
    map_pages  in another process of the host, by descriptor (descriptors.py): the same pages

Pages become resident when they are first touched, reads included: a released range reads as zeros.
Restoring therefore needs no action, and populating pages in advance was measured to save little:
nearly all of the time is the kernel's, creating the pages.

Also here: the C library of this process, and tensors over memory that torch did not allocate, on
any device (`tensor_over`), even while the address is unmapped: torch does not access it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import secrets
import weakref
from typing import NoReturn

import torch

from hybrid_engine.errors import DependencyError, MessageError, StateError, TransportError, clipped
from hybrid_engine.memory.descriptors import Descriptor, fetch
from hybrid_engine.messages import Record
from hybrid_engine.ranks.torch_internals import storage_over


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library, whose calls set the error number that `raise_errno` reads."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mprotect.argtypes = library.madvise.argtypes
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return library


def raise_errno(call: str) -> NoReturn:
    """Raise the OSError of the last call of the C library; `call` describes it in the message."""
    code = ctypes.get_errno()
    raise OSError(code, f"{call}: {os.strerror(code)}")


def tensor_over(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return a flat uint8 tensor over [address, address + nbytes) of `device`.

    Its storage keeps `owner` alive.
    """
    storage = storage_over(address, nbytes, device)
    # Storages take any attribute, and torch keeps them with it until their last tensor dies.
    storage.owner = owner
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


PAGE = os.sysconf("SC_PAGE_SIZE")

# <sys/mman.h> on Linux.
_PROT_NONE = 0
_PROT_READ = 1
_PROT_WRITE = 2
_SHARED = 1
_PRIVATE = 2
_FIXED = 0x10
_ANONYMOUS = 0x20
# <linux/falloc.h>
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
# Unit of st_blocks, independent of the file system's block size.
_STAT_BLOCK = 512


class BufferHandle(Record, frozen=True, tag=True):
    """Location of a flat tensor in the host pages of another process on the same host.

    Attributes:
        address: address at which the owner offers the descriptor of the memory file.
        token: random name of the memory file, under which the descriptor is offered.
        file_nbytes: size of the memory file, whole pages.
        offset: start of the tensor in the file, in bytes.
        numel: elements of the tensor.
        dtype: torch's name of its dtype, without the prefix.

    Construction raises MessageError unless `dtype` is a dtype of torch and the tensor lies in whole
    elements within the file.
    """

    address: str
    token: str
    file_nbytes: int
    offset: int
    numel: int
    dtype: str

    def __post_init__(self) -> None:
        require_within(self.file_nbytes, self.offset, self.numel, self.dtype)


def require_within(nbytes: int, offset: int, numel: int, dtype: str) -> None:
    """Check that `numel` elements from byte `offset` are aligned and lie within `nbytes`.

    Raises MessageError otherwise, and if `dtype` is not the name of a dtype of torch.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise MessageError(
            f"a buffer of {clipped(dtype)!r}, which is not a dtype of torch",
            code="malformed-handle",
        )
    stop = offset + numel * torch_dtype.itemsize
    is_aligned = offset % torch_dtype.itemsize == 0
    if not (0 <= offset < stop <= nbytes and is_aligned):
        raise MessageError(
            f"a buffer of {numel} elements of {dtype} at byte {offset} does not lie in a memory "
            f"of {nbytes} bytes, or is not aligned",
            code="malformed-handle",
        )


class _FileMapping:
    """A mapped memory file, unmapped when neither this object nor a tensor over it is left."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        self.address = map_memory(nbytes, fd, writable=writable)
        self.reserved_nbytes = nbytes
        unmap = weakref.finalize(self, libc().munmap, self.address, nbytes)
        # Tensors may be read until the very end of the process. The system unmaps the file.
        unmap.atexit = False

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor from byte `offset`, which keeps the mapping alive."""
        nbytes = numel * dtype.itemsize
        return tensor_over(self.address + offset, nbytes, torch.device("cpu"), self).view(dtype)


class PoolPiece:
    """Physical memory of a pool (pool.py), with contents of one side at a time.

    It counts the parts of that side's address range that have contents in it.

    Attributes:
        is_late: inference has contents in it only after its weights are filled, or never.
    """

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self._side = ""
        self._parts: set[object] = set()

    def take(self, side: str, part: object) -> None:
        """Note that a part of `side` has contents here. Raises StateError if another side has."""
        if self._parts and not self.has_contents_of(side):
            raise StateError(
                f"memory of {side} still has contents of {self._side} ({len(self._parts)} parts): "
                "they must leave first",
                code="memory-in-use",
            )
        self._side = side
        self._parts.add(part)

    def has_contents_of(self, side: str) -> bool:
        return bool(self._parts) and self._side == side

    def leave(self, part: object) -> None:
        """Note that a part has no contents here any more."""
        self._parts.discard(part)


class HostMemory(_FileMapping):
    """A memory file of this process.

    Inference may borrow a part from its start, once all is released: pages of that part stay, and
    release and restore of the whole only note whose contents they have.
    """

    granularity = PAGE
    device = torch.device("cpu")
    is_late = False

    def __init__(self, nbytes: int, label: str) -> None:
        """Reserve bytes, none resident yet. `label` is visible in /proc/<pid>/maps.

        Raises DependencyError without memory files, and OSError.
        """
        if not hasattr(os, "memfd_create"):
            raise DependencyError(
                "elastic buffers need os.memfd_create: use Linux, and a Python built against "
                "glibc 2.27 or later",
                code="no-memfd",
            )
        safe_label = re.sub(r"[^A-Za-z0-9_-]", "_", label)[:64]
        self.token = f"hybrid_engine.{safe_label}.{secrets.token_hex(8)}"
        fd = os.memfd_create(self.token)
        try:
            os.ftruncate(fd, round_up(nbytes, PAGE))
            super().__init__(fd, round_up(nbytes, PAGE))
        except BaseException:
            os.close(fd)
            raise
        self._file = Descriptor(fd)
        self._piece: PoolPiece | None = None
        self.lent_nbytes = 0

    def release(self, first: int, last: int) -> None:
        """Return the pages of bytes [first, last), whole ones, to the system."""
        last = round_up(last, PAGE)
        if self._piece is not None:
            # Inference borrows from the start of the file until all of it
            # is back: a part frees nothing.
            if last - first < self.reserved_nbytes:
                return
            self._piece.leave(self)
            # Whoever still touches it must not find the contents of inference.
            self._permit(_PROT_NONE)
            # Pages of the loan stay for inference; only those behind it are freed.
            first = self.lent_nbytes
            if first == last:
                return
        # Unlike madvise(MADV_DONTNEED) it frees the file's pages, for all mappings.
        if libc().fallocate(self._file.fd, _PUNCH_HOLE | _KEEP_SIZE, first, last - first):
            raise_errno(f"fallocate(PUNCH_HOLE) of {last - first} bytes at {first}")

    def restore(self, first: int, last: int) -> None:
        """Take the pages of a loan back, zero; any other page is allocated when it is touched."""
        if self._piece is not None and self._is_lent:
            try:
                self._piece.take("training", self)
                self._permit(_PROT_READ | _PROT_WRITE)
                # Lent pages hold inference's bytes. Those behind were freed, and read as zeros.
                self.view(0, self.reserved_nbytes, torch.uint8)[: self.lent_nbytes].zero_()
            except BaseException:
                self._piece.leave(self)
                raise

    def lend(self, piece: PoolPiece) -> int:
        """Let inference have contents in the file, of which all contents are lost.

        Returns the descriptor of the file, of which inference may map the first `lent_nbytes`: all,
        unless the caller sets fewer. `piece` knows which side has contents. Raises StateError if
        inference has contents by an earlier loan.
        """
        if self._piece is not None and self._piece.has_contents_of("inference"):
            raise StateError(
                "memory of training still has contents of another engine: shut it down first",
                code="memory-in-use",
            )
        # Without a piece `release` frees all pages, where with one it keeps those of the loan.
        self._piece = None
        self.release(0, self.reserved_nbytes)
        self._piece = piece
        self.lent_nbytes = self.reserved_nbytes
        self._permit(_PROT_NONE)
        return self._file.fd

    def end_loan(self) -> None:
        """Free all pages, unless training has contents in them; nobody maps them any more."""
        is_lent = self._is_lent
        self._piece = None
        if is_lent:
            self._permit(_PROT_READ | _PROT_WRITE)
            self.release(0, self.reserved_nbytes)

    @property
    def _is_lent(self) -> bool:
        return self._piece is not None and not self._piece.has_contents_of("training")

    def _permit(self, protection: int) -> None:
        if libc().mprotect(self.address, self.reserved_nbytes, protection):
            raise_errno(f"mprotect of {self.reserved_nbytes} bytes")

    def resident_nbytes(self) -> int:
        """Return the bytes of physical memory behind the file now, whole pages."""
        if self._is_lent:
            return 0
        return os.fstat(self._file.fd).st_blocks * _STAT_BLOCK

    def handle(self, offset: int, numel: int, dtype: torch.dtype) -> BufferHandle:
        """Return a handle for peers, of `numel` elements from byte `offset`."""
        return BufferHandle(
            address=self._file.offer(self.token),
            token=self.token,
            file_nbytes=self.reserved_nbytes,
            offset=offset,
            numel=numel,
            dtype=str(dtype).removeprefix("torch."),
        )


def map_pages(handle: BufferHandle) -> torch.Tensor:
    """Map the pages behind `handle`, of this or another process on the host, without a copy.

    Returns a flat tensor over the owner's pages, which stay mapped until the tensor dies. They are
    read-only: a write ends the process with SIGSEGV. Raises TransportError as `fetch` does, and if
    the file has another size or cannot be mapped.
    """
    (fd,) = fetch(handle.address, [handle.token])
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes != handle.file_nbytes:
            # A read beyond the end of the file would end this process with SIGBUS.
            raise TransportError(
                f"{handle.address}: the memory file has {nbytes} bytes, its handle announced "
                f"{handle.file_nbytes}; exchange the handles again",
                code="wrong-file-size",
            )
        mapping = _FileMapping(fd, nbytes, writable=False)
    except OSError as error:
        raise TransportError(f"{handle.address}: {error.strerror}", code="cannot-map") from error
    finally:
        os.close(fd)
    return mapping.view(handle.offset, handle.numel, getattr(torch, handle.dtype))


def map_memory(
    nbytes: int, fd: int = -1, *, writable: bool = True, at: int | None = None, offset: int = 0
) -> int:
    """Map a file from `offset`, or new memory if `fd` is -1, and return the address.

    `at`: address of whole pages, which are replaced. Raises OSError.
    """
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    flags = (_PRIVATE | _ANONYMOUS if fd < 0 else _SHARED) | (0 if at is None else _FIXED)
    # Python's mmap would keep a duplicate of the descriptor.
    address = libc().mmap(at, nbytes, protection, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise_errno(f"mmap of {nbytes} bytes")
    return address
