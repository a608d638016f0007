"""Transports in which the destination rank copies straight from where the source lies. No packing, no staging.

    LocalTransport          the source is on the same rank
    SharedMemoryTransport   the source is a peer's mapped memory, on one host:
                            ElasticBuffer --export()--> handle --map_pages() or open_peer().mapped()--> flat view

The source rank does nothing while it is read, so nobody waits for anybody. The caller fences: before the first bucket,
until all sources hold final values; before an owner releases what a bucket reads (switch/release_fence.py), or, after
the last one, overwrites its buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager

import torch
from msgspec.structs import replace

from hybrid_engine.errors import TransportError
from hybrid_engine.memory.device_pages import DeviceHandle, DevicePeer
from hybrid_engine.memory.elastic import Handle, open_peer
from hybrid_engine.memory.host_pages import BufferHandle, map_pages
from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.records.layout import BufferId, Extent
from hybrid_engine.transports.context import TransportContext
from hybrid_engine.transports.copies import BatchedCopies, FlatOf, PhaseClock, copy_straight, failure_at


class PullTransport:
    """Base of both; a subclass says where the sources are."""

    name: str

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._clock = PhaseClock()
        self._copies: dict[object, tuple[Sequence[Transfer], BatchedCopies]] = {}  # by bucket and first transfer

    def start(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor] | None,
        reason: str = "",
    ) -> None:
        """Nothing to do: no rank waits for another."""

    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the transfers that write to this rank; see `ports.Transport`."""
        if not transfers:
            return
        with ExitStack() as readings:
            with self._clock.phase("read"):
                copies = self._copies_of(bucket, transfers)
                source_of = self._open_sources(bucket, copies.transfers, source, readings)
            with self._clock.phase("transfer"):
                copy_straight(self.name, bucket, copies, source_of, destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Nothing to do: no rank waits for another."""

    def notify(
        self, bucket: int, phase: str, receivers: Iterable[int], senders: Iterable[int], reason: str = ""
    ) -> str:
        """Nothing to say or hear: there are no messages."""
        return ""

    def take_seconds(self) -> dict[str, float]:
        """See `ports.Transport`."""
        return self._clock.take()

    def trim(self) -> int:
        """Nothing is staged."""
        return 0

    def close(self) -> None:
        """Forget what was made for the buckets; idempotent."""
        self._copies.clear()

    def _copies_of(self, bucket: int, transfers: Sequence[Transfer]) -> BatchedCopies:
        """Copies of those that write to this rank. The same object comes at every switch, and relays have their own."""
        known, copies = self._copies.get((bucket, transfers[0]), (None, None))
        if copies is None or known is not transfers:
            copies = BatchedCopies(transfer for transfer in transfers if transfer.dst_rank == self.rank)
            self._copies[bucket, transfers[0]] = transfers, copies
        return copies

    def _open_sources(
        self, bucket: int, pulls: Sequence[Transfer], source: Mapping[str, torch.Tensor], readings: ExitStack
    ) -> FlatOf:
        """Return what finds a transfer's flat source; `readings` is closed after the copies. Raises TransportError."""
        raise NotImplementedError


class LocalTransport(PullTransport):
    """Copies within a rank, on any device."""

    name = "local"

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """See `router.RegisteredTransport`."""
        return "" if transfer.src_rank == transfer.dst_rank else "another rank"

    @classmethod
    def connect(cls, context: TransportContext) -> LocalTransport:
        """See `router.RegisteredTransport`."""
        return cls(context.rank)

    def _open_sources(
        self, bucket: int, pulls: Sequence[Transfer], source: Mapping[str, torch.Tensor], readings: ExitStack
    ) -> FlatOf:
        return lambda transfer: source[transfer.src.buffer.name]


class SharedMemoryTransport(PullTransport):
    """Reads peers' elastic buffers. Peers are opened on first use, until `close`.

    Host pages stay mapped so long; of device memory a chunk stays from the first bucket that reads it to the last, so
    that its owner can release it then.

    Has no timeout, since it waits for nobody: a peer that ended is an error at its first use, and harmless after.
    """

    name = "shared_memory"

    def __init__(self, rank: int, handles: Mapping[BufferId, Handle], buckets: Iterable[Bucket] = ()) -> None:
        """`handles`: of the source buffers of all ranks (`export_handles`), exchanged once. `buckets`: of the plan.

        When a rank allocates its buffers anew the handles are stale: make a new transport.
        """
        super().__init__(rank)
        self._handles = dict(handles)
        self._host_pages: dict[BufferId, torch.Tensor] = {}
        self._files: dict[BufferHandle, torch.Tensor] = {}  # whole memory files, which hold many buffers
        self._device_peers: dict[BufferId, DevicePeer] = {}
        self._reads: dict[BufferId, list[tuple[int, Transfer]]] = {}  # of device memory, with the bucket's index
        self._last_reads: dict[BufferId, dict[int, int]] = {}  # chunk -> the last bucket that reads it
        for bucket in buckets:
            for transfer in (*bucket.transfers, *bucket.fan_out):
                if transfer.dst_rank == rank and isinstance(handles.get(transfer.src.buffer), DeviceHandle):
                    self._reads.setdefault(transfer.src.buffer, []).append((bucket.index, transfer))

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """See `router.RegisteredTransport`."""
        if transfer.link is Link.NETWORK:
            return "across hosts"
        return "" if transfer.src.buffer in exported else "a buffer that is not exported"

    @classmethod
    def connect(cls, context: TransportContext) -> SharedMemoryTransport:
        """See `router.RegisteredTransport`."""
        return cls(context.rank, context.handles, context.buckets)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Keep nothing mapped: what later buckets read will not be read."""
        self.trim()

    def trim(self) -> int:
        """Keep no device memory mapped, not even for buckets that were skipped; none of it counts as staging."""
        for peer in self._device_peers.values():
            peer.unmap()
        return 0

    def close(self) -> None:
        """Unmap the peers; idempotent. A later `run` maps them again."""
        super().close()
        self._host_pages.clear()
        self._files.clear()
        while self._device_peers:
            self._device_peers.popitem()[1].close()

    def _open_sources(
        self, bucket: int, pulls: Sequence[Transfer], source: Mapping[str, torch.Tensor], readings: ExitStack
    ) -> FlatOf:
        on_devices: dict[BufferId, list[Transfer]] = {}
        for transfer in pulls:
            buffer_id = transfer.src.buffer
            if buffer_id in self._host_pages:
                continue
            with self._failing_at(bucket, transfer):
                if isinstance(handle := self._handle_of(buffer_id), DeviceHandle):
                    on_devices.setdefault(buffer_id, []).append(transfer)
                else:
                    self._host_pages[buffer_id] = self._map(handle)
        if not on_devices:
            return lambda transfer: self._host_pages[transfer.src.buffer]
        mapped = {
            buffer_id: readings.enter_context(self._mapped(bucket, buffer_id, transfers))
            for buffer_id, transfers in on_devices.items()
        }
        return lambda transfer: (
            mapped[transfer.src.buffer] if transfer.src.buffer in mapped else self._host_pages[transfer.src.buffer]
        )

    def _map(self, handle: BufferHandle) -> torch.Tensor:
        """A peer's flat tensor in host pages; its memory file is mapped once."""
        whole = replace(handle, offset=0, numel=handle.file_nbytes, dtype="uint8")
        if whole not in self._files:
            self._files[whole] = map_pages(whole)
        dtype = getattr(torch, handle.dtype)
        return self._files[whole][handle.offset : handle.offset + handle.numel * dtype.itemsize].view(dtype)

    @contextmanager
    def _mapped(self, bucket: int, buffer_id: BufferId, transfers: Sequence[Transfer]) -> Iterator[torch.Tensor]:
        """A peer's flat device tensor, with what these transfers read of it mapped."""
        handle = self._handles[buffer_id]
        assert isinstance(handle, DeviceHandle)
        with self._failing_at(bucket, transfers[0]):
            if buffer_id not in self._device_peers:
                self._device_peers[buffer_id] = open_peer(handle)
            peer = self._device_peers[buffer_id]
            last_reads = self._last_reads_of(buffer_id, handle, peer)
            keep = {chunk for chunk, last in last_reads.items() if last > bucket}
            reading = peer.mapped(_extents(transfers, handle), keep)
            flat = reading.__enter__()
        with ExitStack() as stack:
            stack.push(reading)
            yield flat

    def _last_reads_of(self, buffer_id: BufferId, handle: DeviceHandle, peer: DevicePeer) -> Mapping[int, int]:
        if buffer_id not in self._last_reads:
            reads = self._reads.pop(buffer_id, [])
            self._last_reads[buffer_id] = {
                chunk: bucket for bucket, transfer in reads for chunk in peer.chunks(_extents([transfer], handle))
            }
        return self._last_reads[buffer_id]

    def _handle_of(self, buffer_id: BufferId) -> Handle:
        if buffer_id not in self._handles:
            raise TransportError(f"no handle of {buffer_id} was exchanged; export the buffer or use collective")
        return self._handles[buffer_id]

    @contextmanager
    def _failing_at(self, bucket: int, transfer: Transfer) -> Iterator[None]:
        """Say of a failure to open a source where it happened."""
        try:
            yield
        except (OSError, TransportError) as error:
            raise failure_at(self.name, bucket, "read", transfer, error, peer=transfer.src_rank) from error


def _extents(transfers: Iterable[Transfer], handle: DeviceHandle) -> list[Extent]:
    hole = handle.chunk_nbytes // getattr(torch, handle.dtype).itemsize  # chunks on both sides of it are read
    return [extent for transfer in transfers for extent in source_extents(transfer, hole)]


def source_extents(transfer: Transfer, hole: int) -> list[Extent]:
    """Elements of the source that a transfer reads.

    From the first to the last of each step along its first dim, since what lies between the steps may belong to others
    (the experts of one layer); in one where fewer than `hole` elements lie there.
    """
    if not transfer.lengths:
        return [transfer.src.extent(())]
    step, others = (1, *transfer.lengths[1:]), (0,) * (len(transfer.lengths) - 1)
    first = transfer.src.extent(step)
    if transfer.src.strides[0] - (first.stop - first.start) < hole:
        return [transfer.src.extent(transfer.lengths)]
    return [transfer.src.at((index, *others)).extent(step) for index in range(transfer.lengths[0])]
