"""A model of `cuda.bindings.driver` on the CPU: the virtual memory calls, their rules and their way of being called.

Not CUDA. Physical memory is a memory file, an address range is a reserved mapping of this process, an exported
descriptor is the file's: so tensors over it work, other processes can import it, and touching what is not mapped or
has no access yet ends the process, as it ends a CUDA context. New memory is full of garbage. Calls return
`(CUresult, values...)`, as the bindings do, and an error code where a rule is broken:

    sizes and addresses are multiples of the granularity
    a range in which something is mapped cannot be mapped again, or given back
    only whole mappings can be unmapped, and only what is mapped
    access is set for what is mapped
    a released handle cannot be used again
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GARBAGE = 0xA5
_NONE, _READ_WRITE = 0, 3  # <sys/mman.h> on Linux
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 1, 2, 0x10, 0x20


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


Answer = tuple[Any, ...]
"""A code and values."""
OK, INVALID = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_VALUE


@dataclass
class _Physical:
    """A memory file. `is_own`: made here, not imported."""

    fd: int
    nbytes: int
    is_own: bool


@dataclass
class _Mapping:
    physical: _Physical
    nbytes: int
    has_access: bool = False


@dataclass
class FakeCudaDriver:
    """One process's view of one device.

    Attributes:
        granule: the granularity in bytes, a multiple of the page size.
        total_nbytes: of the device; None: no end.
        unsupported: attributes (names without the prefix) that the device lacks.
        calls: names of all calls so far.
    """

    granule: int = 65536
    total_nbytes: int | None = None
    unsupported: frozenset[str] = frozenset()
    calls: list[str] = field(default_factory=list)

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED="HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED="GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    )

    def __post_init__(self) -> None:
        self._ranges: dict[int, int] = {}
        self._handles: dict[int, _Physical] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._num_handles = 0

    # What a test asks.

    def mapped(self) -> list[tuple[int, int]]:
        """(address, bytes) of everything that is mapped and may be touched, in order."""
        return [(at, mapping.nbytes) for at, mapping in sorted(self._mappings.items()) if mapping.has_access]

    def taken_nbytes(self) -> int:
        """Physical bytes made here that a handle or a mapping of this process keeps."""
        kept = [*self._handles.values(), *(mapping.physical for mapping in self._mappings.values())]
        return sum(physical.nbytes for physical in {id(one): one for one in kept if one.is_own}.values())

    def leaks(self) -> dict[str, int]:
        """How many handles, mappings and ranges are left."""
        return {"handles": len(self._handles), "mappings": len(self._mappings), "ranges": len(self._ranges)}

    # The driver's calls.

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace(gpuDirectRDMACapable=0))

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def cuDeviceGet(self, ordinal: int) -> Answer:
        return OK, ordinal

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Answer:
        return OK, int(attribute not in self.unsupported)

    def cuMemGetAllocationGranularity(self, properties: SimpleNamespace, option: int) -> Answer:
        return OK, self.granule

    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: int, flags: int) -> Answer:
        self.calls.append("reserve")
        if not self._is_whole(nbytes):
            return INVALID, 0
        # As much again, to begin at a multiple of the granularity; it stays reserved until the process ends.
        address = -(-_map(0, nbytes + self.granule, _NONE, _PRIVATE | _ANONYMOUS) // self.granule) * self.granule
        self._ranges[address] = nbytes
        return OK, address

    def cuMemAddressFree(self, address: int, nbytes: int) -> Answer:
        self.calls.append("unreserve")
        if self._ranges.get(address) != nbytes or self._overlapping(address, nbytes):
            return (INVALID,)
        del self._ranges[address]
        return (OK,)

    def cuMemCreate(self, nbytes: int, properties: SimpleNamespace, flags: int) -> Answer:
        self.calls.append("create")
        if not self._is_whole(nbytes) or properties.location.type != 1 or properties.requestedHandleTypes != 1:
            return INVALID, 0
        if self.total_nbytes is not None and self.taken_nbytes() + nbytes > self.total_nbytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        fd = os.memfd_create("fake_cuda")
        os.pwrite(fd, bytes([GARBAGE]) * nbytes, 0)
        return OK, self._new_handle(_Physical(fd, nbytes, is_own=True))

    def cuMemRelease(self, handle: int) -> Answer:
        self.calls.append("release")
        if handle not in self._handles:
            return (INVALID,)
        self._close_if_unused(self._handles.pop(handle))
        return (OK,)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> Answer:
        self.calls.append("map")
        physical = self._handles.get(handle)
        in_range = any(start <= address and address + nbytes <= start + size for start, size in self._ranges.items())
        if physical is None or not in_range or not self._is_whole(nbytes) or address % self.granule or offset:
            return (INVALID,)
        if nbytes != physical.nbytes or self._overlapping(address, nbytes):
            return (INVALID,)
        _map(address, nbytes, _NONE, _SHARED | _FIXED, physical.fd)
        self._mappings[address] = _Mapping(physical, nbytes)
        return (OK,)

    def cuMemSetAccess(self, address: int, nbytes: int, descriptions: Sequence[SimpleNamespace], count: int) -> Answer:
        self.calls.append("set_access")
        inside = self._whole_mappings(address, nbytes)
        if inside is None or len(descriptions) != count or descriptions[0].flags != _READ_WRITE:
            return (INVALID,)
        for at in inside:
            mapping = self._mappings[at]
            mapping.has_access = True
            _map(at, mapping.nbytes, _READ_WRITE, _SHARED | _FIXED, mapping.physical.fd)
        return (OK,)

    def cuMemUnmap(self, address: int, nbytes: int) -> Answer:
        self.calls.append("unmap")
        inside = self._whole_mappings(address, nbytes)
        if inside is None:
            return (INVALID,)
        for at in inside:
            mapping = self._mappings.pop(at)
            _map(at, mapping.nbytes, _NONE, _PRIVATE | _FIXED | _ANONYMOUS)
            self._close_if_unused(mapping.physical)
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> Answer:
        self.calls.append("export")
        if handle not in self._handles:
            return INVALID, -1
        return OK, os.dup(self._handles[handle].fd)

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> Answer:
        self.calls.append("import")
        fd = os.dup(descriptor)
        return OK, self._new_handle(_Physical(fd, os.fstat(fd).st_size, is_own=False))

    def _is_whole(self, nbytes: int) -> bool:
        return nbytes > 0 and nbytes % self.granule == 0

    def _new_handle(self, physical: _Physical) -> int:
        self._num_handles += 1
        self._handles[self._num_handles] = physical
        return self._num_handles

    def _overlapping(self, address: int, nbytes: int) -> list[int]:
        return [at for at, one in self._mappings.items() if at < address + nbytes and address < at + one.nbytes]

    def _whole_mappings(self, address: int, nbytes: int) -> list[int] | None:
        """Those that make up the range exactly, None if they do not."""
        inside = self._overlapping(address, nbytes)
        covered = sum(self._mappings[at].nbytes for at in inside)
        exact = inside and min(inside) >= address and covered == nbytes
        ends = inside and max(at + self._mappings[at].nbytes for at in inside) <= address + nbytes
        return inside if exact and ends else None

    def _close_if_unused(self, physical: _Physical) -> None:
        users = [*self._handles.values(), *(mapping.physical for mapping in self._mappings.values())]
        if not any(user is physical for user in users):
            os.close(physical.fd)


def _map(address: int, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    found = libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
