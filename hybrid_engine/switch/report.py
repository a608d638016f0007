"""What a switch did: `ReshardReport`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReshardReport:
    """What one switch did on this rank.

    Attributes:
        direction: "train->infer" and the like.
        version: optimizer steps the weights had taken.
        seconds: wall-clock time of the whole switch.
        seconds_by_phase: layout and plan (in the first report), start hooks, survey (of the device), offload, onload,
            prepare, check, fill (of which allocate, read, transfer, write, commit), release, resume; each with its wait
            for the slowest rank.
        bytes_received: from other ranks. bytes_own: copied inside this rank. bytes_least: no plan receives less.
        bytes_across_hosts: those received from ranks of other hosts. What several ranks of a host need of them comes to
            one of these and counts there; the others have it from that rank.
        bytes_by_transport: received, by transport. pairs_by_transport: ranks it was received from.
        bytes_offloaded, bytes_onloaded: between device and host; with what was prefetched since the last switch.
        peak_bytes: training and inference state on the device at once, at its highest during the switch.
        staging_bytes: beside it, memory of messages on their way: on the device with NCCL, on the host with gloo.
    """

    direction: str
    version: int
    seconds: float
    seconds_by_phase: Mapping[str, float]
    bytes_received: int
    bytes_own: int
    bytes_least: int
    bytes_offloaded: int
    bytes_onloaded: int
    peak_bytes: int
    staging_bytes: int = 0
    bytes_across_hosts: int = 0
    bytes_by_transport: Mapping[str, int] = field(default_factory=dict)
    pairs_by_transport: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a metrics file."""
        return asdict(self)

    def __str__(self) -> str:
        rate = self.bytes_received / self.seconds / 1e9 if self.seconds else 0.0
        ways = "".join(
            f", {name} {nbytes / 1e9:.6f} GB of {self.pairs_by_transport[name]} ranks"
            for name, nbytes in self.bytes_by_transport.items()
        )
        return (
            f"[Reshard] direction={self.direction} version={self.version} duration={self.seconds:.3f} s, "
            f"transferred={self.bytes_received / 1e9:.6f} GB (least possible {self.bytes_least / 1e9:.6f} GB), "
            f"{rate:.3f} GB/s, peak={self.peak_bytes / 1e9:.6f} GB{ways}"
        )
