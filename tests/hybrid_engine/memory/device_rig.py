"""Elastic buffers over the driver of tests/software_gpu, without torch's CUDA."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hybrid_engine.memory import device_pages, elastic
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.elastic import ElasticBuffer
from tests.software_gpu.device import GRANULE, VirtualMemory, load_driver, virtual_memory

CHUNK = 2 * GRANULE


class RecordingDriver(CudaDriver):
    """Records the driver's calls; waits are recorded only, since there is no device to wait for."""

    calls: list[str]

    def __init__(self, *arguments: Any) -> None:
        self.calls = []
        super().__init__(*arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        return super()._call(name, *arguments)

    def finish_stream(self) -> None:
        self.calls.append("finish_stream")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class Rig:
    """The software GPU's memory in place of a GPU's; tensors over it are on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.api = load_driver()
        self.driver = RecordingDriver(self.api, torch.device("cpu"))
        patch.setattr(elastic, "driver_of", lambda ordinal: self.driver)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(device_pages, "CHUNK_NBYTES", CHUNK)

    def buffer(self, nbytes: int) -> ElasticBuffer:
        buffer = ElasticBuffer(nbytes, torch.uint8, device="cuda:0")
        buffer.restore()
        return buffer

    def assert_empty(self) -> None:
        gc.collect()
        assert virtual_memory() == VirtualMemory()
