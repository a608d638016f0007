"""Rules of the driver, and which memory is taken with it and without."""

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


def test_what_cuda_forbids_is_refused(rig: Rig):
    """By the driver that all tests here run over, or they would prove little."""
    driver, api = rig.driver, rig.api
    address, handle = driver.reserve(4 * GRANULE), driver.create(2 * GRANULE)
    private = api.CUmemAllocationProp()
    private.type, private.location = driver._properties.type, driver._properties.location
    code, unshared = api.cuMemCreate(GRANULE, private, 0)
    assert code == api.CUresult.CUDA_SUCCESS
    driver.map(address, 2 * GRANULE, handle)
    for call, wrong in [
        ("cuMemAddressReserve", lambda: driver.reserve(GRANULE + 1)),
        ("cuMemCreate", lambda: driver.create(GRANULE // 2)),
        ("cuMemMap", lambda: driver.map(address + 3 * GRANULE, 2 * GRANULE, handle)),  # beyond the range
        ("cuMemMap", lambda: driver.map(address + GRANULE, 2 * GRANULE, handle)),  # over a mapping
        ("cuMemMap", lambda: driver.map(address + 2 * GRANULE, GRANULE, handle)),  # a part of the memory
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
    assert virtual_memory().nbytes == 2 * GRANULE  # the mapping keeps it
    for _ in range(2):
        driver.unmap(address, 4 * GRANULE)  # whatever is mapped in it
    assert virtual_memory().nbytes == 0
    driver.unreserve(address, 4 * GRANULE)


def test_neither_a_forked_child_nor_memory_without_access_can_be_used(rig: Rig):
    driver, api = rig.driver, rig.api
    address, handle = driver.reserve(GRANULE), driver.create(GRANULE)
    assert api.cuMemMap(address, GRANULE, 0, handle, 0) == (api.CUresult.CUDA_SUCCESS,)
    assert mapped() == []
    if not (child := os.fork()):
        faulthandler.disable()
        if api.cuMemUnmap(address, GRANULE) == (api.CUresult.CUDA_ERROR_NOT_INITIALIZED,):
            ctypes.string_at(address)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    driver.unmap(address, GRANULE)
    driver.release(handle)
    driver.unreserve(address, GRANULE)


def test_without_the_driver_a_line_says_what_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda_driver.driver_of.cache_clear()
    try:
        assert cuda_driver.driver_of(0) is None
        assert cuda_driver.driver_of(0) is None
    finally:
        cuda_driver.driver_of.cache_clear()
    assert len(caplog.messages) == 1
    assert "cuda-bindings is missing (pip install cuda-bindings" in caplog.text
    assert "ordinary tensors" in caplog.text


def test_device_without_virtual_memory():
    driver = CudaDriver(load_driver(), torch.device("cpu"))
    with without_attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        reason = driver.why_unsupported()
    assert reason == "device 0 has no CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
