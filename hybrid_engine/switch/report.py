"""`ReshardReport` of a switch, the tally it is made from, and a comparison of device memory with the memory plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from hybrid_engine.layouts.memory import MemoryPlan
from hybrid_engine.planning.plan import Link
from hybrid_engine.switch.verifier import VerifyReport
from hybrid_engine.switch.weight_container import FillReport
from hybrid_engine.tracing import span
from hybrid_engine.transports.pull import LocalTransport

logger = logging.getLogger("hybrid_engine")


@dataclass(frozen=True)
class ReshardReport:
    """Results of one switch on this rank.

    Attributes:
        direction: "train->infer" and the like.
        version: optimizer steps the weights had taken.
        seconds: wall-clock time of the whole switch.
        seconds_by_phase: layout and plan (in the first report), start hooks, survey (of the device), offload, onload,
            prepare, check, begin, fill (of which allocate, read, transfer, write, commit), release, resume; each with
            its wait for the slowest rank. verify: digests, made during the fill, and their comparison. compute: what
            both sides took for the log-probabilities of `check_compute`.
        bytes_received: from other ranks, but for those on the same device. bytes_own: copied inside this rank, or its
            device. bytes_least: no plan receives less.
        bytes_across_hosts: those received from ranks of other hosts. What several ranks of a host need of them comes to
            one of these and counts there; the others have it from that rank.
        bytes_by_transport: from other ranks, by transport. pairs_by_transport: which ranks.
        bytes_offloaded, bytes_onloaded: of the device, given back and taken again, with what was prefetched since the
            last switch. Gradients are among them, which are dropped; all else is copied to the host and back.
        bytes_prefetched: of bytes_onloaded, what came ahead of the switch.
        seconds_hidden: for which copies between device and host went on beside other work of this rank.
            Where trainers and servers are processes of their own, all of these are of all ranks together.
        peak_bytes: training and inference state on the device at once, at its highest during the switch.
        bytes_skipped: not read, for the inference side has them from an earlier switch; bytes_least is for the others.
        bytes_kept: inference weights that stay on the device while it trains, for switches to come.
        messages_delta, messages_whole: that this rank sent with `incremental: delta`: positions and values of what
            changed, or all; of a delta the bytes received are its own, so they may be less than bytes_least. density:
            share of what was compared for that, in units of two bytes, that had changed; None where nothing was.
            bytes_of_copies: host memory that this rank's ends of messages keep to compare with.
        staging_bytes: beside it, memory of messages in flight: on the device with NCCL, on the host with gloo.
        tensors_verified: canonical tensors that were compared. bytes_verified: read for that, of both sides on this
            rank. bytes_of_digests: received for that.
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
    bytes_prefetched: int = 0
    seconds_hidden: float = 0.0
    bytes_by_transport: Mapping[str, int] = field(default_factory=dict)
    pairs_by_transport: Mapping[str, int] = field(default_factory=dict)
    tensors_verified: int = 0
    bytes_verified: int = 0
    bytes_of_digests: int = 0
    bytes_skipped: int = 0
    bytes_kept: int = 0
    messages_delta: int = 0
    messages_whole: int = 0
    density: float | None = None
    bytes_of_copies: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a metrics file."""
        return asdict(self)

    def __str__(self) -> str:
        rate = self.bytes_received / self.seconds / 1e9 if self.seconds else 0.0
        ways = "".join(
            f", {name} {nbytes / 1e9:.6f} GB of {self.pairs_by_transport[name]} ranks"
            for name, nbytes in self.bytes_by_transport.items()
        )
        if self.bytes_prefetched:
            ways += f", prefetched {self.bytes_prefetched / 1e9:.6f} GB"
        if self.seconds_hidden:
            ways += f", hidden {self.seconds_hidden:.3f} s"
        verified = ""
        if self.tensors_verified:
            verified = (
                f", verified={self.tensors_verified} tensors, {self.bytes_verified / 1e9:.6f} GB read, "
                f"{self.bytes_of_digests} bytes of digests in {self.seconds_by_phase['verify']:.3f} s"
            )
        if self.messages_delta + self.messages_whole:
            density = "" if self.density is None else f", {self.density:.4%} changed"
            ways += f", deltas {self.messages_delta} of {self.messages_delta + self.messages_whole} messages{density}"
        unsent = (("skipped", self.bytes_skipped), ("kept", self.bytes_kept))
        ways += "".join(f", {what} {nbytes / 1e9:.6f} GB" for what, nbytes in unsent if nbytes)
        return (
            f"[Reshard] direction={self.direction} version={self.version} duration={self.seconds:.3f} s, "
            f"transferred={self.bytes_received / 1e9:.6f} GB (least possible {self.bytes_least / 1e9:.6f} GB), "
            f"{rate:.3f} GB/s, peak={self.peak_bytes / 1e9:.6f} GB{ways}{verified}"
        )


@dataclass
class SwitchTally:
    """Sums of a running switch on this rank; attributes as in `ReshardReport`."""

    seconds: dict[str, float] = field(default_factory=dict)
    offloaded: int = 0
    onloaded: int = 0
    prefetched: int = 0
    seconds_hidden: float = 0.0
    peak: int = 0
    kept: int = 0
    fill: FillReport | None = None
    verified: VerifyReport | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time of the block, unless it fails; a phase may come several times."""
        started = time.perf_counter()
        with span(phase):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def add_fill(self, fill: FillReport) -> None:
        """There is at most one."""
        self.fill = fill
        self.seconds.update(fill.seconds)

    def add_verified(self, verified: VerifyReport) -> None:
        """Add the verification of the fill."""
        self.verified = verified
        self.seconds["verify"] = verified.seconds

    def report(self, direction: str, version: int, seconds: float) -> ReshardReport:
        """All of it."""
        fill = self.fill or FillReport()
        verified = self.verified or VerifyReport(0, 0, 0, 0.0)
        from_others = {
            name: by_peer for name, by_peer in fill.nbytes_by_peer.items() if by_peer and name != LocalTransport.name
        }
        return ReshardReport(
            direction=direction,
            version=version,
            seconds=seconds,
            seconds_by_phase=dict(self.seconds),
            bytes_received=fill.received_nbytes,
            bytes_own=fill.nbytes_by_link[Link.SELF] + fill.nbytes_by_link[Link.DEVICE],
            bytes_least=fill.least_nbytes,
            bytes_offloaded=self.offloaded,
            bytes_onloaded=self.onloaded,
            peak_bytes=self.peak,
            staging_bytes=fill.staging_nbytes,
            bytes_prefetched=self.prefetched,
            seconds_hidden=self.seconds_hidden,
            bytes_across_hosts=fill.nbytes_by_link[Link.NETWORK],
            bytes_by_transport={name: sum(by_peer.values()) for name, by_peer in from_others.items()},
            pairs_by_transport={name: len(by_peer) for name, by_peer in from_others.items()},
            tensors_verified=verified.num_tensors,
            bytes_verified=verified.nbytes,
            bytes_of_digests=verified.digest_nbytes,
            bytes_skipped=fill.skipped_nbytes,
            bytes_kept=self.kept,
            messages_delta=fill.deltas.num_deltas,
            messages_whole=fill.deltas.num_whole,
            density=fill.deltas.density,
            bytes_of_copies=fill.deltas.copies_nbytes,
        )


