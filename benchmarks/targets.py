"""Where figures are taken: a GPU, or the CPU with the driver of tests/software_gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from hybrid_engine.memory import device_pages, elastic
from hybrid_engine.memory.cuda_driver import CudaDriver, driver_of, taken_nbytes
from tests.software_gpu.device import GRANULE, load_driver, virtual_memory

SIMULATED = "simulated"
"""Name of the target without a GPU; the others are named as torch names the device."""


@dataclass(frozen=True)
class Target:
    """Where something is measured.

    Attributes:
        device: holds plain tensors and makes the copies.
        elastic: where elastic buffers are asked for.
        driver: of their memory; None where there are none.
        taken_nbytes: bytes taken on the device by everybody, as its driver counts.
    """

    device: torch.device
    elastic: torch.device
    driver: CudaDriver | None
    taken_nbytes: Callable[[], int]

    @property
    def is_simulated(self) -> bool:
        """Whether there is no GPU: contents and bytes of memory count, times mean nothing."""
        return self.device.type != "cuda"


@contextmanager
def target_named(name: str) -> Iterator[Target]:
    """The target of this name, "cuda:0" or SIMULATED; within the block a GPU is the current one."""
    if name == SIMULATED:
        with _simulated() as target:
            yield target
        return
    device = torch.device(name)
    with torch.cuda.device(device):
        yield Target(device, device, driver_of(device.index), lambda: _taken_on(device))


def _taken_on(device: torch.device) -> int:
    torch.cuda.empty_cache()  # else memory that torch keeps for later counts as taken
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
