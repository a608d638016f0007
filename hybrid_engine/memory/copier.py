"""Copies between a device and the host memory for offloaded state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

logger = logging.getLogger("hybrid_engine")

Direction = Literal["to host", "to device"]
_CHUNK = 64 * 1024**2  # bytes per copy on CUDA, so that both directions and other traffic take turns on the bus


class BackgroundCopy:
    """A copy that somebody else may make in the meantime; it is made once, and never after it was called off."""

    def __init__(self, make: Callable[[], float], *, is_queued: bool = False) -> None:
        """`make` copies, or waits for a copy that is queued, and returns its seconds."""
        self._make: Callable[[], float] | None = make
        self._is_queued = is_queued
        self._lock = threading.Lock()
        self._seconds = 0.0

    def run(self) -> None:
        """Make it, unless that was done; what fails is left to `wait`, which tries again."""
        with self._lock:
            if self._make is not None:
                self._seconds = self._make()
                self._make = None

    def wait(self) -> float:
        """Return when it is made, by the caller if nobody has begun; how many seconds it took, less the wait here."""
        started = time.perf_counter()
        self.run()
        return max(0.0, self._seconds - (time.perf_counter() - started))

    def cancel(self) -> None:
        """Let it not be made any more; one that is being made, or that is queued, is made first."""
        with self._lock:
            if self._is_queued and self._make is not None:
                self._make()
            self._make = None


class Copier:
    """Copies bytes between a device and an arena.

    On CUDA copies are queued, in chunks, on streams: one for each direction, so that both overlap with each other and
    with the device's other work, and one more for what is to go on in the background. On the CPU a copy is done when
    the call returns, in the background by a thread. The CUDA half has never been run.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, Direction, bool], torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
        """Copy flat bytes; neither side may be freed or written before `finish`."""
        device = source.device if direction == "to host" else destination.device
        if device.type == "cuda":
            _queue_copy(destination, source, self._stream(device, direction, background=False))
        else:
            destination.copy_(source)

    def begin_copy(
        self, copies: list[BackgroundCopy], destination: torch.Tensor, source: torch.Tensor, direction: Direction
    ) -> None:
        """Begin to copy flat bytes in the background, as one of `copies`; both sides are to be left alone until then.

        Where no thread can be had, whoever waits for the copy makes it.
        """
        device = source.device if direction == "to host" else destination.device
        if device.type == "cuda":
            stream = self._stream(device, direction, background=True)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            _queue_copy(destination, source, stream)
            end.record(stream)
            copies.append(BackgroundCopy(lambda: _seconds_between(begin, end), is_queued=True))
            return
        copy = BackgroundCopy(lambda: _timed_copy(destination, source))
        copies.append(copy)  # before a thread has it: it never runs without somebody who waits for it
        try:
            self._thread = self._thread or ThreadPoolExecutor(1, "offload")
            self._thread.submit(copy.run)
        except RuntimeError as error:
            logger.info("no thread for a copy in the background (%s): it is made when its contents are needed", error)

    def finish(self, direction: Direction) -> None:
        """Wait until every copy in this direction is done, but for those in the background."""
        for (_, queued, background), stream in self._streams.items():
            if queued == direction and not background:
                stream.synchronize()

    def _stream(self, device: torch.device, direction: Direction, background: bool) -> torch.cuda.Stream:
        key = (device, direction, background)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        return self._streams[key]


def _queue_copy(destination: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    stream.wait_stream(torch.cuda.current_stream(stream.device))  # what is computed there, and memory just taken
    with torch.cuda.stream(stream):
        for start in range(0, source.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            destination[part].copy_(source[part], non_blocking=True)


def _seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Waits for the second."""
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _timed_copy(destination: torch.Tensor, source: torch.Tensor) -> float:
    started = time.perf_counter()
    destination.copy_(source)
    return time.perf_counter() - started
