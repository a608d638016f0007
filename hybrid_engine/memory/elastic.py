"""Elastic buffers: one address range whose physical pages come and go, and which peers on the host can read.

    ElasticBuffer(numel, dtype, device=...)   host_pages.py on the CPU, device_pages.py on CUDA
      .tensor, .address                       flat, and constant for the buffer's life
      .release(start, stop)                   returns memory to the system or the device, contents are lost
      .restore(start, stop)                   takes memory again: zero on the CPU, undefined on CUDA
      .export() -> Handle                     small and picklable; valid while the buffer is open and its process lives
    with reading(handle) as flat:             in another process of the host: the same memory, no copy

The two kinds differ in what a released range is: on the CPU it reads as zeros and takes memory again when touched; on
CUDA it must not be touched before `restore`. They also differ in what a peer may keep: host pages stay mapped
(`host_pages.map_pages`), device memory is mapped only while it is read (`open_peer`). The memory lives as long as any
tensor over it, so a tensor that outlives `close` stays valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from hybrid_engine.errors import StateError
from hybrid_engine.memory.cuda_driver import INSTALL_HINT, CudaDriver, driver_of
from hybrid_engine.memory.device_pages import DeviceHandle, DeviceMemory, DevicePeer
from hybrid_engine.memory.host_pages import BufferHandle, HostMemory, map_pages

Handle = BufferHandle | DeviceHandle


class ElasticBuffer:
    """A flat tensor whose memory can be released and taken again under one address, whole or in part.

    The object is a handle: memory, descriptors and mapping belong to the memory itself and last until `close`, or until
    neither a tensor over them nor this object is left.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        label: str = "buffer",
        device: torch.device | str = "cpu",
        *,
        resident: bool = True,
        in_parts: bool = True,
    ) -> None:
        """Reserve `numel` elements: on the CPU zeros with no page resident, on CUDA resident with undefined contents.

        Not `resident`: on CUDA nothing is, until `restore`. Not `in_parts`: on CUDA memory comes and goes in larger
        chunks, in fewer calls. `label` shows up in /proc/<pid>/maps. Raises
        DeviceMemoryError when the device has not enough memory, and StateError where it has no elastic buffers
        (`allocate_elastic` then gives an ordinary tensor).
        """
        if numel < 1:
            raise ValueError(f"numel must be >= 1, got {numel}")
        device = torch.device(device)
        if device.type == "cpu":
            self._attach(HostMemory.create(numel, dtype, label))
        else:
            driver = _require_driver(device)
            self._attach(DeviceMemory(driver, numel, dtype, label, resident=resident, in_parts=in_parts))

    def _attach(self, memory: HostMemory | DeviceMemory) -> None:
        self._memory = memory
        self._tensor: torch.Tensor | None = memory.tensor()
        _open_memories[memory.address] = memory
        _buffers[memory] = weakref.ref(self)

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

    @property
    def granularity(self) -> int:
        """Bytes in which memory comes and goes, counted from the start: a page on the CPU, a chunk on CUDA."""
        return self._memory.granularity

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Release the memory of the byte range [start, stop); contents are lost. Default: the whole buffer.

        Bounds are rounded inwards to whole granules, so a neighbour's bytes are never lost; the end of the buffer
        counts as the end of its last granule. On CUDA this waits for the current stream, and the memory is free once
        no peer has it mapped. Raises ValueError on an impossible range and StateError after `close`.
        """
        start, stop = self._checked(start, stop)
        granule = self._memory.granularity
        first = -(-start // granule) * granule
        last = self._memory.reserved_nbytes if stop == self.nbytes else stop // granule * granule
        if first < last:
            self._memory.release(first, last)

    def restore(self, start: int = 0, stop: int | None = None) -> None:
        """Take memory for the byte range [start, stop) again. Default: the whole buffer. Idempotent.

        What was released holds zeros on the CPU (where this does nothing: pages come when touched) and undefined
        values on CUDA; what is resident keeps its contents. Bounds are rounded outwards to whole granules. Raises
        DeviceMemoryError for lack of memory: what was restored stays, and a later call continues from there.
        """
        start, stop = self._checked(start, stop)
        granule = self._memory.granularity
        if start < stop:
            last = min(-(-stop // granule) * granule, self._memory.reserved_nbytes)
            self._memory.restore(start // granule * granule, last)

    def resident_nbytes(self) -> int:
        """Bytes of physical memory behind the buffer now, whole granules. Raises StateError after `close`."""
        return self._memory.resident_nbytes()

    def export(self) -> Handle:
        """The handle of the whole buffer, for peers. Raises StateError after `close`."""
        return self._memory.handle(0, self._memory.numel, self._memory.dtype)

    def close(self) -> None:
        """Let no new peer map the buffer; its memory is freed with the last tensor over it. Idempotent."""
        self._tensor = None
        self._memory.close()
        if _open_memories.get(self.address) is self._memory:
            del _open_memories[self.address]

    def _checked(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"invalid byte range [{start}, {stop}) of a buffer of {self.nbytes} bytes")
        return start, stop


def is_elastic(device: torch.device | str | int) -> bool:
    """Return whether the device has elastic buffers, which peers on its host can read."""
    device = torch.device(device)
    return device.type == "cpu" or (device.type == "cuda" and driver_of(_ordinal(device)) is not None)


def allocate_elastic(numel: int, dtype: torch.dtype, device: torch.device | str | int, kind: str) -> torch.Tensor:
    """Zero-filled flat tensor for a buffer of `kind` ("param", "grad", "relay"), elastic where that exists.

    The allocator that megatron_patches' buffer hook takes. Parameters leave bucket by bucket, all else whole.
    The tensor lies in an `ElasticBuffer` that lives as long as the tensor's storage (`exported_buffer_of` finds it). It
    is an ordinary tensor on a CUDA device without cuda-bindings or the driver's virtual memory (one logged line says
    so), and on other kinds of devices.
    """
    device = torch.device(device)
    if numel == 0 or not is_elastic(device):
        return torch.zeros(numel, dtype=dtype, device=device)
    flat = ElasticBuffer(numel, dtype, label=kind, device=device, in_parts=kind == "param").tensor
    return flat if device.type == "cpu" else flat.zero_()


def reserve_elastic(numel: int, dtype: torch.dtype, device: torch.device | str | int, kind: str) -> torch.Tensor:
    """Like `allocate_elastic`, but contents are undefined, and on CUDA there is no memory until `restore_elastic`."""
    device = torch.device(device)
    if device.type == "cpu" or numel == 0 or not is_elastic(device):
        return allocate_elastic(numel, dtype, device, kind)
    return ElasticBuffer(numel, dtype, label=kind, device=device, resident=False, in_parts=kind == "param").tensor


def restore_elastic(flat: torch.Tensor, stop: int) -> None:
    """Have memory for the first `stop` elements of a tensor of `reserve_elastic`; an ordinary one has it already.

    Raises DeviceMemoryError.
    """
    if (buffer := exported_buffer_of(flat)) is not None:
        buffer.restore(0, stop * flat.element_size())


def exported_buffer_of(tensor: torch.Tensor) -> ElasticBuffer | None:
    """Return the open elastic buffer of this process in which the tensor's storage lies, if any."""
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    memory = _open_memories.get(tensor.untyped_storage().data_ptr())
    if memory is None:
        return None
    existing = _buffers[memory]()
    if existing is None:
        existing = ElasticBuffer.__new__(ElasticBuffer)
        existing._attach(memory)
    return existing


