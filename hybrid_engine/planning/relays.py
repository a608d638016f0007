"""Relay buffers: boxes cross the network once per host, and several places read them there.

    sender --NETWORK--> relay buffer on the relay rank --HOST--> places of other ranks
                                                    --SELF--> places of the relay rank

A relay buffer belongs to one bucket, one sender, one relay rank and one set of readers. Each of
these ranks therefore knows everything that enters it and at which offset, independently of other
bytes for its host: boxes follow one another, row-major, in the plan's order. A relay rank puts the
relay buffers of all buckets into the same memory, one bucket after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Place
from hybrid_engine.records.regions import Region, contiguous_strides

NUM_SLOTS = 2
"""Buckets whose messages are in flight together."""


@dataclass(frozen=True, slots=True)
class RelayedTransfer:
    """A box that several places of one host read from a relay buffer.

    Attributes:
        region: the box.
        src: place of the box on the sender.
        relay_rank: rank that holds the relay buffer, one of the readers.
        dtype: dtype on the network and in the relay buffer (`plan.wire_dtype`).
        places: destinations of the box.
    """

    region: Region
    src: Place
    relay_rank: int
    dtype: str
    places: tuple[Place, ...]

    def buffer(self, index: int) -> BufferId:
        """Return the relay buffer that receives the box in bucket `index`."""
        ranks = sorted({place.buffer.rank for place in self.places})
        readers = "+".join(map(str, ranks))
        sender = self.src.buffer.rank
        return BufferId(
            self.relay_rank,
            f"relay {index} of {self.dtype} from {sender} for {readers}",
        )


def staging_nbytes(
    buckets: Iterable[Bucket],
    relays: Mapping[BufferId, Buffer],
    rank: int,
) -> int:
    """Return the bytes that a rank needs for network messages and its relay buffers.

    Message headers are not included. The memory is on the device with NCCL and on the host with
    gloo. Each of NUM_SLOTS message slots is as large as its largest bucket requires, and so are the
    relay buffers.
    """
    slots: dict[tuple[int, str], int] = {}
    for bucket in buckets:
        sent = 0
        received = 0
        for transfer in bucket.transfers:
            if transfer.link is not Link.NETWORK:
                continue
            if transfer.src_rank == rank:
                sent += transfer.nbytes
            if transfer.dst_rank == rank:
                received += transfer.nbytes
        for side, nbytes in (("send", sent), ("receive", received)):
            # Message slots are separate for the two directions: a rank sends from one while it
            # receives into the other.
            slot = (bucket.index % NUM_SLOTS, side)
            slots[slot] = max(slots.get(slot, 0), nbytes)
    relayed: dict[str, int] = {}  # bytes in this rank's relay buffers, by bucket
    for buffer_id, buffer in relays.items():
        if buffer_id.rank == rank:
            relayed[buffer.group] = relayed.get(buffer.group, 0) + buffer.nbytes
    return sum(slots.values()) + max(relayed.values(), default=0)


@dataclass
class RelayPlanner:
    """Assignment of relayed transfers to places in relay buffers.

    Attributes:
        rank: return only the transfers of this rank; None: of all ranks.
        buffers: relay buffers so far. The group of a relay buffer is its bucket's index.
    """

    rank: int | None
    buffers: dict[BufferId, Buffer] = field(default_factory=dict)

    def lay_out(
        self,
        index: int,
        relayed: Iterable[RelayedTransfer],
    ) -> tuple[list[Transfer], list[Transfer]]:
        """Return the copies into and out of the relay buffers of bucket `index`.

        Args:
            index: the bucket's position in the plan.
            relayed: everything that enters the relay buffers concerned, in the plan's order.
                Offsets are assigned in this order, so it must be complete.
        """
        arriving: list[Transfer] = []
        fan_out: list[Transfer] = []
        ends: dict[BufferId, int] = {}  # elements laid out so far, by relay buffer
        for box in relayed:
            region = box.region
            buffer = box.buffer(index)
            start = ends.get(buffer, 0)
            ends[buffer] = start + region.numel
            relay = Place(buffer, start, contiguous_strides(region.lengths))
            nbytes = region.numel * DTYPE_NBYTES[box.dtype]
            arriving.append(
                Transfer(region.tensor, region.lengths, box.src, relay, nbytes, Link.NETWORK),
            )
            for place in box.places:
                link = Link.SELF if place.buffer.rank == box.relay_rank else Link.HOST
                fan_out.append(
                    Transfer(region.tensor, region.lengths, relay, place, nbytes, link),
                )
            # Replaced at each box; the last one has the whole length.
            self.buffers[buffer] = Buffer(
                ends[buffer],
                box.dtype,
                group=str(index),
                exported=True,
            )
        return self._of_rank(arriving), self._of_rank(fan_out)

    def _of_rank(self, transfers: list[Transfer]) -> list[Transfer]:
        if self.rank is None:
            return transfers
        return [
            transfer
            for transfer in transfers
            if self.rank in (transfer.src_rank, transfer.dst_rank)
        ]
