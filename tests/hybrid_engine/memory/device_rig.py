"""The model of the CUDA driver in the place of the driver."""

from __future__ import annotations

import gc

import pytest
import torch

from hybrid_engine.memory import device_pages, elastic
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.elastic import ElasticBuffer
from tests.harness.fake_cuda_driver import FakeCudaDriver

GRANULE = 65536
CHUNK = 2 * GRANULE


class RecordingDriver(CudaDriver):
    """Also notes the waits, which there is nothing to be done for here, among the calls of the model."""

    def finish_stream(self) -> None:
        self._api.calls.append("finish_stream")
        super().finish_stream()

    def synchronize(self) -> None:
        self._api.calls.append("synchronize")
        super().synchronize()


class Rig:
    """The model of the driver in the place of the driver; tensors over its memory are on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch, **settings: object) -> None:
        self.fake = FakeCudaDriver(granule=GRANULE, **settings)
        self.driver = RecordingDriver(self.fake, torch.device("cpu"))
        patch.setattr(elastic, "driver_of", lambda ordinal: self.driver)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(device_pages, "CHUNK_NBYTES", CHUNK)

    def buffer(self, nbytes: int) -> ElasticBuffer:
        return ElasticBuffer(nbytes, torch.uint8, device="cuda:0")

    def assert_nothing_is_left(self) -> None:
        gc.collect()
        assert self.fake.leaks() == {"handles": 0, "mappings": 0, "ranges": 0}
