"""A device without memory, for as long as a block takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory.cuda_driver import CudaDriver

_AT_ONCE = 2**36  # bytes: no smaller than is worth a try


@contextmanager
def device_without_memory(driver: CudaDriver, left: int = 0) -> Iterator[None]:
    """Within the block nobody gets memory of the device, but for `left` bytes, rounded up to the driver's unit.

    torch's unused memory is taken, too: it is given back to the device before a call fails.
    """
    with ExitStack() as taken:
        with ExitStack() as spared:
            _take(driver, left, spared)
            _take(driver, sys.maxsize, taken)
        yield


def _take(driver: CudaDriver, nbytes: int, taken: ExitStack) -> None:
    """Have physical memory, mapped nowhere, until `taken` ends: so many bytes, or all there are."""
    unit = driver.granularity()
    size, missing = _AT_ONCE, nbytes
    while missing > 0 and size:
        size = min(size, -(-missing // unit) * unit)
        try:
            handle = driver.create(size)
        except DeviceMemoryError as error:
            if not error.is_out_of_memory:
                raise
            size = size // 2 // unit * unit
        else:
            taken.callback(driver.release, handle)
            missing -= size
