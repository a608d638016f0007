"""Host memory whose pages come and go under one address: a memory file, mapped by its owner and by peers.

    create     memfd_create -> mmap -> flat tensor, reads zeros, no page resident yet
    release    fallocate(PUNCH_HOLE): pages back to the system, contents lost, address kept
    map_pages  in another process of the host, by its descriptor (descriptors.py): the same pages, no copy

Pages become resident when they are first touched, reads included: reading a released range gives zeros and makes its
pages resident again. Restoring a range therefore needs no action. Populating pages in advance was measured, 256 MB in
one thread, CPU time: a copy into absent pages 187 ms; after `fallocate` and MADV_POPULATE_WRITE 165 ms in all, after
either alone 170 and 185; into resident pages 15 ms. Nearly all of it is the kernel creating the pages in either
case, so it was left out.

Also here: the C library of this process, and tensors over memory that torch did not allocate, on any device
(`tensor_over`). These are made through DLPack, since torch takes the device from the record and does not access the
address, which may still be unmapped. The owner lives as long as the tensor's storage.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import secrets
import weakref
from typing import NoReturn

import torch
from torch.utils.dlpack import from_dlpack

from hybrid_engine.errors import DependencyError, MessageError, StateError, TransportError, clipped
from hybrid_engine.memory.descriptors import Descriptor, fetch
from hybrid_engine.messages import Record


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library; its calls set the error number that `raise_errno` reads."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return library


def raise_errno(what: str) -> NoReturn:
    """Raise the OSError of the last call, which was `what`."""
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLDeviceType
_UNSIGNED = 1  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h. The deleter is kept as an address, so that it can be taken out."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_lent: dict[int, tuple[_ManagedTensor, ctypes.Array[ctypes.c_int64], object]] = {}
"""By address of the record: what must stay alive until torch returns it."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _give_back(address: int) -> None:
    _lent.pop(address, None)


def tensor_over(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return a flat uint8 tensor over [address, address + nbytes) of `device`; its storage keeps `owner` alive."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    flat = _Tensor(
        data=address,
        device_type=_DEVICE_TYPES[device.type],
        device_id=device.index or 0,
        ndim=1,
        code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=shape,
    )
    managed = _ManagedTensor(flat, None, ctypes.cast(_give_back, ctypes.c_void_p))
    key = ctypes.addressof(managed)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(key, b"dltensor", None)
    _lent[key] = (managed, shape, owner)
    try:
        return from_dlpack(capsule)
    except BaseException:
        _lent.pop(key, None)
        raise


def host_tensor_over(address: int, nbytes: int, dtype: torch.dtype, numel: int, owner: object) -> torch.Tensor:
    """Return a flat tensor of `numel` elements over host memory of `nbytes`; its storage keeps `owner` alive.

    Unlike `tensor_over` it runs no Python when the tensor dies, so it can be made and dropped at any time.
    """
    pages = (ctypes.c_ubyte * nbytes).from_address(address)
    pages.owner = owner  # type: ignore[attr-defined]  # ctypes arrays take any attribute; torch keeps this one
    return torch.frombuffer(pages, dtype=dtype, count=numel)


@atexit.register
def _forget() -> None:
    """Storages that outlive the interpreter must not call back into it; the system frees their memory."""
    for managed, _, _ in _lent.values():
        managed.deleter = None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))  # torch still reads the record


PAGE = os.sysconf("SC_PAGE_SIZE")
_PROT_READ, _PROT_WRITE, _SHARED, _PRIVATE, _ANONYMOUS = 1, 2, 1, 2, 0x20  # <sys/mman.h> on Linux
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>
_STAT_BLOCK = 512  # st_blocks counts these, whatever the file system's own block size


class BufferHandle(Record, frozen=True):
    """How a process finds a flat tensor in the host pages of another process on the same host.

    Attributes:
        address: where the owner is asked for its descriptor of the memory file.
        token: random name of the memory file, by which it is asked for.
        file_nbytes: size of the memory file, whole pages.
        offset: where the tensor starts in the file, in bytes.
        numel, dtype: of the tensor; dtype is torch's name without the prefix.

    Raises MessageError, whoever makes it, unless the tensor is of a dtype of torch's and lies in whole elements within
    the file.
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
    """Raise MessageError unless `numel` elements from byte `offset` are of a dtype of torch and lie in `nbytes`."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise MessageError(f"a buffer of {clipped(dtype)!r}, which is not a dtype of torch")
    stop = offset + numel * kind.itemsize
    is_aligned = offset % kind.itemsize == 0
    if not (0 <= offset < stop <= nbytes and is_aligned):
        raise MessageError(
            f"a buffer of {numel} elements of {dtype} at byte {offset} does not lie in a memory of {nbytes} bytes"
        )


