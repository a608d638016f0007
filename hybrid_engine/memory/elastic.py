"""Elastic buffers: one address range whose physical pages come and go, and which peers on the host can map.

    ElasticBuffer(numel, dtype)      memfd_create -> mmap -> flat tensor, reads zeros, no page resident yet
      .release(start, stop)          fallocate(PUNCH_HOLE): pages back to the system, contents lost, address kept
      .export() -> BufferHandle      small and picklable; valid while the buffer is open and its process lives
    map_peer(handle) -> tensor       in another process of the host: the same pages, no copy

Pages become resident when they are first touched, reads included: reading a released range gives zeros and makes
its pages resident again. The mapping lives as long as any tensor over it does, so a tensor that outlives `close`
stays valid. This is the CPU variant; on CUDA `allocate_elastic` gives an ordinary tensor.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import secrets
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from hybrid_engine.errors import DependencyError, StateError, TransportError

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROT_READ, _PROT_WRITE, _MAP_SHARED = 1, 2, 1  # <sys/mman.h> on Linux
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>
_STAT_BLOCK = 512  # st_blocks counts these, whatever the file system's own block size


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """How a process on the same host finds a flat tensor that lies in an elastic buffer.

    Attributes:
        host: `host_id()` of the owner: boot and process namespace. Only there do `pid` and `fd` mean anything.
        pid, fd: the owner's process and its descriptor of the memory file.
        token: random name of the memory file, so that a reused pid or descriptor is noticed.
        file_nbytes: size of the memory file, whole pages.
        offset: where the tensor starts in the file, in bytes.
        numel, dtype: of the tensor; dtype is torch's name without the prefix.
    """

    host: str
    pid: int
    fd: int
    token: str
    file_nbytes: int
    offset: int
    numel: int
    dtype: str


class ElasticBuffer:
    """A zero-filled flat tensor on the CPU whose pages can be given back and taken again under one address.

    Implements `ports.ExportableBuffer`. The object is a handle: pages, descriptor and mapping belong to the memory
    itself and last until `close`, or until neither a tensor over them nor this object is left.
    """

    def __init__(self, numel: int, dtype: torch.dtype, label: str = "buffer") -> None:
        """Reserve `numel` elements; no page is resident yet. `label` shows up in /proc/<pid>/maps."""
        if numel < 1:
            raise ValueError(f"an elastic buffer holds at least 1 element, not {numel}")
        self._attach(_Memory.create(numel, dtype, label))

    def _attach(self, memory: _Memory) -> None:
        self._memory = memory
        self._tensor: torch.Tensor | None = memory.tensor()
        memory.buffer = weakref.ref(self)

    @classmethod
    def _on(cls, memory: _Memory) -> ElasticBuffer:
        """The buffer of `memory`: the one that exists, or a new one on the same pages."""
        existing = memory.buffer() if memory.buffer is not None else None
        if existing is not None:
            return existing
        buffer = cls.__new__(cls)
        buffer._attach(memory)
        return buffer

    @property
    def tensor(self) -> torch.Tensor:
        """The whole buffer, flat. Raises StateError after `close`."""
        if self._tensor is None:
            raise StateError("the elastic buffer is closed")
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, resident or not."""
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Where the tensor starts; constant for the buffer's life."""
        return self._memory.address

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Give the pages of the byte range [start, stop) back; it then reads zeros. Default: the whole buffer.

        Bounds are rounded inwards to whole pages, so a neighbour's bytes are never lost; the end of the buffer counts
        as the end of its last page. Raises ValueError on an impossible range and StateError after `close`.
        """
        stop = self.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"byte range [{start}, {stop}) of a buffer of {self.nbytes} bytes")
        first = -(-start // _PAGE) * _PAGE
        last = self._memory.file_nbytes if stop == self.nbytes else stop // _PAGE * _PAGE
        if first < last:
            _punch_hole(self._memory.open_fd(), first, last - first)

    @property
    def granularity(self) -> int:
        """Bytes that `release` gives back at once: a page. Bounds within the buffer are rounded to it."""
        return _PAGE

    def restore(self, start: int = 0, stop: int | None = None) -> None:
        """Have the memory of the byte range [start, stop) again, zero where it was released. Idempotent.

        Pages come by themselves when they are touched, so nothing is done here.
        """
        stop = self.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"byte range [{start}, {stop}) of a buffer of {self.nbytes} bytes")
        self._memory.open_fd()

    def resident_nbytes(self) -> int:
        """Bytes of physical memory behind the buffer now, whole pages. Raises StateError after `close`."""
        return os.fstat(self._memory.open_fd()).st_blocks * _STAT_BLOCK

    def export(self) -> BufferHandle:
        """The handle of the whole buffer for `map_peer`. Raises StateError after `close`."""
        return self._handle(0, self._memory.numel, self._memory.dtype)

    def _handle(self, offset: int, numel: int, dtype: torch.dtype) -> BufferHandle:
        memory = self._memory
        return BufferHandle(
            host=host_id(),
            pid=os.getpid(),
            fd=memory.open_fd(),
            token=memory.token,
            file_nbytes=memory.file_nbytes,
            offset=offset,
            numel=numel,
            dtype=str(dtype).removeprefix("torch."),
        )

    def close(self) -> None:
        """End the buffer: no new peer can map it, and its memory goes with the last tensor over it. Idempotent."""
        self._tensor = None
        self._memory.close()


def allocate_elastic(numel: int, dtype: torch.dtype, device: torch.device | str | int, kind: str) -> torch.Tensor:
    """Zero-filled flat tensor for a training buffer of `kind` ("param" or "grad"), elastic where that exists.

    The allocator that megatron_patches' buffer hook takes. On the CPU the tensor lies in an `ElasticBuffer` that lives
    as long as the tensor's storage (`exported_buffer_of` finds it); elsewhere it is an ordinary tensor.
    """
    device = torch.device(device)
    if device.type != "cpu" or numel == 0:
        return torch.zeros(numel, dtype=dtype, device=device)
    return ElasticBuffer(numel, dtype, label=kind).tensor


def exported_buffer_of(tensor: torch.Tensor) -> ElasticBuffer | None:
    """The elastic buffer of this process in which the tensor's storage lies; None if there is none or it is closed."""
    memory = _memory_of(tensor)
    return None if memory is None else ElasticBuffer._on(memory)


