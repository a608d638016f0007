"""Same host: the destination rank pulls straight from the source rank's mapped memory. No packing, no staging.

source rank                      destination rank
ElasticBuffer --export()--> handle --open_peer()--> peer --mapped()--> flat view --strided copy, cast--> destination
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory.elastic import DeviceHandle, Handle, Peer, open_peer
from hybrid_engine.planning.layout import BufferId, Extent
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.transports.copies import failure_at
from hybrid_engine.transports.pull import PullTransport


class SharedMemoryTransport(PullTransport):
    """Reads peers' elastic buffers. Peers are opened on first use, until `close`.

    Host pages stay mapped so long; device memory only while a bucket is read, so that its owner can release it.

    Has no timeout, since it waits for nobody: a peer that ended is an error at its first use, and harmless after.
    """

    name = "shared_memory"

    def __init__(self, rank: int, handles: Mapping[BufferId, Handle]) -> None:
        """`handles`: of the source buffers of all ranks (`export_handles`), exchanged once.

        When a rank allocates its buffers anew the handles are stale: make a new transport.
        """
        super().__init__(rank)
        self._handles = dict(handles)
        self._peers: dict[BufferId, Peer] = {}

    def close(self) -> None:
        """Unmap the peers; idempotent. A later `run` maps them again."""
        while self._peers:
            self._peers.popitem()[1].close()

    def _find_sources(
        self, bucket: int, pulls: Sequence[Transfer], source: Mapping[str, torch.Tensor], readings: ExitStack
    ) -> Mapping[BufferId, torch.Tensor]:
        by_buffer: dict[BufferId, list[Transfer]] = {}
        for transfer in pulls:
            by_buffer.setdefault(transfer.src.buffer, []).append(transfer)
        return {
            buffer_id: readings.enter_context(self._mapped(bucket, transfers))
            for buffer_id, transfers in by_buffer.items()
        }

    @contextmanager
    def _mapped(self, bucket: int, transfers: Sequence[Transfer]) -> Iterator[torch.Tensor]:
        """The flat source of transfers that read one buffer."""
        buffer_id = transfers[0].src.buffer
        try:
            if buffer_id not in self._handles:
                raise TransportError(f"no handle of {buffer_id} was exchanged; export the buffer or use collective")
            handle = self._handles[buffer_id]
            if buffer_id not in self._peers:
                self._peers[buffer_id] = open_peer(handle)
            bounds = astuple(source_extent(transfers)) if isinstance(handle, DeviceHandle) else ()
            reading = self._peers[buffer_id].mapped(*bounds)
            flat = reading.__enter__()
        except (OSError, TransportError) as error:
            raise failure_at(self.name, bucket, "read", transfers[0], error, peer=transfers[0].src_rank) from error
        with ExitStack() as stack:
            stack.push(reading)
            yield flat


def source_extent(transfers: Iterable[Transfer]) -> Extent:
    """Elements of the one source buffer that these transfers read: from the first to the last."""
    extents = [transfer.src.extent(transfer.lengths) for transfer in transfers]
    return Extent(min(extent.start for extent in extents), max(extent.stop for extent in extents))
