"""What the transports of a job are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from hybrid_engine.memory.elastic import Handle
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.relay_buffers import RelayBuffers


@dataclass(frozen=True)
class Wiring:
    """The same on all ranks but for `rank` and `relays`.

    Attributes:
        rank: global rank of this process.
        source_dtypes, destination_dtypes: `Buffer.dtype` of the buffers of all ranks.
        handles: of the buffers of all ranks that others can map, relay buffers among them.
        relays: the relay buffers that this rank has to do with.
        group: for transfers that memory cannot carry; None: there are none.
        tell_group: see `CollectiveTransport`.
        timeout: seconds that a bucket may wait for peers.
    """

    rank: int
    source_dtypes: Mapping[BufferId, str]
    destination_dtypes: Mapping[BufferId, str]
    handles: Mapping[BufferId, Handle]
    relays: RelayBuffers
    group: dist.ProcessGroup | None = None
    tell_group: dist.ProcessGroup | None = None
    timeout: float = 300.0