def export_tensor(tensor: torch.Tensor) -> BufferHandle | None:
    """The handle with which a peer maps this flat tensor; None unless it lies in an open elastic buffer.

    Raises ValueError when the tensor is not contiguous: a handle describes one flat run of elements.
    """
    buffer = exported_buffer_of(tensor)
    if buffer is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not flat")
    return buffer._handle(tensor.data_ptr() - buffer.address, tensor.numel(), tensor.dtype)


def map_peer(handle: BufferHandle, *, writable: bool = False) -> torch.Tensor:
    """Map the tensor behind `handle`, of this or another process on the host; no bytes are copied.

    Returns a flat tensor over the owner's pages, valid (also after the owner ended) until the tensor dies. Unless
    `writable`, the pages are mapped read-only and a write through the tensor ends the process with SIGSEGV.
    Raises TransportError, with the remedy, when the owner is on another host, has ended or closed the buffer, or
    may not be inspected.
    """
    if handle.host != host_id():
        raise TransportError(
            f"the buffer of process {handle.pid} is on host {handle.host!r}, this process on {host_id()!r}; "
            "read it by the collective transport"
        )
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except PermissionError as error:
        raise TransportError(
            f"not permitted to open {path}; run all ranks of a host as one user without dropped capabilities, "
            "or choose the collective transport"
        ) from error
    except OSError as error:
        raise TransportError(f"{path} cannot be opened ({error.strerror}): its process ended or closed it") from error
    try:
        _check_identity(fd, handle, path)
        address = _mmap(fd, handle.file_nbytes, writable=writable)
    finally:
        os.close(fd)
    return _Memory(address, handle.file_nbytes).view(handle.offset, handle.numel, getattr(torch, handle.dtype))


