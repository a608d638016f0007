"""Figures of the checks on GPUs, with their clock and floors."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of an operation and of its floor, for the same bytes."""

    name: str
    nbytes: int
    seconds: float
    floor: str
    floor_seconds: float

    @property
    def of_floor(self) -> float:
        """Floor over seconds."""
        return self.floor_seconds / self.seconds

    @property
    def gb_per_second(self) -> float:
        """10^9 bytes per second, each byte counted once, though it is read and written."""
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True)
class Memory:
    """Bytes compared with a whole."""

    name: str
    nbytes: int
    whole: str
    whole_nbytes: int

    @property
    def ratio(self) -> float:
        """The share of the whole."""
        return self.nbytes / self.whole_nbytes


def taken_nbytes(device: torch.device) -> int:
    """Return the used bytes of a GPU, by all processes and torch's cache; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, size = torch.cuda.mem_get_info(device)
    return size - free


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, action: Callable[[], object]) -> float:
    """Return the wall time of an action, including the work it queues."""
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
    """Return median seconds of a copy to `device`, by default from it; calls `wait` before each."""
    origin = torch.ones(nbytes, dtype=torch.uint8, device=source or device)
    destination = torch.ones(nbytes, dtype=torch.uint8, device=device)
    seconds = []  # the first run is a warm-up
    for _ in range(repeat + 1):
        wait()
        seconds.append(seconds_of(device, lambda: destination.copy_(origin)))
    return statistics.median(seconds[1:])


def plain_host_copies(device: torch.device, nbytes: int, repeat: int) -> dict[str, float]:
    """Return median seconds of a copy to page-locked memory (`offload`) and back (`onload`)."""
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return {
        name: statistics.median(seconds_of(device, copy) for _ in range(repeat + 1))
        for name, copy in (
            ("offload", lambda: on_host.copy_(on_device, non_blocking=True)),
            ("onload", lambda: on_device.copy_(on_host, non_blocking=True)),
        )
    }


def raise_unless_written(destinations: Mapping[str, torch.Tensor]) -> None:
    """Raise AssertionError if an element still is NaN, the initial value of destinations."""
    missing = [name for name, flat in destinations.items() if bool(flat.isnan().any())]
    if missing:
        raise AssertionError(f"never written in part: {', '.join(missing)}")


class PeakOfDevice:
    """Peak of the device memory in use by all processes, sampled every 2 ms within `watched`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.nbytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample during the block."""
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
