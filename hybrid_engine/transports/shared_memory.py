"""Same host: the destination rank pulls straight from the source rank's mapped memory. No packing, no staging.

    source rank                      destination rank
    ElasticBuffer --export()--> handle --map_peer()--> flat view --strided copy, cast--> destination

The source rank does nothing while it is read. So the caller fences: before the first bucket, until all sources hold
final values; after the last one that reads a buffer, before its owner overwrites or releases it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory.elastic import BufferHandle, map_peer
from hybrid_engine.planning.layout import BufferId
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.transports.copies import PhaseClock, copy_straight, failure_at


class SharedMemoryTransport:
    """Reads peers' elastic buffers. Peers are mapped on first use and stay mapped until `close`.

    Waits for nobody, hence has no timeout: a peer that ended is an error at its first use, and harmless after.
    """

    name = "shared_memory"

    def __init__(self, rank: int, handles: Mapping[BufferId, BufferHandle]) -> None:
        """`handles`: of the source buffers of all ranks (`export_handles`), exchanged once.

        When a rank allocates its buffers anew the handles are stale: make a new transport.
        """
        self.rank = rank
        self._handles = dict(handles)
        self._peers: dict[BufferId, torch.Tensor] = {}
        self.clock = PhaseClock()

    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Pull the transfers that write to this rank; see `ports.Transport`. `source` is not needed."""
        pulls = [transfer for transfer in transfers if transfer.dst_rank == self.rank]
        with self.clock.phase("read"):
            for transfer in pulls:
                self._map(bucket, transfer)
        with self.clock.phase("transfer"):
            copy_straight(self.name, bucket, pulls, lambda transfer: self._peers[transfer.src.buffer], destination)

    def _map(self, bucket: int, transfer: Transfer) -> None:
        buffer_id = transfer.src.buffer
        if buffer_id in self._peers:
            return
        try:
            if buffer_id not in self._handles:
                raise TransportError(f"no handle of {buffer_id} was exchanged; export the buffer or use collective")
            self._peers[buffer_id] = map_peer(self._handles[buffer_id])
        except (OSError, TransportError) as error:
            raise failure_at(self.name, bucket, "read", transfer, error, peer=transfer.src_rank) from error

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Nothing to do: no rank waits for another."""

    def close(self) -> None:
        """Unmap the peers; idempotent. A later `run` maps them again."""
        self._peers.clear()
