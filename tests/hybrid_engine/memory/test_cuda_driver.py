"""A missing CUDA driver, and a device without virtual memory."""

from __future__ import annotations

import sys

import pytest
import torch

from hybrid_engine.memory import cuda_driver
from hybrid_engine.memory.cuda_driver import CudaDriver
from tests.software_gpu.device import load_driver, without_attribute


def test_a_missing_driver_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
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
