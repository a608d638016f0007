"""The model of the driver keeps the driver's rules; which memory is taken with the driver and without."""

from __future__ import annotations

import sys

import pytest
import torch

from hybrid_engine.errors import DeviceMemoryError, StateError
from hybrid_engine.memory import cuda_driver, elastic
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.elastic import ElasticBuffer, allocate_elastic
from tests.harness.fake_cuda_driver import FakeCudaDriver
from tests.hybrid_engine.memory.device_rig import GRANULE, Rig


def test_the_model_keeps_the_rules(rig: Rig):
    """Each broken rule is an error, or the tests above would prove little."""
    fake, driver = rig.fake, rig.driver
    address, handle = driver.reserve(4 * GRANULE), driver.create(2 * GRANULE)
    for name, wrong in {
        "cuMemAddressReserve": lambda: driver.reserve(GRANULE + 1),
        "cuMemCreate": lambda: driver.create(GRANULE // 2),
        "cuMemMap": lambda: driver.map(address + 3 * GRANULE, 2 * GRANULE, handle),
        "cuMemUnmap": lambda: driver.unmap(address, 2 * GRANULE),
        "cuMemAddressFree": lambda: driver.unreserve(address, GRANULE),
        "cuMemRelease": lambda: driver.release(handle + 1),
    }.items():
        with pytest.raises(DeviceMemoryError, match=f"{name}.*INVALID_VALUE"):
            wrong()
    assert fake.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == (fake.CUresult.CUDA_SUCCESS,)
    assert fake.mapped() == []  # no access yet
    driver.unmap(address, 2 * GRANULE)
    driver.map(address, 2 * GRANULE, handle)
    for wrong in (
        lambda: driver.map(address, 2 * GRANULE, handle),
        lambda: driver.unmap(address, GRANULE),
        lambda: driver.unreserve(address, 4 * GRANULE),
    ):
        with pytest.raises(DeviceMemoryError):
            wrong()
    driver.release(handle)
    assert fake.taken_nbytes() == 2 * GRANULE  # the mapping keeps it
    assert fake.leaks() == {"handles": 0, "mappings": 1, "ranges": 1}
    driver.unmap(address, 2 * GRANULE)
    driver.unreserve(address, 4 * GRANULE)


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


def test_without_the_driver_there_is_an_ordinary_tensor(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(elastic, "driver_of", lambda ordinal: None)
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **options: made.append(options["device"]))
    allocate_elastic(10, torch.float32, "cuda:0", "param")
    assert made == [torch.device("cuda:0")]
    with pytest.raises(StateError, match="on CUDA they need pip install cuda-bindings"):
        ElasticBuffer(10, torch.float32, device="cuda:0")


def test_device_without_virtual_memory():
    fake = FakeCudaDriver(unsupported=frozenset({"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"}))
    reason = CudaDriver(fake, torch.device("cpu")).why_unsupported()
    assert reason == "device 0 has no CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"


def test_the_model_has_the_bindings_names():
    """Where cuda-bindings is installed (no GPU needed)."""
    api = pytest.importorskip("cuda.bindings.driver")
    fake = FakeCudaDriver()
    for name in dir(fake):
        if name.startswith(("cu", "CU")):
            assert hasattr(api, name), name
            for member in vars(getattr(fake, name)) if not callable(getattr(fake, name)) else ():
                assert hasattr(getattr(api, name), member), member
    properties = api.CUmemAllocationProp()
    properties.allocFlags.gpuDirectRDMACapable = 1
    properties.location.id = 3
    assert (properties.allocFlags.gpuDirectRDMACapable, properties.location.id) == (1, 3)
    assert {"CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY"} <= set(api.CUresult.__members__)
