"""Targets of measurements: a GPU, or the CPU with the driver of tests/software_gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from benchmarks.timings import taken_nbytes
from hybrid_engine.memory import device_pages, elastic
from hybrid_engine.memory.cuda_driver import CudaDriver, driver_of
from tests.software_gpu.device import GRANULE, load_driver, virtual_memory

SIMULATED = "simulated"
"""Name of the target without a GPU. Other targets have the name of the torch device."""


@dataclass(frozen=True)
class Target:
    """Device of a measurement.

    Attributes:
        device: device of plain tensors and copies.
        elastic: device passed to `allocate_elastic`.
        driver: driver of elastic memory; None without elastic memory.
        taken_nbytes: returns the bytes in use on the device by all processes, as counted by the
            driver.
    """

    device: torch.device
    elastic: torch.device
    driver: CudaDriver | None
    taken_nbytes: Callable[[], int]

    @property
    def is_simulated(self) -> bool:
        """True without a GPU: contents and bytes are valid, times mean nothing."""
        return self.device.type != "cuda"


@contextmanager
def target_named(name: str) -> Iterator[Target]:
    """Yield the target "cuda:N" or SIMULATED; a GPU is the current device within the block."""
    if name == SIMULATED:
        with _simulated() as target:
            yield target
        return
    device = torch.device(name)
    with torch.cuda.device(device):
        yield Target(device, device, driver_of(device.index), lambda: _taken_on(device))


def _taken_on(device: torch.device) -> int:
    torch.cuda.empty_cache()  # memory cached by torch must not count
    return taken_nbytes(device)


@contextmanager
def _simulated() -> Iterator[Target]:
    driver = CudaDriver(load_driver(), torch.device("cpu"))
    with (
        mock.patch.object(elastic, "driver_of", return_value=driver),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(device_pages, "CHUNK_NBYTES", 2 * GRANULE),
    ):
        yield Target(
            torch.device("cpu"), torch.device("cuda", 0), driver, lambda: virtual_memory().nbytes
        )
