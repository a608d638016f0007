"""Figures of benchmarks/gpu.py and of the checks on GPUs, and the clock and the floors they are taken with."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybrid_engine.memory.cuda_driver import taken_nbytes


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing and of its floor, over the same bytes.

    `of_floor`: floor over seconds. `gb_per_second` counts each byte once, though it is read and written.
    """

    name: str
    nbytes: int
    seconds: float
    floor: str
    floor_seconds: float
    of_floor: float
    gb_per_second: float


@dataclass(frozen=True)
class Memory:
    """Bytes of one thing, beside others: `ratio` is bytes over `beside_nbytes`."""

    name: str
    nbytes: int
    beside: str
    beside_nbytes: int
    ratio: float


def memory(name: str, nbytes: int, beside: str, beside_nbytes: int) -> Memory:
    """With the ratio."""
    return Memory(name, nbytes, beside, beside_nbytes, nbytes / beside_nbytes)


def timing(name: str, nbytes: int, seconds: float, floor: str, floor_seconds: float) -> Timing:
    """With the ratios."""
    return Timing(
        name, nbytes, seconds, floor, floor_seconds, floor_seconds / seconds, nbytes / seconds / 1e9
    )


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, action: Callable[[], object]) -> float:
    """Wall time of an action, the work it queues included."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def plain_device_copy(
    device: torch.device,
    nbytes: int,
    repeat: int,
    wait: Callable[[], object] = int,
    source: torch.device | None = None,
) -> float:
    """Seconds of one copy of as many bytes within the device, or from `source` to it; `wait` is called before each."""
    there = torch.ones(nbytes, dtype=torch.uint8, device=source or device)
    here = torch.ones(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(repeat + 1):
        wait()
        found.append(seconds_of(device, lambda: here.copy_(there)))
    return statistics.median(found[1:])


def plain_host_copies(device: torch.device, nbytes: int, repeat: int) -> dict[str, float]:
    """Seconds of one copy of as many bytes to page-locked host memory (`offload`) and back (`onload`)."""
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    here = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return {
        name: statistics.median(seconds_of(device, copy) for _ in range(repeat + 1))
        for name, copy in (
            ("offload", lambda: here.copy_(there, non_blocking=True)),
            ("onload", lambda: there.copy_(here, non_blocking=True)),
        )
    }


def raise_unless_written(destinations: Mapping[str, torch.Tensor]) -> None:
    """Every element has a source's value."""
    missing = [name for name, flat in destinations.items() if bool(flat.isnan().any())]
    if missing:
        raise AssertionError(f"never written in part: {', '.join(missing)}")


class PeakOfDevice:
    """The most that everybody takes on the device, asked of its driver every two milliseconds within `watched`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.nbytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch during the block."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.002):
                self.nbytes = max(self.nbytes, taken_nbytes(self._device))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
