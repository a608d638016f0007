"""`ReshardReport`, the result of one switch, and `SwitchTally`, the costs of which it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hybrid_engine.planning.plan import Costs, Link, link_seconds
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.transports.pull import LocalTransport


@dataclass(frozen=True)
class ReshardReport:
    """Results of one switch on this rank.

    If trainers and servers are separate processes, all of the byte counts of the fill are sums over
    all ranks.

    Attributes:
        direction: states before and after, such as "train->infer".
        version: number of optimizer steps the weights had taken.
        seconds: wall-clock time of the switch.
        seconds_by_phase: layout and plan (in the first report), start hooks, offload,
            onload, prepare, check, begin, fill (of which allocate, read, transfer, write, commit),
            release, resume; each includes its wait for the slowest rank.
            verify: digests, computed during the fill, and their comparison. compute: both sides'
            forward passes for `check_compute`.
        bytes_received: bytes from other ranks, except ranks on the same device.
        bytes_own: bytes copied inside this rank or its device.
        bytes_least: lower bound of `bytes_received` over all plans.
        bytes_across_hosts: part of `bytes_received` that came from other hosts. Bytes that several
            ranks of a host need reach one of them, and count there; the others read them from that
            rank.
        bytes_by_transport: transport -> bytes from other ranks.
        pairs_by_transport: transport -> number of ranks that sent them.
        bytes_offloaded, bytes_onloaded: device memory released, or copied to be released behind
            generation, and memory taken again. Gradients count, although they are dropped. What was
            not released need not be taken again.
        seconds_hidden, seconds_exposed: of the copies of optimizer state that the last switch left
            to go on behind training: time in which training went on, and time that it waited.
        peak_bytes: maximum of training and inference state on the device during the switch.
        bytes_suspended: memory of the trainer's communicators, released until the switch back.
        bytes_skipped: bytes not read because the inference side has them from an earlier switch;
            `bytes_least` does not include them.
        bytes_kept: inference weights that stay on the device during training, for later switches.
        messages_delta, messages_whole: messages that this rank sent with `incremental: delta`, as
            positions and values of changes, or whole. A delta's bytes count as received, so
            `bytes_received` may be below `bytes_least`.
        density: changed share of the 2-byte units that were compared for deltas; None if none were.
        bytes_of_copies: host memory of the copies that this rank keeps to compute deltas.
        gb_per_second: 10^9 bytes per second of the fill, received and own.
        percent_of_bound: least seconds of the fill's bytes on their links, in percent of its
            seconds. None without a fill, for separate processes, and if the speed of a link is not
            known (`planning.plan.DEVICE_GBPS`): that of the network, a CPU, another device.
        slowest_rank, slowest_seconds: rank whose own work in the fill took longest, and its
            seconds, with its waits for messages but not for the end of a phase. None without a
            fill.
        staging_bytes: memory of messages in flight, in addition to `peak_bytes`: on the device with
            NCCL, on the host with gloo.
        tensors_verified: canonical tensors that were compared.
        bytes_verified: bytes of both sides read on this rank for digests.
        bytes_of_digests: bytes of digests received.
    """

    direction: str
    version: int
    seconds: float
    seconds_by_phase: Mapping[str, float]
    bytes_received: int
    bytes_own: int
    bytes_least: int = 0
    bytes_offloaded: int = 0
    bytes_onloaded: int = 0
    peak_bytes: int = 0
    staging_bytes: int = 0
    bytes_across_hosts: int = 0
    seconds_hidden: float = 0.0
    seconds_exposed: float = 0.0
    bytes_by_transport: Mapping[str, int] = field(default_factory=dict)
    pairs_by_transport: Mapping[str, int] = field(default_factory=dict)
    tensors_verified: int = 0
    bytes_verified: int = 0
    bytes_of_digests: int = 0
    bytes_skipped: int = 0
    bytes_kept: int = 0
    bytes_suspended: int = 0
    messages_delta: int = 0
    messages_whole: int = 0
    density: float | None = None
    bytes_of_copies: int = 0
    gb_per_second: float = 0.0
    percent_of_bound: float | None = None
    slowest_rank: int | None = None
    slowest_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a metrics file."""
        return asdict(self)

    def __str__(self) -> str:
        text = (
            f"[Reshard] direction={self.direction} version={self.version} "
            f"duration={self.seconds:.3f} s, "
            f"transferred={self.bytes_received / 1e9:.6f} GB "
            f"(least possible {self.bytes_least / 1e9:.6f} GB), "
            f"peak={self.peak_bytes / 1e9:.6f} GB"
        )
        if self.slowest_rank is not None:
            known = "unknown" if self.percent_of_bound is None else f"{self.percent_of_bound:.0f} %"
            text += (
                f", {self.gb_per_second:.3f} GB/s in the fill ({known} of the bound), "
                f"slowest rank {self.slowest_rank} ({self.slowest_seconds:.3f} s)"
            )
        for name, nbytes in self.bytes_by_transport.items():
            text += f", {name} {nbytes / 1e9:.6f} GB of {self.pairs_by_transport[name]} ranks"
        if self.seconds_hidden or self.seconds_exposed:
            text += f", hidden {self.seconds_hidden:.3f} s, exposed {self.seconds_exposed:.3f} s"
        num_messages = self.messages_delta + self.messages_whole
        if num_messages:
            density = "" if self.density is None else f", {self.density:.4%} changed"
            text += f", deltas {self.messages_delta} of {num_messages} messages{density}"
        for name in ("skipped", "kept", "suspended"):
            if nbytes := getattr(self, f"bytes_{name}"):
                text += f", {name} {nbytes / 1e9:.6f} GB"
        if self.tensors_verified:
            text += (
                f", verified={self.tensors_verified} tensors, "
                f"{self.bytes_verified / 1e9:.6f} GB read, "
                f"{self.bytes_of_digests} bytes of digests "
                f"in {self.seconds_by_phase['verify']:.3f} s"
            )
        return text


