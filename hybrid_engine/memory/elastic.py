"""Elastic buffers: memory that is released and restored at a constant address, readable by peers.

    ElasticBuffer(numel, dtype, device=...)   host_pages.py on the CPU, device_pages.py on CUDA
      .tensor, .address                       flat, and constant for the buffer's life
      .release(start, stop)                   frees memory of the range; contents are lost
      .restore(start, stop)                   allocates it again: zero on the CPU, undefined on CUDA
      .export() -> Handle                     small and picklable; valid while the buffer exists
    with reading(handle) as flat:             in another process of the host: the same memory

A released range reads as zeros on the CPU and is allocated again when touched; on CUDA it must not
be touched before `restore`. A peer keeps host pages mapped (`host_pages.map_pages`), and device
memory only while it reads it (`open_peer`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from hybrid_engine.errors import StateError
from hybrid_engine.memory.cuda_driver import INSTALL_HINT, CudaDriver, driver_of
from hybrid_engine.memory.device_pages import Chunks, DeviceHandle, DevicePeer
from hybrid_engine.memory.host_pages import (
    BufferHandle,
    HostMemory,
    map_pages,
    round_up,
    tensor_over,
)

Handle = BufferHandle | DeviceHandle


class ElasticBuffer:
    """A flat tensor whose memory can be released and restored at one address, whole or in part.

    When neither this object nor a tensor over it is left, the memory is freed and no peer can map
    it again.

    Attributes:
        nbytes: bytes of the tensor, resident or not.
        address: start of the tensor; constant.
        granularity: unit of release, in bytes from the start: a page on the CPU, a chunk on CUDA.
        memory: owner of pages, descriptors and mapping.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        label: str = "buffer",
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserve `numel` elements; on CUDA no memory is allocated until `restore`.

        Args:
            numel: elements; at least one.
            dtype: dtype of the tensor.
            label: visible in /proc/<pid>/maps.
            device: "cpu" or a CUDA device.

        Raises:
            StateError: the device has no elastic buffers (`allocate_elastic` then returns an
                ordinary tensor).
        """
        device = torch.device(device)
        self._numel = numel
        self._dtype = dtype
        self.nbytes = numel * dtype.itemsize
        if device.type == "cpu":
            self.memory: HostMemory | Chunks = HostMemory(self.nbytes, label)
        else:
            self.memory = Chunks(_require_driver(device), self.nbytes, label)
            # Tensors may be read until the very end of the process. The driver frees the memory.
            weakref.finalize(self, self.memory.end).atexit = False
        self.address = self.memory.address
        self.granularity = self.memory.granularity
        _buffers[self.address] = self

    @property
    def tensor(self) -> torch.Tensor:
        """Flat tensor over the whole buffer."""
        flat = tensor_over(self.address, self.nbytes, self.memory.device, self)
        return flat.view(self._dtype)

    def inside(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes of the granules wholly inside [start, stop); the last ends at `nbytes`.

        With granules of 4,096 bytes, 4,096 to 8,192 are inside 1,000 to 10,000.
        """
        granule = self.granularity
        return round_up(start, granule), stop if stop == self.nbytes else stop // granule * granule

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Release the byte range [start, stop); contents are lost. Default: the whole buffer.

        Granules shared with a neighbouring range stay. On CUDA this waits for the current stream,
        and the memory is free once no peer has it mapped.
        """
        first, last = self.inside(start, self.nbytes if stop is None else stop)
        if first < last:
            self.memory.release(first, last)

    def restore(self, start: int = 0, stop: int | None = None) -> None:
        """Allocate the byte range [start, stop) again. Default: the whole buffer. Idempotent.

        So is the rest of its granules. Released ones then hold zeros on the CPU and undefined
        values on CUDA; resident ones keep their contents. Raises DeviceMemoryError for lack of
        memory: restored granules stay, and a later call continues from there.
        """
        stop = self.nbytes if stop is None else stop
        if start < stop:
            self.memory.restore(start, stop)

    def resident_nbytes(self) -> int:
        """Return the bytes of physical memory behind the buffer, whole granules."""
        return self.memory.resident_nbytes()

    def export(self) -> Handle:
        """Return the handle of the whole buffer, for peers."""
        return self.memory.handle(0, self._numel, self._dtype)


def is_elastic(device: torch.device | str | int) -> bool:
    """Return True if the device has elastic buffers, which peers on its host can read."""
    device = torch.device(device)
    return device.type == "cpu" or _driver_of(device) is not None


def allocate_elastic(
    numel: int, dtype: torch.dtype, device: torch.device | str | int, kind: str
) -> torch.Tensor:
    """Allocate a zero-filled flat tensor of `kind` ("param", "grad", "relay"), elastic if possible.

    Allocator of the buffer hook of megatron_patches. The tensor lies in an `ElasticBuffer` that
    lives as long as its storage (`exported_buffer_of`). It is an ordinary tensor on a device
    without elastic memory; on CUDA the reason is logged once.
    """
    flat = reserve_elastic(numel, dtype, device, kind)
    restore_elastic(flat, numel)
    # On the CPU new pages are zero.
    return flat if torch.device(device).type == "cpu" else flat.zero_()


def reserve_elastic(
    numel: int, dtype: torch.dtype, device: torch.device | str | int, kind: str
) -> torch.Tensor:
    """Reserve a tensor as `allocate_elastic` does, but with undefined contents.

    On CUDA no memory is allocated until `restore_elastic`.
    """
    device = torch.device(device)
    if numel == 0 or not is_elastic(device):
        return torch.zeros(numel, dtype=dtype, device=device)
    return ElasticBuffer(numel, dtype, kind, device).tensor


def restore_elastic(flat: torch.Tensor, stop: int) -> None:
    """Allocate the first `stop` elements of a tensor of `reserve_elastic`.

    Does nothing for an ordinary tensor. Raises DeviceMemoryError.
    """
    buffer = exported_buffer_of(flat)
    if buffer is not None:
        buffer.restore(0, stop * flat.element_size())


def exported_buffer_of(tensor: torch.Tensor) -> ElasticBuffer | None:
    """Return the elastic buffer of this process that contains the tensor's storage, if any."""
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    # Storages over elastic memory begin at the address of the memory.
    return _buffers.get(tensor.untyped_storage().data_ptr())