class HostMemory:
    """A mapped memory file, unmapped when the last tensor over it and this object are gone."""

    granularity = PAGE

    def __init__(self, address: int, reserved_nbytes: int, fd: int | None = None) -> None:
        self.address = address
        self.reserved_nbytes = reserved_nbytes
        self.numel = self.nbytes = 0
        self.dtype = torch.uint8
        self.token = ""
        self._unmap = weakref.finalize(self, libc().munmap, address, reserved_nbytes)
        self._unmap.atexit = False  # tensors may be read until the very end; the system unmaps
        self._file = None if fd is None else Descriptor(fd)

    @classmethod
    def create(cls, numel: int, dtype: torch.dtype, label: str) -> HostMemory:
        """Reserve `numel` elements; no page is resident yet. `label` shows up in /proc/<pid>/maps."""
        if not hasattr(os, "memfd_create"):
            raise DependencyError("elastic buffers need os.memfd_create: Linux, and a Python built against glibc 2.27+")
        nbytes = numel * dtype.itemsize
        file_nbytes = -(-nbytes // PAGE) * PAGE
        token = f"hybrid_engine.{re.sub(r'[^A-Za-z0-9_-]', '_', label)[:64]}.{secrets.token_hex(8)}"
        fd = os.memfd_create(token)
        try:
            os.ftruncate(fd, file_nbytes)
            address = map_memory(file_nbytes, fd)
        except BaseException:
            os.close(fd)
            raise
        memory = cls(address, file_nbytes, fd)
        memory.numel, memory.nbytes, memory.dtype, memory.token = numel, nbytes, dtype, token
        return memory

    def tensor(self) -> torch.Tensor:
        """The whole memory as it was created."""
        return self.view(0, self.numel, self.dtype)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over a part, which keeps the mapping alive; `offset` in bytes."""
        return host_tensor_over(self.address + offset, self.reserved_nbytes - offset, dtype, numel, self)

    def release(self, first: int, last: int) -> None:
        """Give the pages of bytes [first, last) back, multiples of `granularity`."""
        if libc().fallocate(self._open_file().fd, _PUNCH_HOLE | _KEEP_SIZE, first, last - first):
            raise_errno(f"fallocate(PUNCH_HOLE) of {last - first} bytes at {first}")

    def restore(self, first: int, last: int) -> None:
        """Nothing to do: a page comes back, zero, when it is touched."""
        self._open_file()

    def resident_nbytes(self) -> int:
        """Bytes of physical memory behind it now, whole pages."""
        return os.fstat(self._open_file().fd).st_blocks * _STAT_BLOCK

    def handle(self, offset: int, numel: int, dtype: torch.dtype) -> BufferHandle:
        """For peers: `numel` elements from byte `offset`."""
        return BufferHandle(
            address=self._open_file().offer(self.token),
            token=self.token,
            file_nbytes=self.reserved_nbytes,
            offset=offset,
            numel=numel,
            dtype=str(dtype).removeprefix("torch."),
        )

    def close(self) -> None:
        """No new peer can map it; idempotent."""
        self._file = None

    def _open_file(self) -> Descriptor:
        if self._file is None:
            raise StateError("the elastic buffer is closed")
        return self._file


def map_pages(handle: BufferHandle) -> torch.Tensor:
    """Map the pages behind `handle`, of this or another process on the host, and keep them mapped; no bytes are copied.

    Returns a flat tensor over the owner's pages, valid (also after the owner ended) until the tensor dies. They are
    mapped read-only: a write through the tensor ends the process with SIGSEGV. Raises TransportError as `fetch` does,
    and where the owner passes a file of another size, or one that cannot be mapped.
    """
    (fd,) = fetch(handle.address, [handle.token])
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes != handle.file_nbytes:  # a read beyond the end of the file would end this process
            raise TransportError(
                f"{handle.address}: the memory file has {nbytes} bytes, and its handle says {handle.file_nbytes}"
            )
        address = map_memory(handle.file_nbytes, fd, writable=False)
    except OSError as error:
        raise TransportError(f"{handle.address}: {error.strerror}") from error
    finally:
        os.close(fd)
    return HostMemory(address, handle.file_nbytes).view(handle.offset, handle.numel, getattr(torch, handle.dtype))


def map_memory(nbytes: int, fd: int = -1, *, writable: bool = True) -> int:
    """Address of a mapped file, or of new memory. Not Python's mmap: that keeps a duplicate of the descriptor."""
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    address = libc().mmap(None, nbytes, protection, _PRIVATE | _ANONYMOUS if fd < 0 else _SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise_errno(f"mapping {nbytes} bytes")
    return address
