"""Physical memory that training and inference use in turn, each at addresses of its own.

    share_out(rooms, chunks, ranges)           who shares what; numbers only
    pool = Pool(driver, rooms, lenders, ranges)
                                               memory is created, and mapped at both addresses
    pool.give_back()                           as before: neither side has memory

In between, a release or a wake-up only notes whose contents the memory has: nothing is mapped or
allocated, and peers keep their mappings. A `PoolPiece` refuses the second side while the first has
contents there. Touching a training buffer without contents is an illegal access, as elsewhere.

    room      a training buffer that may be cut to any sizes (gradients, optimizer state)
    chunk     of a training buffer that is read while weights are filled (parameters): memory for
              segments that wait until then (the KV cache)
    segment   of inference's memory; what finds no room is mapped and unmapped as before

A segment that gets contents late wakes up without the pieces that training still has. They are
`pending` until `take_rest`, so training's contents may leave behind other work.

CUDA defines the contents of memory with two addresses at the boundaries of operations only: what
reads by one address must begin after what wrote by the other, by a stream or an event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple
from weakref import WeakSet

from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.device_pages import Chunks
from hybrid_engine.memory.host_pages import HostMemory, PoolPiece, tensor_over
from hybrid_engine.memory.offload_items import Kind, Spans

Memories = Mapping[Kind, Sequence[Chunks | HostMemory]]
"""Memories of training on one device, by kind of state."""


class AddressRange(NamedTuple):
    """A range of inference's addresses: a segment, or a part of one.

    Attributes:
        address, nbytes: multiples of the driver's granularity.
        segment: address of the segment.
        is_late: it gets contents only when all weights are filled.
        is_last: late, and what training saves had better lie here than in other late ranges.
    """

    address: int
    nbytes: int
    segment: int
    is_late: bool = False
    is_last: bool = False


class Cut(NamedTuple):
    """A part of a room, a chunk, a range, or of two of them that share it, by their numbers."""

    nbytes: int
    room: int | None = None
    chunk: int | None = None
    range: int | None = None


def share_out(
    rooms: Sequence[int], chunks: Sequence[int], ranges: Sequence[AddressRange]
) -> list[Cut]:
    """Return the cuts of rooms, ranges and chunks that share memory, in order of addresses.

    They cover each room, and each segment that shares any memory; what it does not share comes
    last. Rooms are cut; chunks, which have contents, are taken whole. The last ranges choose first,
    from chunks and then from the last room on, so that what is saved may leave late. Those that
    need memory early, for which only rooms are suitable, come before the others.

    Args:
        rooms, chunks: sizes in bytes; training saves the contents of chunks and of the last rooms.
        ranges: of one rank's inference memory.
    """
    left = list(rooms)
    unused = dict(enumerate(chunks))
    cuts: list[Cut] = []
    needs: dict[int, int] = {}

    def take_rooms(number: int, order: Iterable[int]) -> None:
        for room in order:
            part = min(left[room], needs[number])
            if part:
                cuts.append(Cut(part, room=room, range=number))
                left[room] -= part
                needs[number] -= part

    def take_chunks(number: int) -> None:
        for chunk, nbytes in list(unused.items()):
            if nbytes <= needs[number]:
                cuts.append(Cut(nbytes, chunk=chunk, range=number))
                needs[number] -= unused.pop(chunk)

    # False sorts first: the last ranges, then those that need memory early, then other late ones.
    order = sorted(enumerate(ranges), key=lambda item: (not item[1].is_last, item[1].is_late))
    for number, of in order:
        needs[number] = of.nbytes
        if of.is_last:
            take_chunks(number)
            take_rooms(number, reversed(range(len(rooms))))
        else:
            take_rooms(number, range(len(rooms)))
            if of.is_late:
                take_chunks(number)
    sharing = {ranges[cut.range].segment for cut in cuts if cut.range is not None}
    cuts += [
        Cut(need, range=number)
        for number, need in needs.items()
        if need and ranges[number].segment in sharing
    ]
    if not any(needs.values()):
        # Nobody else needs their memory, so it stays as well.
        cuts += [Cut(nbytes, chunk=chunk) for chunk, nbytes in unused.items()]
    return cuts + [Cut(nbytes, room=room) for room, nbytes in enumerate(left) if nbytes]


class SharedSegment:
    """A segment of inference whose memory is training's while it sleeps.

    What is the segment's own is allocated when it wakes up and freed when it sleeps.

    Attributes:
        handle: a handle of some of its memory, for whoever frees the address.
        pending: addresses that it lacks although it is awake: training has contents there.
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
        self.handle = driver.retain(next(start for start, _, piece in parts if piece is not None))
        self.pending = Spans()
        self._own: dict[int, int] = {}  # address -> bytes of mapped memory of its own

    def wake(self) -> None:
        """Give the segment its memory, uninitialised. After a failure it sleeps.

        Raises DeviceMemoryError for lack of memory, and StateError as `PoolPiece.take`.
        """
        try:
            for start, nbytes, piece in self._parts:
                if piece is not None and piece.is_late and piece.has_contents_of("training"):
                    self.pending.add(start, start + nbytes)
                elif piece is not None:
                    piece.take("inference", self._address)
                elif start not in self._own:
                    self._driver.create_at(start, nbytes)
                    self._own[start] = nbytes
        except BaseException:
            self.sleep()
            raise

    def take_rest(self) -> None:
        """Take the memory that is pending, and zero it.

        Raises StateError if training still has contents there.
        """
        for _, _, piece in self._parts:
            if piece is not None:
                piece.take("inference", self._address)
        # An interrupt leaves it pending, for the next attempt.
        for start, stop in self.pending:
            tensor_over(start, stop - start, self._driver.device, None).zero_()
        self.pending.clear()

    def sleep(self) -> None:
        """Give the memory up; the device must not use it any more. Idempotent."""
        self.pending.clear()
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
        ranges: Sequence[AddressRange],
    ) -> None:
        """Map memory of training at addresses of inference as well, until `give_back`.

        Args:
            driver: of the device.
            rooms: memories without resident chunks.
            lenders: memories with resident chunks, which keep their contents.
            ranges: of segments without memory, of the same device.

        Raises DeviceMemoryError if there is too little memory for the rooms; then nothing has
        changed.
        """
        self.segments: dict[int, SharedSegment] = {}
        # Weakly: the memory ends with its tensors.
        self._memories = WeakSet([*rooms, *lenders])
        # They may have belonged to the pool of an earlier engine.
        for memory in self._memories:
            memory.leave_pool()
        # Chunks with contents: memory, number, address and bytes.
        chunks = [(memory, *chunk) for memory in lenders for chunk in memory.resident()]
        cuts = share_out(
            [room.reserved_nbytes for room in rooms], [nbytes for *_, nbytes in chunks], ranges
        )
        in_rooms: list[list[tuple[int, PoolPiece]]] = [[] for _ in rooms]
        in_segments: defaultdict[int, list[tuple[int, int, PoolPiece | None]]] = defaultdict(list)
        lent: list[tuple[Chunks, int, PoolPiece]] = []
        ends = [room.address for room in rooms]
        ends_of_ranges = [of.address for of in ranges]
        with ExitStack() as undo:
            for nbytes, room, chunk, number in cuts:
                # What no range shares is never inference's, which counts as late.
                piece = PoolPiece(number is None or ranges[number].is_late)
                source = None  # training's address of the memory
                if room is not None:
                    source = ends[room]
                    ends[room] += nbytes
                    driver.create_at(source, nbytes)
                    undo.callback(driver.unmap, source, nbytes)
                    in_rooms[room].append((nbytes, piece))
                elif chunk is not None:
                    memory, index, source, _ = chunks[chunk]
                    lent.append((memory, index, piece))
                if number is not None:
                    start = ends_of_ranges[number]
                    ends_of_ranges[number] += nbytes
                    if source is not None:
                        driver.share_at(start, nbytes, source)
                        undo.callback(driver.unmap, start, nbytes)
                    part = (start, nbytes, None if source is None else piece)
                    in_segments[ranges[number].segment].append(part)
            undo.pop_all()
        for settled, pieces in zip(rooms, in_rooms, strict=True):
            settled.settle(pieces)
        for memory, index, piece in lent:
            memory.lend(index, piece)
        for address, parts in in_segments.items():
            self.segments[address] = SharedSegment(driver, address, parts)

    def pending(self) -> Spans:
        """Return the addresses of segments that are awake without them."""
        pending = Spans()
        for segment in self.segments.values():
            for start, stop in segment.pending:
                pending.add(start, stop)
        return pending

    def take_rest(self) -> None:
        """Take what is pending, and zero it; see `SharedSegment.take_rest`."""
        for segment in self.segments.values():
            if segment.pending.nbytes:
                segment.take_rest()

    def give_back(self) -> None:
        """Free all shared memory; neither side has contents. Peers unmap theirs by `trim`."""
        for segment in self.segments.values():
            segment.end()
        self.segments.clear()
        for memory in self._memories:
            memory.leave_pool()
