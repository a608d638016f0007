"""Boxes that cross the network once for several places of a host, which read them out of a relay buffer there.

    sender --NETWORK--> relay buffer on the relay rank --HOST--> places of other ranks
                                                    --SELF--> places of the relay rank

A relay buffer belongs to one bucket, one sender, one relay rank and one set of readers, so all of these know everything
that comes into it and where it lies, whatever else their hosts receive: boxes follow one another, row-major, in the
plan's order. Relay ranks put the relay buffers of every NUM_SLOTS-th bucket into the same memory, so that those of one
bucket can be filled while another's are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Place
from hybrid_engine.records.regions import Region, contiguous_strides

NUM_SLOTS = 2


@dataclass(frozen=True, slots=True)
class RelayedTransfer:
    """One box on its way to several places of one host.

    Attributes:
        region: the box.
        src: where the sender has it.
        relay_rank: the rank it comes to, one of the readers.
        dtype: in which it crosses the network and lies in the relay buffer (`plan.wire_dtype`).
        places: where it goes.
    """

    region: Region
    src: Place
    relay_rank: int
    dtype: str
    places: tuple[Place, ...]

    def buffer(self, index: int) -> BufferId:
        """The relay buffer it comes into in bucket `index`."""
        readers = "+".join(str(rank) for rank in sorted({place.buffer.rank for place in self.places}))
        return BufferId(self.relay_rank, f"relay {index} of {self.dtype} from {self.src.buffer.rank} for {readers}")


def staging_nbytes(buckets: Iterable[Bucket], relays: Mapping[BufferId, Buffer], rank: int) -> int:
    """Memory of a rank for messages on their way to and from other hosts, with its relay buffers, without headers.

    On the device with NCCL, on the host with gloo. Each of NUM_SLOTS slots takes what its largest bucket needs; those
    of relay buffers are alike.
    """
    most: dict[tuple[int, str], int] = {}
    for bucket in buckets:
        across = [each for each in bucket.transfers if each.link is Link.NETWORK]
        for side, nbytes in (
            ("send", sum(each.nbytes for each in across if each.src_rank == rank)),
            ("receive", sum(each.nbytes for each in across if each.dst_rank == rank and each.dst.buffer not in relays)),
        ):
            slot = bucket.index % NUM_SLOTS, side
            most[slot] = max(most.get(slot, 0), nbytes)
    own: dict[str, int] = {}  # by bucket
    for buffer_id, buffer in relays.items():
        if buffer_id.rank == rank:
            own[buffer.group] = own.get(buffer.group, 0) + buffer.nbytes
    num_slots = len({int(bucket) % NUM_SLOTS for bucket in own})
    return sum(most.values()) + num_slots * max(own.values(), default=0)


@dataclass
class RelayPlanner:
    """Gives relayed transfers their places in relay buffers.

    Attributes:
        rank: transfers of this rank only are made; None: all.
        buffers: the relay buffers so far; a bucket's index is the group of its buffers.
    """

    rank: int | None = None
    buffers: dict[BufferId, Buffer] = field(default_factory=dict)

    def lay_out(self, index: int, relayed: Iterable[RelayedTransfer]) -> tuple[list[Transfer], list[Transfer]]:
        """The copies into relay buffers and out of them, for what is relayed in bucket `index`, in the plan's order.

        All that comes into the relay buffers concerned must be among `relayed`.
        """
        arriving: list[Transfer] = []
        fan_out: list[Transfer] = []
        ends: dict[BufferId, int] = {}
        for box in relayed:
            region, buffer = box.region, box.buffer(index)
            start = ends.get(buffer, 0)  # behind what came before it
            ends[buffer] = start + region.numel
            relay = Place(buffer, start, contiguous_strides(region.lengths))
            nbytes = region.numel * DTYPE_NBYTES[box.dtype]
            arriving.append(Transfer(region.tensor, region.lengths, box.src, relay, nbytes, Link.NETWORK))
            for place in box.places:
                link = Link.SELF if place.buffer.rank == box.relay_rank else Link.HOST
                fan_out.append(Transfer(region.tensor, region.lengths, relay, place, nbytes, link))
            self.buffers[buffer] = Buffer(ends[buffer], box.dtype, group=str(index), exported=True)
        return self._own(arriving), self._own(fan_out)

    def _own(self, transfers: list[Transfer]) -> list[Transfer]:
        if self.rank is None:
            return transfers
        return [each for each in transfers if self.rank in (each.src_rank, each.dst_rank)]
