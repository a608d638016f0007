"""Base class of transports, their inputs, and the memory of relay buffers (planning/relays.py).

Relay buffers are elastic buffers that the other ranks of the host can read:

    network --collective--> staging --> relay buffer on the relay rank
            --shared memory, or local on the relay rank--> destinations
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist

from hybrid_engine.memory.elastic import Handle, allocate_elastic, exported_buffer_of
from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.planning.plan import Costs, Transfer
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Buffer, BufferId
from hybrid_engine.transports.copies import FlatBuffers

Group = dist.ProcessGroup | RankGroup
"""Groups of torch for NCCL, groups of this package for gloo."""


# Bytes. Relay buffers of a bucket start at multiples of it.
_ALIGNMENT = 512


class RelayBuffers:
    """Relay buffers that one rank fills or reads.

    Other ranks of the host read this rank's buffers by handles (`export_handles`), so only hosts
    with elastic memory may relay.

    Attributes:
        buffers: relay buffers that this rank fills or reads (`ReshardPlan.relays`).
        tensors: flat tensors of the buffers on this rank, by name. The buckets share bytes, those
            of the fullest one, until `release`: a bucket is written only after all have read the
            one before.
    """

    def __init__(
        self,
        rank: int = 0,
        buffers: Mapping[BufferId, Buffer] = MappingProxyType({}),
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the buffers of `rank`. Raises DeviceMemoryError for lack of memory."""
        self.buffers = dict(buffers)
        local = {
            buffer_id.name: buffer
            for buffer_id, buffer in sorted(self.buffers.items())
            if buffer_id.rank == rank
        }
        # A buffer's group is the number of its bucket. Buffers of a bucket lie one after the other.
        # Buffers of 700 and 100 bytes start at 0 and 1,024. Every bucket starts at 0 again.
        starts: dict[str, int] = {}
        ends: dict[str, int] = {}
        for name, buffer in local.items():
            start = ends.get(buffer.group, 0)
            starts[name] = start
            ends[buffer.group] = round_up(start + buffer.nbytes, _ALIGNMENT)
        nbytes = max(ends.values(), default=0)
        arena = allocate_elastic(nbytes, torch.uint8, device, "relay")
        # None on devices without elastic memory, which keep the relay memory.
        self._memory = exported_buffer_of(arena)
        self.tensors: TensorDict = {}
        for name, buffer in local.items():
            flat = arena[starts[name] : starts[name] + buffer.nbytes]
            self.tensors[name] = flat.view(getattr(torch, buffer.dtype))

    def finish_writes(self) -> None:
        """Wait until the buffers are written: host threads, not streams, notify their readers."""
        for device in {flat.device for flat in self.tensors.values() if flat.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def release(self) -> int:
        """Free the memory until `restore`, and return its bytes; handles stay valid."""
        if self._memory is None:
            return 0
        nbytes = self._memory.resident_nbytes()
        self._memory.release()
        return nbytes

    def restore(self) -> None:
        """Allocate the memory again. Raises DeviceMemoryError."""
        if self._memory is not None:
            self._memory.restore()


@dataclass(frozen=True)
class TransportContext:
    """Inputs of a rank's transports.

    Attributes:
        rank: global rank of this process; transfers name global ranks.
        source_buffers: source buffers of all ranks. Messages have the `plan.wire_dtype` of a
            transfer's two buffers.
        handles: handles of the buffers, relay buffers included, that ranks of this host can map
            (`export_handles`).
        group: process group of its own for messages, with all peers of this rank; None: none.
        destination_buffers: those of all ranks. A missing one has the dtype of its source.
        relays: the relay buffers that this rank fills or reads.
        notify_group: group for `Transport.notify`, with the ranks of the host; None without relays.
            `group` with NCCL would deliver after all messages in flight.
        timeout: seconds that a bucket may wait for peers in total.
        sends_deltas: messages may be deltas of the previous ones, on all ranks; `group` is gloo's.
    """

    rank: int
    source_buffers: Mapping[BufferId, Buffer]
    handles: Mapping[BufferId, Handle]
    group: Group | None = None
    destination_buffers: Mapping[BufferId, Buffer] = field(default_factory=dict)
    relays: RelayBuffers = field(default_factory=RelayBuffers)
    notify_group: RankGroup | None = None
    timeout: float = 300.0
    sends_deltas: bool = False


class Transport:
    """Base class of transports of bytes, which do nothing but `run` unless they exchange messages.

    Every rank calls `run`, in the plan's order, for every bucket of which it has a share. Contract,
    checked for every transport by one test suite: after `run` returned on a rank, every transfer of
    the bucket whose `dst_rank` is that rank is complete. Source buffers may be overwritten only
    after all ranks of their host have returned (the caller fences), regardless of other hosts that
    read them. Failures raise TransportError and never hang: waits end after the transport's timeout
    (seconds).

    Classes of transports are registered in transports/router.py.
    """

    name: str

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._costs = Costs()

    def where(self, bucket: int, phase: str) -> str:
        """Return the beginning of an error's text."""
        return f"{self.name} transport, bucket {bucket}, phase {phase}"

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """Return why the transport cannot carry a transfer; "" if it can, as by default.

        `exported`: buffers that peers can map.
        """
        return ""

    @classmethod
    def connect(cls, context: TransportContext) -> Self | None:
        """Build this rank's transport, or return None if the job lacks a requirement.

        No collective.
        """
        return cls(context.rank)

    def meet(self, peers: Set[int]) -> None:
        """Connect to the ranks that exchange transfers with this one; all of them call it.

        Raises TransportError.
        """

    def begin(self, *, whole: bool) -> None:
        """Begin a fill, with the same argument on all ranks; see `TransportSet.begin`."""

    def prepare(self, transfers: Sequence[Transfer]) -> Any:
        """Return this rank's share of a bucket as the methods below take it; called once for each.

        `transfers`: those that read from or write to this rank, at least one.
        """
        return transfers

    def start(self, bucket: int, share: Any, source: FlatBuffers, reason: str = "") -> None:
        """Start the work that can precede `run` or `abandon` of a bucket. Optional and idempotent.

        At most `NUM_SLOTS` buckets are started but not run. If this rank failed elsewhere, `reason`
        is the cause, and nothing is read.
        """

    def run(self, bucket: int, share: Any, source: FlatBuffers, destination: FlatBuffers) -> None:
        """Carry out this rank's share of bucket `bucket`."""
        raise NotImplementedError

    def abandon(self, bucket: int, share: Any, reason: str) -> None:
        """Replace `run` on a rank that failed elsewhere.

        Peers that wait for this rank fail with `reason`.
        """

    def notify(
        self,
        bucket: int,
        phase: str,
        receivers: Iterable[int],
        senders: Iterable[int],
        reason: str,
    ) -> None:
        """Notify `receivers` that this rank has finished a phase of a bucket; wait for `senders`.

        `reason` is not empty if this rank failed. Raises PeerTransportError if a sender failed. A
        rank is a receiver on each of its senders. A transport without messages does nothing.
        """

    def take_costs(self) -> Costs:
        """Return seconds by phase, and counts, since the last call."""
        costs = self._costs
        self._costs = Costs()
        return costs

    def trim(self) -> Costs:
        """Free staging memory between fills; return the bytes of what is freed and what stays."""
        return Costs()

    def close(self) -> None:
        """Release mappings and staging memory. Idempotent."""
