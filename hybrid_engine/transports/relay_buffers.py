"""The memory of relay buffers (planning/relays.py): elastic buffers that the other ranks of the host can read.

the network --collective--> relay buffer on the carrier --shared memory, or local on the carrier--> destinations
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybrid_engine.memory.elastic import Handle, allocate_elastic, export_tensor
from hybrid_engine.planning.layout import Buffer, BufferId


class RelayBuffers:
    """Relay buffers as one rank knows them.

    Attributes:
        buffers: all that it has to do with (`ReshardPlan.relays`).
        tensors: those on this rank, flat, by name. They take memory from the first bucket on, until this object goes.
    """

    def __init__(self, rank: int, buffers: Mapping[BufferId, Buffer], device: torch.device | str = "cpu") -> None:
        """Raises DeviceMemoryError when the device has not enough memory."""
        self.buffers = dict(buffers)
        self._rank = rank
        self.tensors = {
            buffer_id.name: allocate_elastic(buffer.numel, getattr(torch, buffer.dtype), device, "relay")
            for buffer_id, buffer in sorted(self.buffers.items())
            if buffer_id.rank == rank
        }

    def handles(self) -> dict[BufferId, Handle]:
        """Of those on this rank, for the other ranks of its host; to be exchanged once.

        Without one a reader fails at its first bucket: let only hosts relay that have elastic memory
        (`memory.elastic.is_elastic`).
        """
        found = {BufferId(self._rank, name): export_tensor(flat) for name, flat in self.tensors.items()}
        return {buffer_id: handle for buffer_id, handle in found.items() if handle is not None}