_TOLERATED_SHARE, _TOLERATED_NBYTES = 0.05, 2**20
"""Of a phase, beyond its plan: padding of buffers, and their last pages."""


class MemoryWatch:
    """One rank's.

    Args:
        plan: of the job.
        rank: of this process.

    Attributes:
        measured: phase -> most bytes seen so far.
    """

    def __init__(self, plan: MemoryPlan, rank: int) -> None:
        self.plan = plan
        self.measured: dict[str, int] = {}
        self._rank = rank
        self._warned: set[str] = set()

    def note(self, phase: str, nbytes: int, began_in: str | None = None) -> None:
        """So many bytes of weights and training state are on the device. Logs, once for each phase, if that is more
        than was planned, or than the budget.

        `began_in`: the phase in which a switch began, for it begins with all that this one had.
        """
        self.measured[phase] = max(self.measured.get(phase, 0), nbytes)
        planned = max(int(self.plan.phases[name].total[self._rank]) for name in (phase, began_in) if name is not None)
        allowed = planned + max(planned * _TOLERATED_SHARE, _TOLERATED_NBYTES)
        over = [("planned", planned)] if nbytes > allowed else []
        if self.plan.budget is not None and nbytes > self.plan.budget:
            over.append(("the budget", self.plan.budget))
        if over and phase not in self._warned:
            self._warned.add(phase)
            against = " and ".join(f"{what} {limit:,}" for what, limit in over)
            logger.warning(
                "[Memory] rank %d, %s: %s bytes on the device, %s", self._rank, phase, f"{nbytes:,}", against
            )

    def report(self) -> str:
        """This rank's plan as a table, with what was measured."""
        return "\n".join(self.plan.lines(self._rank, self.measured))
