"""Physical memory that training and inference use in turn, each at addresses of its own.

    share_out(rooms, chunks, segments)         who shares what; numbers only
    pool = Pool(driver, rooms, lenders, segments)
                                               memory is created, and mapped at both addresses
    pool.give_back()                           as before: neither side has memory

In between, a release or a wake-up only notes whose contents the memory has: nothing is mapped or
allocated, and peers keep their mappings. A `PoolPiece` refuses the second side while the first has
contents there. Touching a training buffer without contents is an illegal access, as elsewhere.

    room      a training buffer that is off the device before inference gets contents (gradients,
              optimizer state): it is cut to the sizes of inference's segments
    chunk     of a training buffer that is read while weights are filled (parameters): memory for
              segments that wait until then (the KV cache)
    segment   of inference's memory; what finds no room is mapped and unmapped as before

CUDA defines the contents of memory with two addresses at the boundaries of operations only: what
reads by one address must begin after what wrote by the other, by a stream or an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakSet

from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.device_pages import Chunks, PoolPiece


class AddressRange(NamedTuple):
    """A range of inference's addresses.

    Attributes:
        address, nbytes: multiples of the driver's granularity.
        is_late: it gets contents only when all weights are filled.
    """

    address: int
    nbytes: int
    is_late: bool


class Cut(NamedTuple):
    """A part of a room, a chunk, a segment, or of two of them that share it, by their numbers."""

    nbytes: int
    room: int | None = None
    chunk: int | None = None
    segment: int | None = None


def share_out(
    rooms: Sequence[int], chunks: Sequence[int], segments: Sequence[AddressRange]
) -> list[Cut]:
    """Return the cuts of rooms, segments and chunks that share memory, in order of addresses.

    They cover each room, and each segment that shares any memory; what it does not share comes
    last. Rooms are cut; chunks, which have contents, are taken whole. Segments that need memory
    early choose first, because only rooms suit them.

    Args:
        rooms, chunks: sizes in bytes.
        segments: of one rank's inference memory.
    """
    left = list(rooms)
    unused = dict(enumerate(chunks))
    cuts: list[Cut] = []
    for number in sorted(range(len(segments)), key=lambda number: segments[number].is_late):
        segment = segments[number]
        need = segment.nbytes
        for chunk, nbytes in list(unused.items()) if segment.is_late else ():
            if nbytes <= need:
                cuts.append(Cut(nbytes, chunk=chunk, segment=number))
                need -= unused.pop(chunk)
        for room, nbytes in enumerate(left):
            part = min(nbytes, need)
            if part:
                cuts.append(Cut(part, room=room, segment=number))
                left[room] -= part
                need -= part
        if 0 < need < segment.nbytes:
            cuts.append(Cut(need, segment=number))
    return cuts + [Cut(nbytes, room=room) for room, nbytes in enumerate(left) if nbytes]


class SharedSegment:
    """A segment of inference whose memory is training's while it sleeps.

    What is the segment's own is allocated when it wakes up and freed when it sleeps.

    Attributes:
        handle: a handle of the memory at its address, for whoever frees the address.
    """

    def __init__(
        self, driver: CudaDriver, address: int, parts: Sequence[tuple[int, int, PoolPiece | None]]
    ) -> None:
        """
        Args:
            driver: of the device.
            address: of the segment, which sleeps.
            parts: address, bytes and piece of each part; no piece for memory of its own.
        """
        self._driver = driver
        self._address = address
        self._parts = parts
        self.handle = driver.retain(address)
        self._own: dict[int, int] = {}  # address -> bytes of mapped memory of its own

    def wake(self) -> None:
        """Give the segment its memory, uninitialised. After a failure it sleeps.

        Raises DeviceMemoryError for lack of memory, and StateError as `PoolPiece.take`.
        """
        try:
            for start, nbytes, piece in self._parts:
                if piece is not None:
                    piece.take("inference", self._address)
                elif start not in self._own:
                    handle = self._driver.create(nbytes)
                    try:
                        self._driver.map(start, nbytes, handle)
                    finally:
                        # The mapping alone keeps the memory.
                        self._driver.release(handle)
                    self._own[start] = nbytes
        except BaseException:
            self.sleep()
            raise

    def sleep(self) -> None:
        """Give the memory up; the device must not use it any more. Idempotent."""
        for _, _, piece in self._parts:
            if piece is not None:
                piece.leave(self._address)
        while self._own:
            self._driver.unmap(*self._own.popitem())

    def forget(self) -> None:
        """Sleep for good, because the caller frees the address, with `handle`."""
        self.sleep()
        self._parts = ()

    def end(self) -> None:
        """Sleep, and end the mappings, unless the address was freed."""
        self.sleep()
        for start, nbytes, piece in self._parts:
            if piece is not None:
                self._driver.unmap(start, nbytes)
        if self._parts:
            self._driver.release(self.handle)


class Pool:
    """Memory of one rank that its two sides share.

    Attributes:
        segments: those that share memory, by address.
    """

    def __init__(
        self,
        driver: CudaDriver,
        rooms: Sequence[Chunks],
        lenders: Sequence[Chunks],
        segments: Sequence[AddressRange],
    ) -> None:
        """Map memory of training at addresses of inference as well, until `give_back`.

        Args:
            driver: of the device.
            rooms: memories without resident chunks.
            lenders: memories with resident chunks, which keep their contents.
            segments: without memory, of the same device.

        Raises DeviceMemoryError if there is too little memory for the rooms; then nothing has
        changed.
        """
        self.segments: dict[int, SharedSegment] = {}
        # Weakly: the memory ends with its tensors.
        self._memories = WeakSet([*rooms, *lenders])
        # They may have belonged to the pool of an earlier engine.
        for memory in self._memories:
            memory.leave_pool()
        chunks = [(memory, *chunk) for memory in lenders for chunk in memory.resident()]
        cuts = share_out(
            [room.reserved_nbytes for room in rooms], [nbytes for *_, nbytes, _ in chunks], segments
        )
        in_rooms: list[list[tuple[int, PoolPiece]]] = [[] for _ in rooms]
        in_segments: list[list[tuple[int, int, PoolPiece | None]]] = [[] for _ in segments]
        lent: list[tuple[Chunks, int, PoolPiece]] = []
        ends = [room.address for room in rooms]
        with ExitStack() as handles, ExitStack() as undo:

            def map_at(address: int, nbytes: int, handle: Any) -> None:
                driver.map(address, nbytes, handle)
                undo.callback(driver.unmap, address, nbytes)

            for nbytes, room, chunk, segment in cuts:
                piece = None if room is None and chunk is None else PoolPiece()
                handle = None
                if room is not None and piece is not None:
                    handle = driver.create(nbytes)
                    # The mappings alone keep the memory.
                    handles.callback(driver.release, handle)
                    map_at(ends[room], nbytes, handle)
                    ends[room] += nbytes
                    in_rooms[room].append((nbytes, piece))
                if chunk is not None and piece is not None:
                    memory, index, _, handle = chunks[chunk]
                    lent.append((memory, index, piece))
                if segment is not None:
                    parts = in_segments[segment]
                    start = segments[segment].address + sum(before for _, before, _ in parts)
                    if piece is not None:
                        map_at(start, nbytes, handle)
                    parts.append((start, nbytes, piece))
            undo.pop_all()
        for settled, pieces in zip(rooms, in_rooms, strict=True):
            settled.settle(pieces)
        for memory, index, piece in lent:
            memory.lend(index, piece)
        for of, parts in zip(segments, in_segments, strict=True):
            if parts:
                self.segments[of.address] = SharedSegment(driver, of.address, parts)

    def give_back(self) -> None:
        """Free all shared memory; neither side has contents. Peers unmap theirs by `trim`."""
        for segment in self.segments.values():
            segment.end()
        self.segments.clear()
        for memory in self._memories:
            memory.leave_pool()
