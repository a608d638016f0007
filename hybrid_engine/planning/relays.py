"""Boxes that cross the network once for several places of a host, which read them out of a relay buffer there.

    sender --NETWORK--> relay buffer on the carrier --HOST--> places of other ranks
                                                    --SELF--> places of the carrier

A relay buffer belongs to one sender, one carrier and one set of readers, so all who have to do with it know everything
that comes into it and where it lies, whatever else their hosts receive. It is filled anew in every bucket: boxes
follow one another, row-major, in the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hybrid_engine.planning.layout import DTYPE_NBYTES, Buffer, BufferId, Place
from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.planning.regions import Region, contiguous_strides


@dataclass(frozen=True, slots=True)
class Shipment:
    """One box on its way to several places of one host.

    Attributes:
        region: the box.
        src: where the sender has it.
        carrier: the rank it comes to, one of the readers.
        dtype: in which it crosses the network and lies in the relay buffer.
        places: where it goes; itemsizes: bytes per element there.
    """

    region: Region
    src: Place
    carrier: int
    dtype: str
    places: tuple[Place, ...]
    itemsizes: tuple[int, ...]

    @property
    def buffer(self) -> BufferId:
        """The relay buffer it comes into."""
        readers = "+".join(str(rank) for rank in sorted({place.buffer.rank for place in self.places}))
        return BufferId(self.carrier, f"relay of {self.dtype} from {self.src.buffer.rank} for {readers}")


def wire_dtype(source: str, destinations: Iterable[str]) -> str:
    """In which dtype elements cross to places of these dtypes: a narrower one, unless the narrower ones differ."""
    narrowest = {other if DTYPE_NBYTES[other] < DTYPE_NBYTES[source] else source for other in destinations}
    return narrowest.pop() if len(narrowest) == 1 else source


@dataclass
class RelayPlanner:
    """Gives shipments their places in relay buffers.

    Attributes:
        rank: transfers of this rank only are made; None: all.
        buffers: the relay buffers so far, as large as their fullest bucket.
    """

    rank: int | None = None
    buffers: dict[BufferId, Buffer] = field(default_factory=dict)

    def lay_out(self, shipments: Iterable[Shipment]) -> tuple[list[Transfer], list[Transfer]]:
        """The transfers of one bucket's shipments, in the plan's order: into relay buffers, and out of them.

        All shipments of the relay buffers concerned must be among them.
        """
        arriving: list[Transfer] = []
        fan_out: list[Transfer] = []
        ends: dict[BufferId, int] = {}
        for shipment in shipments:
            region, buffer = shipment.region, shipment.buffer
            start = ends.get(buffer, 0)
            ends[buffer] = start + region.numel
            relay = Place(buffer, start, contiguous_strides(region.lengths))
            itemsize = DTYPE_NBYTES[shipment.dtype]
            nbytes = region.numel * itemsize
            arriving.append(Transfer(region.tensor, region.lengths, shipment.src, relay, nbytes, Link.NETWORK))
            for place, own_itemsize in zip(shipment.places, shipment.itemsizes, strict=True):
                nbytes = region.numel * min(itemsize, own_itemsize)
                link = Link.SELF if place.buffer.rank == shipment.carrier else Link.HOST
                fan_out.append(Transfer(region.tensor, region.lengths, relay, place, nbytes, link))
            numel = max(ends[buffer], self.buffers[buffer].numel if buffer in self.buffers else 0)
            self.buffers[buffer] = Buffer(numel, shipment.dtype, exported=True)
        return self._own(arriving), self._own(fan_out)

    def _own(self, transfers: list[Transfer]) -> list[Transfer]:
        if self.rank is None:
            return transfers
        return [each for each in transfers if self.rank in (each.src_rank, each.dst_rank)]
