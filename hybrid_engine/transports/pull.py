"""Transports in which the destination rank copies straight from the source. No packing, no staging.

    LocalTransport          the source is on the same rank
    SharedMemoryTransport   the source is a peer's mapped memory, on one host:
                            ElasticBuffer --export()--> handle
                                          --map_pages() or open_peer().mapped()--> flat view

No rank waits for another. The caller fences: before the first bucket, until all sources hold final
values; before an owner releases (switch/release_fence.py) or overwrites memory that a bucket reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Self

import torch
from msgspec.structs import replace

from hybrid_engine.errors import TransportError
from hybrid_engine.memory.device_pages import DeviceHandle, DevicePeer
from hybrid_engine.memory.elastic import Handle, open_peer
from hybrid_engine.memory.host_pages import BufferHandle, map_pages
from hybrid_engine.planning.plan import Costs, Link, Transfer
from hybrid_engine.records.layout import BufferId, Extent
from hybrid_engine.transports.context import Transport, TransportContext
from hybrid_engine.transports.copies import BatchedCopies, FlatBuffers, FlatOf, failure_at


class PullTransport(Transport):
    """Base class of the transports that pull, from this rank unless a subclass opens sources."""

    def prepare(self, transfers: Sequence[Transfer]) -> BatchedCopies:
        """Return the copies that write to this rank; see the base class."""
        # Ascending from this rank, then ascending from 0. If all ranks began with rank 0, they
        # would share the links of its device while those of the others idle. Of 4 ranks, rank 2
        # reads from 2 and 3, then from 0 and 1.
        return BatchedCopies(
            sorted(
                (transfer for transfer in transfers if transfer.dst_rank == self.rank),
                key=lambda pull: (pull.src_rank < self.rank, pull.src_rank),
            )
        )

    def run(
        self, bucket: int, copies: BatchedCopies, source: FlatBuffers, destination: FlatBuffers
    ) -> None:
        """Copy; see the base class."""
        # Device memory of peers is unmapped when the stack is closed.
        with ExitStack() as readings:
            with self._costs.timed("read"):
                source_of = self._open_sources(bucket, copies, source, readings)
            with self._costs.timed("transfer"):
                copies.run(
                    source_of,
                    lambda transfer: destination[transfer.dst.buffer.name],
                    self.where(bucket, "transfer"),
                )

    def _open_sources(
        self, bucket: int, copies: BatchedCopies, source: FlatBuffers, readings: ExitStack
    ) -> FlatOf:
        """Return a function from a transfer to its flat source.

        `readings` is closed after the copies. Raises TransportError.
        """
        return lambda transfer: source[transfer.src.buffer.name]


class LocalTransport(PullTransport):
    """Copies within a rank, on any device."""

    name = "local"

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """See `Transport`."""
        return "" if transfer.src_rank == transfer.dst_rank else "another rank"


class SharedMemoryTransport(PullTransport):
    """Reads peers' elastic buffers, which are opened on first use and kept until `close`.

    Host pages stay mapped until then. A chunk of device memory is mapped while a bucket reads it,
    one of a pool while the pool lasts. A peer that has ended is an error at its first use only.
    """

    name = "shared_memory"

    def __init__(self, rank: int, handles: Mapping[BufferId, Handle]) -> None:
        """Prepare to read the buffers behind `handles`, which are exchanged once.

        If a rank reallocates its buffers, create another transport.
        """
        super().__init__(rank)
        self._handles = dict(handles)
        # Whole memory files, each of which contains many buffers; they stay mapped.
        self._files: dict[BufferHandle, torch.Tensor] = {}
        self._device_peers: dict[BufferId, DevicePeer] = {}
        # Chunks of a source that copies read; derived at first use.
        self._chunks: dict[tuple[BatchedCopies, BufferId], list[int]] = {}

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """See `Transport`."""
        if transfer.link is Link.NETWORK:
            return "across hosts"
        return "" if transfer.src.buffer in exported else "a buffer that is not exported"

    @classmethod
    def connect(cls, context: TransportContext) -> Self:
        """See `Transport`."""
        return cls(context.rank, context.handles)

    def trim(self) -> Costs:
        """Unmap memory of pools that have ended; it is not staging memory."""
        for peer in self._device_peers.values():
            peer.trim()
        return super().trim()

    def close(self) -> None:
        """Unmap the peers; idempotent. A later `run` maps them again."""
        self._chunks.clear()
        self._files.clear()
        while self._device_peers:
            _, peer = self._device_peers.popitem()
            peer.close()

    def _open_sources(
        self, bucket: int, copies: BatchedCopies, source: FlatBuffers, readings: ExitStack
    ) -> FlatOf:
        flats: dict[BufferId, torch.Tensor] = {}
        for buffer_id, pulls in copies.by_source.items():
            try:
                flats[buffer_id] = self._open(buffer_id, copies, readings)
            except (OSError, TransportError) as error:
                where = f"{self.where(bucket, 'read')}, peer {buffer_id.rank}"
                raise failure_at(where, pulls[0], error) from error
        return lambda transfer: flats[transfer.src.buffer]

    def _open(
        self, buffer_id: BufferId, copies: BatchedCopies, readings: ExitStack
    ) -> torch.Tensor:
        """Return a peer's flat tensor, of which `copies` may read until `readings` is closed."""
        handle = self._handles.get(buffer_id)
        if handle is None:
            raise TransportError(
                f"no handle of {buffer_id} was exchanged; export the buffer or use collective",
                code="no-handle",
            )
        if not isinstance(handle, DeviceHandle):
            return self._map(handle)
        if buffer_id not in self._device_peers:
            self._device_peers[buffer_id] = open_peer(handle)
        key = (copies, buffer_id)
        if key not in self._chunks:
            # A smaller hole cannot contain a whole chunk, so leaving it out would save nothing.
            hole = handle.chunk_nbytes // getattr(torch, handle.dtype).itemsize
            self._chunks[key] = handle.chunks(
                extent
                for transfer in copies.by_source[buffer_id]
                for extent in source_extents(transfer, hole)
            )
        return readings.enter_context(self._device_peers[buffer_id].mapped(self._chunks[key]))

    def _map(self, handle: BufferHandle) -> torch.Tensor:
        """Return a peer's flat tensor in host pages; each memory file is mapped once."""
        # Buffers of one file differ only in the part that they take.
        whole = replace(handle, offset=0, numel=handle.file_nbytes, dtype="uint8")
        if whole not in self._files:
            self._files[whole] = map_pages(whole)
        dtype = getattr(torch, handle.dtype)
        stop = handle.offset + handle.numel * dtype.itemsize
        return self._files[whole][handle.offset : stop].view(dtype)


def source_extents(transfer: Transfer, hole: int) -> list[Extent]:
    """Return the elements of the source that a transfer reads.

    One extent per step along the first dim, because the elements between the steps may belong to
    others (the experts of one layer); a single one if fewer than `hole` elements lie between.
    """
    src = transfer.src
    lengths = transfer.lengths
    if not lengths:
        return [src.extent(())]
    step = (1, *lengths[1:])
    first = src.extent(step)
    # Steps of 10 elements that read 4 leave 6 between them.
    if src.strides[0] - (first.stop - first.start) < hole:
        return [src.extent(lengths)]
    inner_origin = (0,) * (len(lengths) - 1)
    return [src.at((index, *inner_origin)).extent(step) for index in range(lengths[0])]