def export_tensor(tensor: torch.Tensor) -> Handle | None:
    """Return the handle of a contiguous tensor, else ValueError; None without an elastic buffer."""
    buffer = exported_buffer_of(tensor)
    if buffer is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(
            "only contiguous tensors can be exported, "
            f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    offset = tensor.data_ptr() - buffer.address
    return buffer.memory.handle(offset, tensor.numel(), tensor.dtype)


def open_peer(handle: DeviceHandle, device: torch.device | str = "cuda") -> DevicePeer:
    """Return a peer for the device memory behind `handle`, to be mapped while it is read.

    `device`: the CUDA device of this process that will read it. Raises TransportError, with the
    remedy, when the owner is on another host, of another user, or has ended or freed the buffer.
    """
    return DevicePeer(handle, _require_driver(torch.device(device)))


@contextmanager
def reading(handle: Handle, device: torch.device | str = "cuda") -> Iterator[torch.Tensor]:
    """Yield the flat tensor behind a handle of either kind, valid only inside the block.

    Raises as `map_pages` or `open_peer`.
    """
    if isinstance(handle, BufferHandle):
        yield map_pages(handle)
        return
    with closing(open_peer(handle, device)) as peer, peer.mapped() as flat:
        yield flat


# Buffers of this process, by address.
_buffers: weakref.WeakValueDictionary[int, ElasticBuffer] = weakref.WeakValueDictionary()


def _require_driver(device: torch.device) -> CudaDriver:
    driver = _driver_of(device)
    if driver is None:
        raise StateError(
            f"elastic buffers are not available on {device}: on CUDA they need {INSTALL_HINT}",
            code="no-elastic-buffers",
        )
    return driver


def _driver_of(device: torch.device) -> CudaDriver | None:
    if device.type != "cuda":
        return None
    return driver_of(torch.cuda.current_device() if device.index is None else device.index)
