"""The memory of relay buffers (planning/relays.py): elastic buffers that the other ranks of the host can read.

the network --collective--> relay buffer on the relay rank --shared memory, or local on the relay rank--> destinations
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybrid_engine.memory.elastic import Handle, allocate_elastic, export_tensor, exported_buffer_of
from hybrid_engine.planning.relays import NUM_SLOTS
from hybrid_engine.records.layout import Buffer, BufferId

_ALIGNMENT = 512  # bytes


class RelayBuffers:
    """Relay buffers as one rank knows them.

    Attributes:
        buffers: all that it has to do with (`ReshardPlan.relays`).
        tensors: those on this rank, flat, by name; those of every NUM_SLOTS-th bucket over the same bytes. They take
            NUM_SLOTS times what the fullest bucket brings (once, if there is one bucket), until `release`.
    """

    def __init__(self, rank: int, buffers: Mapping[BufferId, Buffer], device: torch.device | str = "cpu") -> None:
        """Raises DeviceMemoryError when the device has not enough memory."""
        self.buffers = dict(buffers)
        self._rank = rank
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

    def handles(self) -> dict[BufferId, Handle]:
        """Of those on this rank, for the other ranks of its host; to be exchanged once.

        Without one a reader fails at its first bucket: let only hosts relay that have elastic memory
        (`memory.elastic.is_elastic`).
        """
        found = {BufferId(self._rank, name): export_tensor(flat) for name, flat in self.tensors.items()}
        return {buffer_id: handle for buffer_id, handle in found.items() if handle is not None}
