"""The reshard plan: every transfer, grouped in buckets.

    Bucket.transfers   source buffer -> destination or relay buffer    first
    Bucket.fan_out     relay buffer  -> destinations on its host       after all of `transfers`

A box crosses the network once per host. Transports execute the plan without changing it: transfers
are already as large as possible (planning/coalescing.py). A relay buffer (planning/relays.py)
belongs to one of the ranks that need its contents. `Costs` counts what carrying it out took.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Place
from hybrid_engine.records.regions import Shape
from hybrid_engine.tracing import span


class Link(StrEnum):
    """Boundary that a transfer crosses, nearest first.

    DEVICE is a transfer between two processes that share one device.
    """

    SELF = "self"
    DEVICE = "device"
    HOST = "host"
    NETWORK = "network"


DEVICE_GBPS: Mapping[str, Mapping[Link, float]] = {
    # Two processes on one device copy within one memory, so DEVICE is as fast as SELF.
    "NVIDIA H100 80GB HBM3": {Link.SELF: 1495, Link.DEVICE: 1495, Link.HOST: 450},
    "NVIDIA H200": {Link.SELF: 2145, Link.DEVICE: 2145, Link.HOST: 450},
}
"""Name of a device in torch -> 10^9 bytes per second in each direction, each byte counted once.

