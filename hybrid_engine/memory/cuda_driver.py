"""The calls of the CUDA driver's virtual memory API that elastic buffers need, each checked.

Written against `cuda.bindings.driver` (package cuda-bindings, 12.x and 13.x) and NVIDIA's "Virtual Memory Management"
chapter of the driver API. Run on an H200 and an H100 by tests/gpu; tests on the CPU run it with the real bindings over
a driver whose memory is the host's (tests/harness/libcuda.c).

The rules that the callers keep:
    an address range is reserved whole, chunks are mapped into it and unmapped from it whole
    memory is freed when its handle is released, it is mapped nowhere and no exported descriptor is open, in any process
    a mapped chunk may be touched only after its access was set
    unmapping does not wait for kernels: finish_stream or synchronize first
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from hybrid_engine.errors import DeviceMemoryError

logger = logging.getLogger(__name__)

INSTALL_HINT = "pip install cuda-bindings, of the CUDA version torch was built for (12.x or 13.x)"


class CudaDriver:
    """Virtual memory of one device. Sizes and addresses in bytes; handles are the driver's own objects."""

    def __init__(self, api: Any, device: torch.device) -> None:
        """Args:
        api: the module `cuda.bindings.driver`.
        device: where tensors over the memory are; with the tests' driver the CPU.
        """
        self._api = api
        self.device = device
        self._ordinal = device.index or 0
        self._properties = self._allocation_properties()

    def granularity(self) -> int:
        """Return the bytes of which every size and address below is a multiple (2 MiB on current GPUs)."""
        flags = self._api.CUmemAllocationGranularity_flags
        return self._call("cuMemGetAllocationGranularity", self._properties, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)

    def reserve(self, nbytes: int) -> int:
        """Return the address of a new range with no memory behind it."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Free a whole range; nothing may be mapped in it."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        """Allocate physical memory, contents undefined, mapped nowhere. Raises DeviceMemoryError for lack of memory.

        When the device is full, garbage and the unused memory of torch's caching allocator are freed first, once.
        """
        try:
            return self._call("cuMemCreate", nbytes, self._properties, 0)
        except DeviceMemoryError as error:
            if not error.is_out_of_memory:
                raise
            if self.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            return self._call("cuMemCreate", nbytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        """Release a handle of physical memory; see above for when the memory is freed."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Map physical memory at an address and allow the device to read and write it.

        After a failure nothing is mapped. Peers only read, but torch, NCCL and others always ask for both.
        """
        self._call("cuMemMap", address, nbytes, 0, handle, 0)
        access = self._api.CUmemAccessDesc()
        self._locate(access.location)
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self._call("cuMemSetAccess", address, nbytes, [access], 1)
        except BaseException:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap whole mappings of an address range, which stays reserved."""
        self._call("cuMemUnmap", address, nbytes)

    def export_descriptor(self, handle: Any) -> int:
        """Return a file descriptor of the physical memory; the caller closes it."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._descriptor_type, 0))

    def import_descriptor(self, descriptor: int) -> Any:
        """Return the handle of memory that another process exported; the descriptor may be closed afterwards."""
        return self._call("cuMemImportFromShareableHandle", descriptor, self._descriptor_type)

    def finish_stream(self) -> None:
        """Wait for what is queued on the current stream. Messages on streams of their own stay in flight."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def synchronize(self) -> None:
        """Wait for everything queued on the device, on all streams."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def why_unsupported(self) -> str | None:
        """Return what the device lacks for elastic buffers; None if nothing."""
        for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            if not self._attribute(name):
                return f"device {self._ordinal} has no CU_DEVICE_ATTRIBUTE_{name}"
        return None

    @property
    def _descriptor_type(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _allocation_properties(self) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._descriptor_type
        self._locate(properties.location)
        if self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            properties.allocFlags.gpuDirectRDMACapable = 1  # NCCL between hosts sends from these buffers
        return properties

    def _locate(self, location: Any) -> None:
        location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._ordinal

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", self._ordinal))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Return the call's value, if it has one. Raises DeviceMemoryError naming call, arguments and error code."""
        function: Callable[..., tuple[Any, ...]] = getattr(self._api, name)
        code, *values = function(*arguments)
        if code != self._api.CUresult.CUDA_SUCCESS:
            shown = ", ".join(str(argument) for argument in arguments if isinstance(argument, int))
            raise DeviceMemoryError(
                f"{name}({shown}) on device {self._ordinal} failed: {getattr(code, 'name', code)}",
                is_out_of_memory=code == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
            )
        return values[0] if values else None


@functools.cache
def driver_of(ordinal: int) -> CudaDriver | None:
    """Return the driver of a CUDA device; None, with one logged warning, where it cannot be used."""
    device = torch.device("cuda", ordinal)
    torch.cuda.synchronize(device)  # makes torch's context, which the driver's calls need
    try:
        from cuda.bindings import driver as api
    except ImportError:
        _warn_without(device, f"cuda-bindings is missing ({INSTALL_HINT})")
        return None
    found = CudaDriver(api, device)
    if (reason := found.why_unsupported()) is not None:
        _warn_without(device, reason)
        return None
    return found


def _warn_without(device: torch.device, reason: str) -> None:
    logger.warning(
        "No elastic buffers on %s: %s. Training buffers are ordinary tensors: they leave the device only whole, "
        "after the whole switch, and peers on the host read them by messages",
        device,
        reason,
    )


def taken_nbytes(device: torch.device) -> int:
    """Bytes of a GPU that anybody has, with what torch keeps for later; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, size = torch.cuda.mem_get_info(device)
    return size - free