def export_tensor(tensor: torch.Tensor) -> Handle | None:
    """Return the handle with which a peer finds this flat tensor; None unless it lies in an open elastic buffer.

    Raises ValueError when the tensor is not contiguous: a handle describes one flat run of elements.
    """
    buffer = exported_buffer_of(tensor)
    if buffer is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(
            f"only contiguous tensors can be exported, got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    return buffer._memory.handle(tensor.data_ptr() - buffer.address, tensor.numel(), tensor.dtype)


def open_peer(handle: DeviceHandle, device: torch.device | str = "cuda") -> DevicePeer:
    """Return the device memory behind `handle`, of this or another process on the host, to be mapped while it is read.

    `device`: the CUDA device of this process that will read it. Raises TransportError, with the remedy, when the owner
    is on another host or another user's, or has ended or closed the buffer.
    """
    return DevicePeer(handle, _require_driver(torch.device(device)))


@contextmanager
def reading(handle: Handle, device: torch.device | str = "cuda") -> Iterator[torch.Tensor]:
    """The flat tensor behind a handle of either kind, of which nothing may be kept after the block; see `open_peer`."""
    if isinstance(handle, BufferHandle):
        yield map_pages(handle)
        return
    with closing(open_peer(handle, device)) as peer, peer.mapped() as flat:
        yield flat


# Open memories of this process by address, and the one buffer object of each; an entry goes with its memory.
_open_memories: weakref.WeakValueDictionary[int, HostMemory | DeviceMemory] = weakref.WeakValueDictionary()
_buffers: weakref.WeakKeyDictionary[HostMemory | DeviceMemory, weakref.ref[ElasticBuffer]] = weakref.WeakKeyDictionary()


def _require_driver(device: torch.device) -> CudaDriver:
    driver = driver_of(_ordinal(device)) if device.type == "cuda" else None
    if driver is None:
        raise StateError(f"elastic buffers are not available on {device}: on CUDA they need {INSTALL_HINT}")
    return driver


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