Measured, but for NVLink's nominal rate. A device does not tell the speed of its host's network."""


def link_seconds(nbytes: Mapping[Link, Any], gbps: Mapping[Link, float]) -> Any:
    """Return the seconds of bytes by link, one link after another; numbers or arrays."""
    return sum(moved / gbps[link] for link, moved in nbytes.items()) / 1e9


def wire_dtype(source: str, destination: str) -> str:
    """Return the dtype in which elements cross a link: the narrower of the two, or `source`.

    A sender casts before it sends if the destination is narrower. Every count of bytes is the
    number of elements times the bytes per element of this dtype.
    """
    # float32 to bfloat16 crosses as bfloat16, cast before the link; bfloat16 to float32 crosses as
    # bfloat16 too, cast on arrival. At equal width there is nothing to save, so the receiver casts.
    is_narrower = DTYPE_NBYTES[destination] < DTYPE_NBYTES[source]
    return destination if is_narrower else source


_HALF_PRECISION = frozenset({"bfloat16", "float16"})


def rounding_faults(source: Mapping[str, str], destination: Mapping[str, str]) -> list[str]:
    """Return a fault for each pair of dtypes that would round or overflow values.

    Args:
        source: training dtype of each tensor, by name.
        destination: server dtype of each tensor, by name.

    Only tensors in the most common training dtype are checked. The few that training keeps in a
    wider dtype (such as a router's bias) follow the servers' model.
    """
    if not source:
        return []
    # Of 300 bfloat16 weights and 2 float32 router biases, the trained dtype is bfloat16.
    trained = Counter(source.values()).most_common(1)[0][0]
    rounded: dict[str, list[str]] = {}
    for name, dtype in destination.items():
        if source.get(name) != trained or dtype == trained:
            continue
        # float32 represents every bfloat16 and float16 value exactly.
        if trained in _HALF_PRECISION and dtype == "float32":
            continue
        rounded.setdefault(dtype, []).append(name)
    return [
        f"{len(names)} tensors, e.g. {names[0]}, are {trained} in training and {dtype} in the "
        f"servers: start the servers with --dtype {trained}, or set "
        "generate_config.compress_reshard to have float32 weights cast"
        for dtype, names in rounded.items()
    ]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of a box of `lengths` elements from `src` to `dst`.

    Attributes:
        tensor: name for messages: a canonical tensor, or "first … last" of several.
        lengths: elements per dim of the copy. Both places have as many strides.
        src: where the box is read.
        dst: where the box is written.
        nbytes: bytes that cross the link: elements times bytes per element of `wire_dtype`.
        link: boundary that the copy crosses.
    """

    tensor: str
    lengths: Shape
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
    """Transfers that run together and complete their destination groups.

    Attributes:
        index: position in the plan.
        tensors: canonical tensors that are complete on all ranks after this bucket. Each tensor
            is in exactly one bucket.
        transfers: transfers of all ranks; in a plan of one rank, its transfers only.
        groups: destination groups (`Buffer.group`) that are complete after this bucket and can
            be committed.
        nbytes: largest number of bytes that any rank fills in this bucket, or frees after it.
        fan_out: transfers out of relay buffers. They run after `transfers`.
        least: lower bound of the bytes that each destination rank receives for these tensors
            under any plan, by rank.
    """

    index: int
    tensors: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    groups: tuple[str, ...]
    nbytes: int
    fan_out: tuple[Transfer, ...] = ()
    least: Mapping[int, int] = field(default_factory=dict)

    def counted(self) -> Iterator[Transfer]:
        """Yield the transfers that count at their destination.

        A rank that reads its own relay buffer is left out: the bytes were counted on arrival.
        """
        yield from self.transfers
        for transfer in self.fan_out:
            # A transfer inside `fan_out` over SELF has the relay rank at both ends.
            if transfer.link is not Link.SELF:
                yield transfer

    def of_rank(self, rank: int) -> Bucket:
        """Return this bucket reduced to the transfers and the lower bound of one rank."""

        def involving(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
            return tuple(
                transfer for transfer in transfers if rank in (transfer.src_rank, transfer.dst_rank)
            )

        return replace(
            self,
            transfers=involving(self.transfers),
            fan_out=involving(self.fan_out),
            least={rank: self.least[rank]} if rank in self.least else {},
        )


@dataclass(frozen=True)
class ReshardPlan:
    """A complete reshard.

    Attributes:
        buckets: executed in order by every rank.
        unread: names of canonical tensors that training holds and inference was offered but
            never reads, such as a head that is tied to the embedding.
        fingerprint: digest of the two layouts and the hosts. A plan is valid only for layouts
            with this digest. Empty for a plan of computed layouts, which is never executed.
        relays: the relay buffers; in a plan of one rank, those it writes, holds or reads.
    """

    buckets: tuple[Bucket, ...]
    unread: tuple[str, ...]
    fingerprint: str = ""
    relays: Mapping[BufferId, Buffer] = field(default_factory=dict)

    def transfers(self) -> Iterable[Transfer]:
        """Yield all transfers in bucket order."""
        for bucket in self.buckets:
            yield from bucket.transfers
            yield from bucket.fan_out


def fingerprint_of(
    source_digest: str,
    destination_digest: str,
    hosts: Iterable[str],
    relaying_hosts: Iterable[str],
    sharing: Iterable[int],
) -> str:
    """Return the fingerprint of a plan between two layouts, as a hexadecimal SHA-256.

    Args:
        source_digest: fingerprint of the training side.
        destination_digest: fingerprint of the inference side.
        hosts: host name of every rank.
        relaying_hosts: hosts that use relay buffers, in any order.
        sharing: device number of every rank, if ranks share devices.
    """
    parts = [source_digest, destination_digest, *hosts]
    # The empty part separates the host of every rank from the relaying hosts.
    parts += ["", *sorted(relaying_hosts), *map(str, sharing)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(slots=True)
class Costs:
    """Costs of a bucket, of a fill, or of a switch.

    Attributes:
        seconds: by phase. Of a bucket: read (locate the sources, pack them), transfer (between
            ranks, or straight from source to destination), write (unpack). On CUDA queued work
            counts to the next phase that waits.
        counts: bytes and numbers, by the field of `ReshardReport` that has them, and
            "words_compared" and "words_changed", by which deltas were computed.
        nbytes_by_link: bytes read, by the link that they crossed. Bytes over HOST and NETWORK came
            from other devices.
        nbytes_by_peer: the same bytes by transport name and source rank. Relayed bytes count to the
            relay rank, and from there to each other reader; a message that came as a delta with its
            own. Bytes of a pull that casts count in the narrower dtype, like those of a message.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    nbytes_by_link: Counter[Link] = field(default_factory=Counter)
    nbytes_by_peer: defaultdict[str, Counter[int]] = field(
        default_factory=lambda: defaultdict(Counter)
    )

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record a span, and add its duration to a phase, which may occur again, or raise."""
        start = time.perf_counter()
        try:
            with span(phase):
                yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def add(self, other: Costs) -> None:
        """Add the costs of a part."""
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds
        self.counts.update(other.counts)
        self.nbytes_by_link.update(other.nbytes_by_link)
        for name, by_peer in other.nbytes_by_peer.items():
            self.nbytes_by_peer[name].update(by_peer)
