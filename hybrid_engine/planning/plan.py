"""The plan: every transfer of a reshard, in buckets.

    Bucket.transfers   source buffer -> destination, or -> relay buffer     a box crosses the network once for a host
    Bucket.fan_out     relay buffer  -> destinations on its host            once it has come

What is planned is what runs: transfers are as large as they can be (planning/coalescing.py). A relay buffer
(planning/relays.py) lies on one of the ranks that need what comes into it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Place


class Link(StrEnum):
    """Boundary that a transfer crosses, the nearest first; DEVICE: it stays on one, between two of its processes."""

    SELF = "self"
    DEVICE = "device"
    HOST = "host"
    NETWORK = "network"


def wire_dtype(source: str, destination: str) -> str:
    """The dtype in which elements cross a link: a message is cast before it is sent when the destination is narrower.

    Every count of bytes is elements times the bytes per element of this dtype.
    """
    return destination if DTYPE_NBYTES[destination] < DTYPE_NBYTES[source] else source


def rounding_faults(source: Mapping[str, str], destination: Mapping[str, str]) -> list[str]:
    """Of tensors' dtypes on the two sides, those pairs in which values would be rounded, or overflow.

    Of the dtype that most have in training: a few that it keeps wider are as the servers' model has them.
    """
    trained = Counter(source.values()).most_common(1)[0][0] if source else ""
    rounded: dict[str, list[str]] = {}
    for name, dtype in destination.items():
        if source.get(name) == trained != dtype and not (trained in _HALVES and dtype == "float32"):
            rounded.setdefault(dtype, []).append(name)
    return [
        f"{len(names)} tensors, e.g. {names[0]}, are {trained} in training and {dtype} in the servers: start these "
        f"with --dtype {trained}, or set generate_config.compress_reshard to have float32 weights cast"
        for dtype, names in rounded.items()
    ]


_HALVES = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy a box of `lengths` elements from `src` to `dst`.

    Attributes:
        tensor: what is copied, for messages: a canonical tensor, or the first and the last of several.
        lengths: per dim of the copy; strides of both places have as many entries.
        nbytes: what crosses the link: elements times bytes per element of the `wire_dtype`.
    """

    tensor: str
    lengths: tuple[int, ...]
    src: Place
    dst: Place
    nbytes: int
    link: Link

    @property
    def src_rank(self) -> int:
        return self.src.buffer.rank

    @property
    def dst_rank(self) -> int:
        return self.dst.buffer.rank

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Transfers that run together, after which their destination groups are complete and can be committed.

    Attributes:
        index: position in the plan.
        tensors: canonical tensors that all ranks have whole once this bucket has run; each is in one bucket only.
        transfers: of all ranks; in the plan of one rank those it is part of.
        groups: destination groups (`Buffer.group`) that are complete once this bucket has run.
        nbytes: the most bytes that any rank fills in this bucket, or frees when it has been sent.
        fan_out: from relay buffers, after `transfers` have filled them.
        least: bytes that each destination rank must receive for these tensors whatever the plan, by rank.
    """

    index: int
    tensors: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    groups: tuple[str, ...]
    nbytes: int
    fan_out: tuple[Transfer, ...] = ()
    least: Mapping[int, int] = field(default_factory=dict)

    def counted(self) -> Iterator[Transfer]:
        """Transfers whose bytes count at their destination: not a rank's reading of its own relay buffer, since the
        bytes counted when they came."""
        yield from self.transfers
        yield from (each for each in self.fan_out if each.link is not Link.SELF)

    def of_rank(self, rank: int) -> Bucket:
        """With the transfers that read from or write to this rank only, and its own least."""
        own, own_fan_out = (
            tuple(each for each in transfers if rank in (each.src_rank, each.dst_rank))
            for transfers in (self.transfers, self.fan_out)
        )
        least = {each: nbytes for each, nbytes in self.least.items() if each == rank}
        return replace(self, transfers=own, fan_out=own_fan_out, least=least)


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Bytes one rank reads in a reshard, by link, and those that any plan would make it receive.

    What comes to a host in a relay buffer counts as network where that buffer is, as host where it is read by others.

    Attributes:
        own: from memory of its device, its own or another rank's.
        lower_bound: what its device does not hold.
    """

    own: int
    host: int
    network: int
    lower_bound: int

    @property
    def received(self) -> int:
        """Bytes that come from other devices."""
        return self.host + self.network


@dataclass(frozen=True)
class ReshardPlan:
    """A complete reshard.

    Attributes:
        buckets: walked in order by every rank.
        bytes_by_rank: what each destination rank reads; in the plan of one rank what that one reads.
        unread: canonical tensors the training side holds and the inference side was offered but never reads
            (e.g. a head that is tied to the embedding), by name.
        fingerprint: digest of the two layouts and the hosts; a plan is valid only for layouts with this digest. Empty
            for a plan of computed layouts, which nothing runs.
        relays: the relay buffers, in the plan of one rank those it writes, holds or reads.
    """

    buckets: tuple[Bucket, ...]
    bytes_by_rank: Mapping[int, ByteCount]
    unread: tuple[str, ...]
    fingerprint: str = ""
    relays: Mapping[BufferId, Buffer] = field(default_factory=dict)

    def transfers(self) -> Iterable[Transfer]:
        """All transfers, in bucket order."""
        return (transfer for bucket in self.buckets for transfer in (*bucket.transfers, *bucket.fan_out))


def fingerprint_of(
    source_digest: str,
    destination_digest: str,
    hosts: Iterable[str],
    relaying_hosts: Iterable[str] = (),
    sharing: Iterable[int] = (),
) -> str:
    """The fingerprint of a plan between two layouts on these hosts; `sharing`: numbers of devices that ranks share."""
    parts = source_digest, destination_digest, *hosts, "", *sorted(relaying_hosts), *map(str, sharing)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