@functools.cache
def host_id() -> str:
    """Equal for two processes exactly when they can see each other under /proc: boot id and process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


# Open memories of this process by address; an entry goes when its memory is closed or unmapped.
_open_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


class _Memory:
    """A mapping, unmapped when the last tensor and the last buffer object over it are gone."""

    def __init__(self, address: int, file_nbytes: int, fd: int | None = None) -> None:
        self.address = address
        self.file_nbytes = file_nbytes
        self.numel = self.nbytes = 0
        self.dtype = torch.uint8
        self.token = ""
        self.buffer: weakref.ref[ElasticBuffer] | None = None
        self._unmap = weakref.finalize(self, _munmap, address, file_nbytes)
        self._unmap.atexit = False  # tensors may be read until the very end; the system unmaps
        self._fd = fd
        self._close_fd = None if fd is None else weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, numel: int, dtype: torch.dtype, label: str) -> _Memory:
        if not hasattr(os, "memfd_create"):
            raise DependencyError("elastic buffers need os.memfd_create: Linux, and a Python built against glibc 2.27+")
        nbytes = numel * dtype.itemsize
        file_nbytes = -(-nbytes // _PAGE) * _PAGE
        token = f"hybrid_engine.{re.sub(r'[^A-Za-z0-9_-]', '_', label)[:64]}.{secrets.token_hex(8)}"
        fd = os.memfd_create(token)
        try:
            os.ftruncate(fd, file_nbytes)
            address = _mmap(fd, file_nbytes, writable=True)
        except BaseException:
            os.close(fd)
            raise
        memory = cls(address, file_nbytes, fd)
        memory.numel, memory.nbytes, memory.dtype, memory.token = numel, nbytes, dtype, token
        _open_memories[address] = memory
        return memory

    def open_fd(self) -> int:
        """The descriptor; StateError once closed."""
        if self._fd is None:
            raise StateError("the elastic buffer is closed")
        return self._fd

    def tensor(self) -> torch.Tensor:
        """The whole memory as it was created."""
        return self.view(0, self.numel, self.dtype)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over a part, which keeps the mapping alive."""
        pages = (ctypes.c_ubyte * (self.file_nbytes - offset)).from_address(self.address + offset)
        pages.memory = self  # torch keeps `pages`, and so the mapping, as long as the storage lives
        return torch.frombuffer(pages, dtype=dtype, count=numel)

    def close(self) -> None:
        if self._close_fd is not None and self._close_fd.alive:
            self._close_fd()
            self._fd = None
            _open_memories.pop(self.address, None)


def _memory_of(tensor: torch.Tensor) -> _Memory | None:
    if tensor.device.type != "cpu":
        return None
    return _open_memories.get(tensor.untyped_storage().data_ptr())


def _check_identity(fd: int, handle: BufferHandle, path: str) -> None:
    """The opened file must be the memory the handle was made for: a pid or descriptor may have been used again."""
    target, nbytes = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size
    if f"memfd:{handle.token} " not in f"{target} " or nbytes != handle.file_nbytes:
        raise TransportError(
            f"{path} is {target} of {nbytes} bytes, expected memfd:{handle.token} of {handle.file_nbytes}: "
            "the owner closed its buffer since the handles were exchanged; exchange them again"
        )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _mmap(fd: int, nbytes: int, *, writable: bool) -> int:
    """Address of the mapped file. Not Python's mmap: that keeps a duplicate of the descriptor."""
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    address = _libc().mmap(None, nbytes, protection, _MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        _raise_errno(f"mmap of {nbytes} bytes")
    return address


def _munmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)


def _punch_hole(fd: int, offset: int, nbytes: int) -> None:
    if _libc().fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes) != 0:
        _raise_errno(f"fallocate(PUNCH_HOLE) of {nbytes} bytes at {offset}")


def _raise_errno(what: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")
