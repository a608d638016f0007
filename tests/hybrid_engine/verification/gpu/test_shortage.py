"""A device without memory, over the model of CUDA's driver."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.verification.gpu.fake_cuda_driver import FakeCudaDriver
from hybrid_engine.verification.gpu.shortage import device_without_memory

UNIT = 65536
TOTAL = 11 * UNIT


@pytest.mark.parametrize(("left", "units"), [(0, 0), (1, 1), (2 * UNIT, 2), (3 * UNIT + 1, 4), (2 * TOTAL, 10)])
def test_so_much_is_left_and_all_comes_back(left: int, units: int) -> None:
    fake = FakeCudaDriver(granule=UNIT, total_nbytes=TOTAL)
    driver = CudaDriver(fake, torch.device("cpu"))
    held = driver.create(UNIT)
    with device_without_memory(driver, left):
        own = [driver.create(UNIT) for _ in range(units)]
        with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
            driver.create(UNIT)
    for handle in (*own, held):
        driver.release(handle)
    assert fake.taken_nbytes() == 0


def test_an_error_inside_gives_it_back_too() -> None:
    fake = FakeCudaDriver(granule=UNIT, total_nbytes=TOTAL)
    with pytest.raises(KeyboardInterrupt), device_without_memory(CudaDriver(fake, torch.device("cpu"))):
        raise KeyboardInterrupt
    assert fake.taken_nbytes() == 0
