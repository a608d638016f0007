"""Same host: the destination rank pulls straight from the source rank's mapped memory. No packing, no staging.

source rank                      destination rank
ElasticBuffer --export()--> handle --map_peer()--> flat view --strided copy, cast--> destination
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory.elastic import BufferHandle, map_peer
from hybrid_engine.planning.layout import BufferId
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.transports.copies import failure_at
from hybrid_engine.transports.pull import PullTransport


class SharedMemoryTransport(PullTransport):
    """Reads peers' elastic buffers. Peers are mapped on first use and stay mapped until `close`.

    Has no timeout, since it waits for nobody: a peer that ended is an error at its first use, and harmless after.
    """

    name = "shared_memory"

    def __init__(self, rank: int, handles: Mapping[BufferId, BufferHandle]) -> None:
        """`handles`: of the source buffers of all ranks (`export_handles`), exchanged once.

        When a rank allocates its buffers anew the handles are stale: make a new transport.
        """
        super().__init__(rank)
        self._handles = dict(handles)
        self._peers: dict[BufferId, torch.Tensor] = {}

    def close(self) -> None:
        """Unmap the peers; idempotent. A later `run` maps them again."""
        self._peers.clear()

    def _find_sources(
        self, bucket: int, pulls: Sequence[Transfer], source: Mapping[str, torch.Tensor]
    ) -> Mapping[BufferId, torch.Tensor]:
        for transfer in pulls:
            if transfer.src.buffer not in self._peers:
                self._peers[transfer.src.buffer] = self._map(bucket, transfer)
        return self._peers

    def _map(self, bucket: int, transfer: Transfer) -> torch.Tensor:
        buffer_id = transfer.src.buffer
        try:
            if buffer_id not in self._handles:
                raise TransportError(f"no handle of {buffer_id} was exchanged; export the buffer or use collective")
            return map_peer(self._handles[buffer_id])
        except (OSError, TransportError) as error:
            raise failure_at(self.name, bucket, "read", transfer, error, peer=transfer.src_rank) from error
