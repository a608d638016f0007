"""Rules of the CUDA driver, and memory with and without it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

import pytest
import torch

from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory import cuda_driver
from hybrid_engine.memory.cuda_driver import CudaDriver
from tests.harness.errors import has_code
from tests.hybrid_engine.memory.device_rig import Rig
from tests.software_gpu.device import GRANULE, load_driver, mapped, virtual_memory, without_attribute


def test_calls_that_cuda_forbids_are_refused(rig: Rig):
    """Other tests depend on the software driver's refusals, which must be CUDA's."""
    driver = rig.driver
    api = rig.api
    address = driver.reserve(4 * GRANULE)
    handle = driver.create(2 * GRANULE)
    private = api.CUmemAllocationProp()
    private.type = driver._properties.type
    private.location = driver._properties.location
    code, unshared = api.cuMemCreate(GRANULE, private, 0)  # without a handle type to export
    assert code == api.CUresult.CUDA_SUCCESS
    driver.map(address, 2 * GRANULE, handle)
    for call, wrong in [
        ("cuMemAddressReserve", lambda: driver.reserve(GRANULE + 1)),
        ("cuMemCreate", lambda: driver.create(GRANULE // 2)),
        ("cuMemMap", lambda: driver.map(address + 3 * GRANULE, 2 * GRANULE, handle)),  # range
        ("cuMemMap", lambda: driver.map(address + GRANULE, 2 * GRANULE, handle)),  # over a mapping
        ("cuMemMap", lambda: driver.map(address + 2 * GRANULE, GRANULE, handle)),  # not all of it
        ("cuMemSetAccess", lambda: driver._call("cuMemSetAccess", address, GRANULE, [api.CUmemAccessDesc()], 1)),
        ("cuMemUnmap", lambda: driver.unmap(address, GRANULE)),
        ("cuMemUnmap", lambda: driver.unmap(address + 4 * GRANULE, GRANULE)),  # beyond the range
        ("cuMemAddressFree", lambda: driver.unreserve(address, GRANULE)),
        ("cuMemAddressFree", lambda: driver.unreserve(address, 4 * GRANULE)),
        ("cuMemRelease", lambda: driver.release(api.CUmemGenericAllocationHandle(1))),
        ("cuMemExportToShareableHandle", lambda: driver.export_descriptor(unshared)),
        ("cuMemImportFromShareableHandle", lambda: driver.import_descriptor(0)),
    ]:
        with pytest.raises(DeviceMemoryError, check=has_code("driver-call-failed", call, "INVALID_VALUE")):
            wrong()
    driver.release(unshared)
    driver.release(handle)
    with pytest.raises(DeviceMemoryError, check=has_code("driver-call-failed", "cuMemRelease")):
        driver.release(handle)
    assert virtual_memory().nbytes == 2 * GRANULE  # the mapping keeps the memory
    for _ in range(2):
        driver.unmap(address, 4 * GRANULE)  # unmaps everything in the range
    assert virtual_memory().nbytes == 0
    driver.unreserve(address, 4 * GRANULE)


def test_memory_without_access_is_unusable_and_a_forked_child_cannot_call(rig: Rig):
    driver = rig.driver
    api = rig.api
    address = driver.reserve(GRANULE)
    handle = driver.create(GRANULE)
    assert api.cuMemMap(address, GRANULE, 0, handle, 0) == (api.CUresult.CUDA_SUCCESS,)
    assert mapped() == []
    if not (child := os.fork()):
        faulthandler.disable()  # the crash is expected
        if api.cuMemUnmap(address, GRANULE) == (api.CUresult.CUDA_ERROR_NOT_INITIALIZED,):
            ctypes.string_at(address)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    driver.unmap(address, GRANULE)
    driver.release(handle)
    driver.unreserve(address, GRANULE)


def test_a_missing_driver_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda_driver.driver_of.cache_clear()  # forget the driver found by other tests
    try:
        assert cuda_driver.driver_of(0) is None
        assert cuda_driver.driver_of(0) is None
    finally:
        cuda_driver.driver_of.cache_clear()
    assert len(caplog.messages) == 1
    assert "cuda-bindings is missing (pip install cuda-bindings" in caplog.text
    assert "ordinary tensors" in caplog.text


def test_a_device_without_virtual_memory_is_unsupported():
    driver = CudaDriver(load_driver(), torch.device("cpu"))
    with without_attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        reason = driver.why_unsupported()
    assert reason == "device 0 has no CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
