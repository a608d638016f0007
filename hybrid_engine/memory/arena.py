"""Host memory for offloaded state, and the copies to and from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

import torch

from hybrid_engine.errors import OffloadError

Direction = Literal["to host", "to device"]
_CHUNK = 64 * 1024**2  # bytes per copy on CUDA, so that both directions and other traffic take turns on the bus


class Arena:
    """Host memory for the copied contents of one kind; grows with the inventory, never shrinks."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, nbytes: int, *, pinned: bool, keep: int = 0) -> None:
        """Provide at least `nbytes`, page-locked if `pinned`.

        When it grows, the first `keep` bytes are copied (the old and the new memory then exist at once); the rest is
        lost.
        """
        if self.memory.numel() >= nbytes:
            return
        self._unpin()
        self._unpin = lambda: None
        kept = self.memory[:keep].clone() if keep else None
        self.memory = torch.empty(0, dtype=torch.uint8)  # before the new one, not beside it
        try:
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError:
            if kept is not None:
                self.memory = kept
            raise
        if kept is not None:
            self.memory[:keep] = kept
        if pinned:
            try:
                self._unpin = _pin(self.memory, self)
            except OffloadError:
                if not keep:
                    self.memory = torch.empty(0, dtype=torch.uint8)  # or the next call would find it large enough
                raise


class Copier:
    """Copies bytes between a device and an arena.

    On the CPU a copy is done when the call returns. On CUDA it is queued, in chunks, on a stream of its direction, so
    that both directions overlap with each other and with the device's other work; `finish` waits for it. The CUDA half
    has never been run.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, Direction], torch.cuda.Stream] = {}

    def copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
        """Copy flat bytes; neither side may be freed or written before `finish`."""
        device = source.device if direction == "to host" else destination.device
        if device.type != "cuda":
            destination.copy_(source)
            return
        stream = self._stream(device, direction)
        stream.wait_stream(torch.cuda.current_stream(device))  # what is computed there, and memory just taken
        with torch.cuda.stream(stream):
            for start in range(0, source.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                destination[part].copy_(source[part], non_blocking=True)

    def finish(self, direction: Direction) -> None:
        """Wait until every copy in this direction is done."""
        for (_, queued), stream in self._streams.items():
            if queued == direction:
                stream.synchronize()

    def _stream(self, device: torch.device, direction: Direction) -> torch.cuda.Stream:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]


def _pin(memory: torch.Tensor, owner: object) -> Callable[[], object]:
    """Page-lock ordinary memory until the returned function is called, or `owner` is gone.

    Not `pin_memory=True`: that allocator rounds up to a power of two.
    """
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, memory.numel(), 0))
    if code != 0:
        raise OffloadError(f"page-locking {memory.numel()} bytes of host memory failed with CUDA error {code}")
    unpin = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    unpin.atexit = False
    return unpin
