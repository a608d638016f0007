"""Checked calls of the CUDA driver's virtual memory API, for elastic buffers.

Written against `cuda.bindings.driver` (package cuda-bindings, 12.x and 13.x) and NVIDIA's "Virtual
Memory Management". Run on an H200 and an H100 by tests/gpu, and on the GPU in software.

Rules for callers:
    an address range is reserved whole, chunks are mapped into it and unmapped from it whole
    memory is freed when it is mapped nowhere, no exported descriptor is open, in any process, and
    its handle is released, which the methods `…_at` do at once
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
    """Virtual memory of one device.

    Sizes and addresses are in bytes, handles are objects of the driver. Every method that calls the
    driver raises DeviceMemoryError on failure.
    """

    def __init__(self, api: Any, device: torch.device) -> None:
        """Set up the calls for a device.

        Args:
            api: the module `cuda.bindings.driver`.
            device: device of tensors over the memory; with the tests' driver the CPU.
        """
        self._api = api
        self.device = device
        self._ordinal = device.index or 0
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        handle_types = self._api.CUmemAllocationHandleType
        self._descriptor_type = handle_types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.requestedHandleTypes = self._descriptor_type
        self._locate(properties.location)
        if self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            # NCCL sends from these buffers to other hosts.
            properties.allocFlags.gpuDirectRDMACapable = 1
        self._properties = properties

    def granularity(self) -> int:
        """Return the unit of all sizes and addresses below, in bytes (2 MiB on current GPUs)."""
        flags = self._api.CUmemAllocationGranularity_flags
        minimum = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return self._call("cuMemGetAllocationGranularity", self._properties, minimum)

    def reserve(self, nbytes: int) -> int:
        """Reserve an address range without memory, and return its address."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Free a whole address range, in which no memory may be mapped."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        """Allocate physical memory with undefined contents, and return its handle.

        When the device is full, garbage and the unused memory of torch's caching allocator are
        freed and the call is repeated once.
        """
        try:
            return self._call("cuMemCreate", nbytes, self._properties, 0)
        except DeviceMemoryError as error:
            if not error.is_out_of_memory:
                raise
            if self.device.type == "cuda":
                # Garbage may hold tensors; `empty_cache` then frees their memory as well.
                gc.collect()
                torch.cuda.empty_cache()
            return self._call("cuMemCreate", nbytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        """Release a handle of physical memory; see the module's docstring for when it is freed."""
        self._call("cuMemRelease", handle)

    def retain(self, address: int) -> Any:
        """Return a further handle of the memory that is mapped at an address."""
        return self._call("cuMemRetainAllocationHandle", address)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Map physical memory at an address and allow the device to read and write it.

        After a failure the memory is not mapped.
        """
        self._call("cuMemMap", address, nbytes, 0, handle, 0)
        # A mapping without access would be an illegal access at its first use.
        try:
            self.permit(address, nbytes)
        except BaseException:
            self.unmap(address, nbytes)
            raise

    def create_at(self, address: int, nbytes: int) -> None:
        """Allocate memory, as `create` does, that is freed when it is mapped nowhere any more."""
        self._map_alone(address, nbytes, self.create(nbytes))

    def share_at(self, address: int, nbytes: int, other: int) -> None:
        """Map the memory that is mapped at another address at this one as well."""
        self._map_alone(address, nbytes, self.retain(other))

    def import_at(self, address: int, nbytes: int, descriptor: int) -> None:
        """Map memory that another process exported; the descriptor is not kept."""
        self._map_alone(address, nbytes, self.import_descriptor(descriptor))

    def import_descriptor(self, descriptor: int) -> Any:
        """Return a handle of the memory behind a descriptor of another process."""
        return self._call("cuMemImportFromShareableHandle", descriptor, self._descriptor_type)

    def _map_alone(self, address: int, nbytes: int, handle: Any) -> None:
        """Map memory, and release its handle: the mapping alone keeps the memory."""
        try:
            self.map(address, nbytes, handle)
        finally:
            self.release(handle)

    def permit(self, address: int, nbytes: int, right: str = "READWRITE") -> None:
        """Let the device read and write mapped memory by this address; "NONE": forbid it."""
        access = self._api.CUmemAccessDesc()
        self._locate(access.location)
        # Peers only read, but torch, NCCL and others always request both.
        flags = self._api.CUmemAccess_flags
        access.flags = getattr(flags, f"CU_MEM_ACCESS_FLAGS_PROT_{right}")
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap whole mappings of an address range, which stays reserved."""
        self._call("cuMemUnmap", address, nbytes)

    def export(self, address: int) -> int:
        """Return a file descriptor of the memory mapped at an address; the caller closes it."""
        handle = self.retain(address)
        try:
            return int(self._call("cuMemExportToShareableHandle", handle, self._descriptor_type, 0))
        finally:
            self.release(handle)

    def finish_stream(self) -> None:
        """Wait for the work queued on the current stream; messages stay in flight."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def synchronize(self) -> None:
        """Wait for the work queued on all streams of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def why_unsupported(self) -> str | None:
        """Return the attribute that the device lacks for elastic buffers; None if it has all."""
        required = (
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        )
        for name in required:
            if not self._attribute(name):
                return f"device {self._ordinal} has no CU_DEVICE_ATTRIBUTE_{name}"
        return None

    def _locate(self, location: Any) -> None:
        location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._ordinal

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        device = self._call("cuDeviceGet", self._ordinal)
        return self._call("cuDeviceGetAttribute", attribute, device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Return the value of a call, or None if it has no value.

        Raises DeviceMemoryError with the call, its integer arguments and the error code.
        """
        function: Callable[..., tuple[Any, ...]] = getattr(self._api, name)
        code, *values = function(*arguments)
        if code != self._api.CUresult.CUDA_SUCCESS:
            numbers = [str(argument) for argument in arguments if isinstance(argument, int)]
            # Handles and flags are objects, and would fill the message.
            shown = ", ".join(numbers)
            code_name = getattr(code, "name", code)
            raise DeviceMemoryError(
                f"{name}({shown}) on device {self._ordinal} failed: {code_name}",
                is_out_of_memory=code == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
                code="driver-call-failed",
            )
        return values[0] if values else None


@functools.cache
def driver_of(ordinal: int) -> CudaDriver | None:
    """Return the driver of a CUDA device, or None after logging, once, why it cannot be used."""
    device = torch.device("cuda", ordinal)
    # Creates torch's context, which the driver's calls need.
    torch.cuda.synchronize(device)
    try:
        from cuda.bindings import driver as api
    except ImportError:
        reason: str | None = f"cuda-bindings is missing ({INSTALL_HINT})"
    else:
        driver = CudaDriver(api, device)
        reason = driver.why_unsupported()
        if reason is None:
            return driver
    logger.warning(
        "No elastic buffers on %s: %s. Training buffers are ordinary tensors: they leave the "
        "device only whole, after the whole switch, and peers on the host receive them in messages",
        device,
        reason,
    )
    return None
