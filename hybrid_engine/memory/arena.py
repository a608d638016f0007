"""Host memory for offloaded state, and the copies to and from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

from hybrid_engine.memory.growing_pages import GrowingPages

Direction = Literal["to host", "to device"]
_CHUNK = 64 * 1024**2  # bytes per copy on CUDA, so that both directions and other traffic take turns on the bus


class Arena:
    """Host memory for the copied contents of one kind; grows with the inventory, never shrinks."""

    def __init__(self) -> None:
        self._pages = GrowingPages()
        self.memory = self._pages.tensor()

    def reserve(self, nbytes: int, *, pinned: bool) -> None:
        """Provide at least `nbytes`, page-locked if `pinned`; what is in it stays. No copy may be under way.

        What a growth that failed left without page-locking is page-locked again, even if it is large enough.

        Raises OffloadError; then it is as before, and a later call may succeed.
        """
        nbytes = max(nbytes, self.memory.numel())
        self.memory = torch.empty(0, dtype=torch.uint8)  # it may move
        try:
            self._pages.grow(nbytes, pinned=pinned)
        finally:
            self.memory = self._pages.tensor()


class Copier:
    """Copies bytes between a device and an arena.

    On CUDA copies are queued, in chunks, on streams: one for each direction, so that both overlap with each other and
    with the device's other work, and one more for what is to go on in the background. On the CPU a copy is done when
    the call returns, in the background by a thread. The CUDA half has never been run.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, Direction, bool], torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._in_background: dict[Direction, list[Callable[[], float]]] = {"to host": [], "to device": []}

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, direction: Direction, *, background: bool = False
    ) -> None:
        """Copy flat bytes; neither side may be freed or written before `finish`, or `finish_background`."""
        device = source.device if direction == "to host" else destination.device
        if device.type == "cuda":
            stream = self._stream(device, direction, background)
            if not background:
                _queue_copy(destination, source, stream)
                return
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            _queue_copy(destination, source, stream)
            end.record(stream)
            self._in_background[direction].append(lambda: _seconds_between(begin, end))
        elif background:
            self._thread = self._thread or ThreadPoolExecutor(1, "offload")
            self._in_background[direction].append(self._thread.submit(_timed_copy, destination, source).result)
        else:
            destination.copy_(source)

    def finish(self, direction: Direction) -> None:
        """Wait until every copy in this direction is done, but for those in the background."""
        for (_, queued, background), stream in self._streams.items():
            if queued == direction and not background:
                stream.synchronize()

    def finish_background(self, direction: Direction) -> float:
        """Wait for those in the background; return the seconds that they took, less the wait here."""
        started, seconds, copies = time.perf_counter(), 0.0, self._in_background[direction]
        while copies:
            try:
                seconds += copies[0]()
            except Exception:
                copies.pop(0)
                raise
            copies.pop(0)  # only now: an interrupted wait goes on with the next call
        return max(0.0, seconds - (time.perf_counter() - started))

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
