"""Inputs from which the transports of a rank are built, and the memory of relay buffers (planning/relays.py).

Relay buffers are elastic buffers that the other ranks of the host can read:

    network --collective--> relay buffer on the relay rank --shared memory, or local on the relay rank--> destinations
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hybrid_engine.memory.elastic import Handle, allocate_elastic, exported_buffer_of
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.planning.relays import NUM_SLOTS
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.records.layout import Buffer, BufferId
from hybrid_engine.transports.deltas import Deltas

Group = dist.ProcessGroup | RankGroup
"""NCCL's are torch's own, gloo's are not."""


@dataclass(frozen=True)
class TransportContext:
    """Inputs of a rank's transports.

    Attributes:
        rank: global rank of this process; transfers name global ranks.
        source_buffers: of all ranks; on the wire is `plan.wire_dtype` of a transfer's two buffers.
        handles: of buffers of this host's ranks, relay buffers among them, that the others can map (`export_handles`).
        group: for transfers that memory cannot carry, with all whom this rank meets there; None: there are none. Better
            one of its own: after a timeout it is dead.
        destination_buffers: of all ranks; one that is left out has the dtype of its source.
        relays: the relay buffers that this rank has to do with; None: none.
        notify_group: for `Transport.notify`, with the ranks of the host; default: `group`. Better gloo, since NCCL
            would deliver after all that is in flight.
        buckets: of the plan, in order: a transport may keep what a later one needs. Default: it keeps nothing.
        deltas: of messages; None: each goes whole. The same on all ranks.
        timeout: seconds that a bucket may wait for peers in all.
    """

    rank: int
    source_buffers: Mapping[BufferId, Buffer]
    handles: Mapping[BufferId, Handle]
    group: Group | None = None
    destination_buffers: Mapping[BufferId, Buffer] = field(default_factory=dict)
    relays: RelayBuffers | None = None
    notify_group: Group | None = None
    buckets: Sequence[Bucket] = ()
    deltas: Deltas | None = None
    timeout: float = 300.0


_ALIGNMENT = 512  # bytes


class RelayBuffers:
    """Relay buffers as one rank knows them.

    The other ranks of its host read those on it by their handles (`export_handles`), without which a reader fails at
    its first bucket: let only hosts relay that have elastic memory (`memory.elastic.is_elastic`).

    Attributes:
        buffers: all that it has to do with (`ReshardPlan.relays`).
        tensors: those on this rank, flat, by name; those of every NUM_SLOTS-th bucket over the same bytes. They take
            NUM_SLOTS times what the fullest bucket brings (once, if there is one bucket), until `release`.
    """

    def __init__(self, rank: int, buffers: Mapping[BufferId, Buffer], device: torch.device | str = "cpu") -> None:
        """Raises DeviceMemoryError when the device has not enough memory."""
        self.buffers = dict(buffers)
        own = {buffer_id.name: buffer for buffer_id, buffer in sorted(self.buffers.items()) if buffer_id.rank == rank}
        starts: dict[str, int] = {}
        ends: dict[str, int] = {}  # by bucket
        for name, buffer in own.items():
            starts[name] = ends.get(buffer.group, 0)
            ends[buffer.group] = -(-(starts[name] + buffer.nbytes) // _ALIGNMENT) * _ALIGNMENT
        slot_nbytes = max(ends.values(), default=0)
        slots = sorted({int(bucket) % NUM_SLOTS for bucket in ends})
        arena = self._arena = allocate_elastic(len(slots) * slot_nbytes, torch.uint8, device, "relay")
        self.tensors: dict[str, torch.Tensor] = {}
        for name, buffer in own.items():
            start = slots.index(int(buffer.group) % NUM_SLOTS) * slot_nbytes + starts[name]
            self.tensors[name] = arena[start : start + buffer.nbytes].view(getattr(torch, buffer.dtype))

    def release(self) -> int:
        """Give the memory back, under the same addresses and handles; returns its bytes. Nobody may read it."""
        buffer = exported_buffer_of(self._arena) if self.tensors else None
        if buffer is None:
            return 0
        nbytes = buffer.resident_nbytes()
        buffer.release()
        return nbytes

    def restore(self) -> None:
        """Have the memory again. Raises DeviceMemoryError."""
        if self.tensors and (buffer := exported_buffer_of(self._arena)) is not None:
            buffer.restore()
