"""What the transports of a rank are built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hybrid_engine.memory.elastic import Handle
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.records.layout import Buffer, BufferId
from hybrid_engine.transports.relay_buffers import RelayBuffers


@dataclass(frozen=True)
class Wiring:
    """The same on all ranks but for `rank` and `relays`. Raises ValueError for a timeout that is not positive.

    Attributes:
        rank: global rank of this process; transfers name global ranks.
        source_buffers: of all ranks; on the wire is `plan.wire_dtype` of a transfer's two buffers.
        handles: of the buffers of all ranks that others can map (`export_handles`), those of relay buffers too.
        group: for transfers that memory cannot carry; None: there are none. It holds all ranks of the transfers.
            Better one of its own: after a timeout it is dead.
        destination_buffers: of all ranks; one that is left out has the dtype of its source.
        relays: the relay buffers that this rank has to do with; None: none.
        tell_group: for `Transport.tell`; default: `group`. Better gloo, since NCCL would deliver after all that is in
            flight.
        buckets: of the plan, in order: a transport may keep what a later one needs. Default: it keeps nothing.
        timeout: seconds that a bucket may wait for peers in all.
    """

    rank: int
    source_buffers: Mapping[BufferId, Buffer]
    handles: Mapping[BufferId, Handle]
    group: dist.ProcessGroup | None = None
    destination_buffers: Mapping[BufferId, Buffer] = field(default_factory=dict)
    relays: RelayBuffers | None = None
    tell_group: dist.ProcessGroup | None = None
    buckets: Sequence[Bucket] = ()
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ValueError(f"timeout must be > 0 seconds, got {self.timeout}")
