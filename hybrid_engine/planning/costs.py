"""Costs of a part of a switch on one rank, which add up: seconds, counts, bytes by their way."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from hybrid_engine.planning.plan import Link


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

    def add(self, other: Costs) -> None:
        """Add the costs of a part."""
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds
        self.counts.update(other.counts)
        self.nbytes_by_link.update(other.nbytes_by_link)
        for name, by_peer in other.nbytes_by_peer.items():
            self.nbytes_by_peer[name].update(by_peer)