# In 63 bits there is room for 2**43 microseconds, 101 days, and a million ranks.
SLOWEST_RADIX = 2**20
"""Microseconds of a rank times this, plus its number, has the slowest rank as its maximum."""


_RankCosts = tuple[dict[str, int], dict[Link, int], dict[str, dict[int, int]]]


def costs_of_all(costs: Costs, agreement: Agreement) -> Costs:
    """Return the seconds of `costs`, with the bytes and counts of all ranks. Collective.

    In `nbytes_by_peer` the keys number pairs of ranks, so the number of keys is the number of
    pairs.
    """
    counted = (costs.counts, costs.nbytes_by_link, costs.nbytes_by_peer)
    by_rank = agreement.gather(counted, _RankCosts, "bytes of all ranks")
    total = Costs(costs.seconds)
    for rank, (counts, by_link, by_name) in enumerate(by_rank):
        total.counts.update(counts)
        total.nbytes_by_link.update(by_link)
        for name, by_peer in by_name.items():
            for peer, nbytes in by_peer.items():
                # Of 8 ranks, what rank 2 received from rank 5 has key 21.
                total.nbytes_by_peer[name][rank * len(by_rank) + peer] = nbytes
    return total


@dataclass(slots=True)
class SwitchTally(Costs):
    """Costs of a running switch on this rank.

    Attributes:
        speed: speed of the fill, by field of `ReshardReport`.
    """

    speed: dict[str, Any] = field(default_factory=dict)

    def add_fill(self, fill: Costs, gbps: Mapping[Link, float], slowest: int) -> None:
        """Add the fill of this switch; there is at most one.

        Args:
            fill: the fill, after its phase.
            gbps: known speeds of links (`planning.plan.DEVICE_GBPS`).
            slowest: see `SLOWEST_RADIX`.
        """
        self.add(fill)
        seconds = self.seconds["fill"]
        microseconds, rank = divmod(slowest, SLOWEST_RADIX)
        used = {link: nbytes for link, nbytes in fill.nbytes_by_link.items() if nbytes}
        is_known = used.keys() <= gbps.keys()
        self.speed = {
            "gb_per_second": sum(used.values()) / seconds / 1e9,
            "percent_of_bound": 100 * link_seconds(used, gbps) / seconds if is_known else None,
            "slowest_rank": rank,
            "slowest_seconds": microseconds / 1e6,
        }

    def report(
        self, direction: str, version: int, seconds: float, behind: tuple[float, float]
    ) -> ReshardReport:
        """Build the report of the switch; `behind`: hidden and exposed seconds."""
        counts = dict(self.counts)
        num_compared = counts.pop("words_compared", 0)
        num_changed = counts.pop("words_changed", 0)
        by_link = self.nbytes_by_link
        # The local transport copies within a device, which counts as own bytes.
        from_others = {
            name: by_peer
            for name, by_peer in self.nbytes_by_peer.items()
            if by_peer and name != LocalTransport.name
        }
        return ReshardReport(
            direction=direction,
            version=version,
            seconds=seconds,
            seconds_by_phase=dict(self.seconds),
            bytes_received=by_link[Link.HOST] + by_link[Link.NETWORK],
            bytes_own=by_link[Link.SELF] + by_link[Link.DEVICE],
            seconds_hidden=behind[0],
            seconds_exposed=behind[1],
            bytes_across_hosts=by_link[Link.NETWORK],
            bytes_by_transport={
                name: sum(by_peer.values()) for name, by_peer in from_others.items()
            },
            pairs_by_transport={name: len(by_peer) for name, by_peer in from_others.items()},
            density=num_changed / num_compared if num_compared else None,
            **counts,
            **self.speed,
        )
