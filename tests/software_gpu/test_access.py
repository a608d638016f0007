"""Permission of devices to access memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory.cuda_driver import driver_of
from hybrid_engine.memory.elastic import ElasticBuffer
from tests.harness.launch import REPO_ROOT
from tests.software_gpu.device import library
from tests.software_gpu.launcher import Machine, environment_of

NUMEL = 256
INVALID_VALUE = 1
INVALID_CONTEXT = 201


@triton.jit
def copy_kernel(src, dst, numel: tl.constexpr):
    offsets = tl.arange(0, numel)
    tl.store(dst + offsets, tl.load(src + offsets))


def read_on(device: int, src: torch.Tensor) -> float:
    """Return the sum of the first elements, read by a kernel on this device."""
    torch.cuda.synchronize(src.device)
    with torch.cuda.device(device):
        dst = torch.empty(NUMEL, device="cuda")
        try:
            copy_kernel[(1,)](src, dst, NUMEL)
            return dst.sum().item()
        finally:
            torch.cuda.synchronize()


def set_right_of_second(buffer: ElasticBuffer, flags: str) -> None:
    from cuda.bindings import driver as api

    right = api.CUmemAccessDesc()
    right.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    right.location.id = 1
    right.flags = getattr(api.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_{flags}")
    (code,) = api.cuMemSetAccess(buffer.address, buffer.granularity, [right], 1)
    assert code == api.CUresult.CUDA_SUCCESS


def right_of_second(buffer: ElasticBuffer) -> str:
    from cuda.bindings import driver as api

    location = api.CUmemLocation()
    location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 1
    code, flags = api.cuMemGetAccess(location, buffer.address)
    assert code == api.CUresult.CUDA_SUCCESS
    return api.CUmemAccess_flags(flags).name.removeprefix("CU_MEM_ACCESS_FLAGS_")


def test_mapped_memory_is_accessible_to_the_listed_devices_only() -> None:
    """The driver grants access per device; a buffer is mapped for its own device only."""
    buffer = ElasticBuffer(NUMEL, torch.float32, device="cuda:0")
    try:
        buffer.tensor.fill_(1)
        assert read_on(0, buffer.tensor) == NUMEL
        with pytest.raises(InterpreterError, match="illegal memory access"):
            read_on(1, buffer.tensor)
    finally:
        buffer.close()


def test_access_can_be_granted_and_revoked() -> None:
    buffer = ElasticBuffer(NUMEL, torch.float32, device="cuda:0")
    buffer.tensor.fill_(1)
    for flags, is_readable in [("PROT_READWRITE", True), ("PROT_NONE", False)]:
        set_right_of_second(buffer, flags)
        assert right_of_second(buffer) == flags
        if is_readable:
            assert read_on(1, buffer.tensor) == NUMEL
        else:
            with pytest.raises(InterpreterError, match="illegal memory access"):
                read_on(1, buffer.tensor)
        assert read_on(0, buffer.tensor) == NUMEL, "the first device has lost its access"
    buffer.close()


def test_a_copy_requires_access_of_its_streams_device() -> None:
    """Except a copy between contexts, as made by torch, which both devices perform."""
    buffer = ElasticBuffer(NUMEL, torch.float32, device="cuda:0")
    buffer.tensor.fill_(1)
    torch.cuda.synchronize(0)
    with torch.cuda.device(1):
        target = torch.zeros(NUMEL, device="cuda")
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        dst, src, nbytes = (ctypes.c_uint64(number) for number in (target.data_ptr(), buffer.address, target.nbytes))
        host = ctypes.c_void_p(torch.zeros(NUMEL).data_ptr())

        def copied() -> int:
            return int(library().cuMemcpyAsync(dst, src, nbytes, stream))

        assert copied() == INVALID_VALUE
        assert library().cuMemcpyDtoHAsync_v2(host, src, nbytes, stream) == INVALID_VALUE
        assert library().cuMemcpyPeerAsync(dst, None, src, None, nbytes, stream) == 0
        torch.cuda.synchronize()
        assert target.sum().item() == NUMEL
        set_right_of_second(buffer, "PROT_READ")
        assert copied() == 0
        torch.cuda.synchronize()
        set_right_of_second(buffer, "PROT_NONE")
        assert copied() == INVALID_VALUE
    assert buffer.tensor.to("cuda:1").sum().item() == NUMEL
    buffer.close()


def without_a_context(call: Callable[[], int]) -> int:
    """Return the result of a call in a thread that has not used a device."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def test_virtual_memory_needs_no_context() -> None:
    """Its calls specify the device, and CUDA documents no CUDA_ERROR_INVALID_CONTEXT for them."""

    def map_and_unmap() -> int:
        map_for_the_second()
        context = ctypes.c_void_p()
        assert library().cuCtxGetCurrent(ctypes.byref(context)) == 0
        assert not context.value
        return 0

    assert driver_of(0)  # Creates the device's context in this thread.
    assert driver_of(1)
    assert without_a_context(map_and_unmap) == 0


def test_memory_of_a_context_requires_a_context() -> None:
    address, free, total = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
    torch.cuda.synchronize()
    assert without_a_context(lambda: library().cuMemAlloc_v2(ctypes.byref(address), 512)) == INVALID_CONTEXT
    get_info = library().cuMemGetInfo_v2
    assert without_a_context(lambda: get_info(ctypes.byref(free), ctypes.byref(total))) == INVALID_CONTEXT


def map_for_the_second() -> None:
    """Map memory of the first device for the second, and unmap it."""
    owner = driver_of(0)
    user = driver_of(1)
    assert owner is not None
    assert user is not None
    nbytes = owner.granularity()
    handle = owner.create(nbytes)
    address = user.reserve(nbytes)
    try:
        user.map(address, nbytes, handle)
        user.unmap(address, nbytes)
    finally:
        user.unreserve(address, nbytes)
        owner.release(handle)


def test_peers_read_each_other() -> None:
    assert read_on(1, torch.ones(NUMEL, device="cuda:0")) == NUMEL
    map_for_the_second()


def require_no_peers() -> None:
    """Check that only copies reach the other device, through the host."""
    ones = torch.ones(NUMEL, device="cuda:0")
    assert read_on(0, ones) == NUMEL
    with pytest.raises(InterpreterError, match="illegal memory access"):
        read_on(1, ones)
    with pytest.raises(DeviceMemoryError, match=r"cuMemSetAccess.*INVALID_DEVICE"):
        map_for_the_second()
    assert ones.to("cuda:1").sum().item() == NUMEL


def test_devices_that_are_no_peers_cannot_read_each_other() -> None:
    code = f"from {__name__} import require_no_peers; require_no_peers()"
    with environment_of(Machine(2, are_peers=False)) as variables:
        environment = {**os.environ, **variables}
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=REPO_ROOT, env=environment, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
