"""Figures of a case, written as a JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.resharding.cases import Case


@dataclass
class Figures:
    """Figures of a case. Seconds are of the slowest rank in the median run.

    Attributes:
        ours_seconds: training weights to vLLM's parameters in loader layout, from released to
            filled memory.
        ours_allocate_seconds: part of `ours_seconds` that allocates and zeroes memory, as every
            contender does.
        ours_copies_seconds: copies alone, into memory that was used before.
        ours_commit_seconds: vLLM's repacking, equal for every contender and not part of
            `ours_seconds`.
        mbridge_seconds: mbridge's export_weights into vLLM's load_weights.
        megatron_bridge_seconds: Megatron-Bridge's export_hf_weights into vLLM's load_weights; with
            --bridge.
        megatron_resharding_seconds: megatron-core's resharding over gloo, into a Megatron model.
        ours_to_megatron_seconds: ours into the same model.
        gather_broadcast_seconds: gather and broadcast after MindSpeed-RL's description, into vLLM.
        floor_seconds: plain copy of the same bytes.
        bucket_mb: configured size of a bucket. Contenders without buckets, and the floor, run only
            with the first of several sizes.
        bytes_received: bytes from other ranks, sum over all ranks.
        bytes_least: least possible value of `bytes_received`.
        peak_bytes: peak of a switch on the rank with the largest excess over its larger layout.
        max_layout_bytes: larger layout of that rank.
        bucket_bytes: size of the largest bucket of the plan.
        phases: contender -> phase -> seconds.
        on_device: contender -> seconds between two events round the run on the GPU's stream,
            on the rank and in the run of its seconds, with repacking and the gaps between kernels.
        profiles: contender -> counts of a further run on rank 0 (`--profile`); see `Profile`.
        spread: contender -> seconds of the fastest and of the slowest run.
        num_runs: contender -> timed runs; a slow contender has fewer.
        growth: resources of the ranks after the first and the last of many cycles (`--cycles`).
        timeline: device bytes of rank 0 over a cycle (`--plot-memory`).
        reasons: key -> reason why the figure is None, null in JSON.
    """

    model: str
    ranks: int
    train: str
    infer: str
    bucket_mb: int
    ours_seconds: float | None = None
    ours_allocate_seconds: float | None = None
    ours_copies_seconds: float | None = None
    ours_commit_seconds: float | None = None
    mbridge_seconds: float | None = None
    mbridge_allocate_seconds: float | None = None
    mbridge_commit_seconds: float | None = None
    megatron_bridge_seconds: float | None = None
    megatron_bridge_allocate_seconds: float | None = None
    megatron_bridge_commit_seconds: float | None = None
    megatron_resharding_seconds: float | None = None
    ours_to_megatron_seconds: float | None = None
    gather_broadcast_seconds: float | None = None
    gather_broadcast_allocate_seconds: float | None = None
    gather_broadcast_commit_seconds: float | None = None
    floor_seconds: float | None = None
    bytes_received: int | None = None
    bytes_least: int | None = None
    peak_bytes: int | None = None
    max_layout_bytes: int | None = None
    bucket_bytes: int | None = None
    phases: dict[str, Mapping[str, float]] = field(default_factory=dict)
    on_device: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, Any] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_runs: dict[str, int] = field(default_factory=dict)
    growth: dict[str, Any] | None = None
    timeline: dict[str, Any] | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(case: Case, **more: Any) -> Figures:
        """Return the empty figures of a case."""
        return Figures(case.model, case.ranks, case.train, case.infer, case.bucket_mb, **more)

    @property
    def trace_name(self) -> str:
        """Start of the names of the case's traces."""
        return f"{self.model}-{self.train}-{self.infer}-{self.ranks}-{self.bucket_mb}"

    def times_ours(self, key: str) -> float | None:
        """Return a contender's seconds divided by ours, for the same destination."""
        ours = (
            self.ours_to_megatron_seconds
            if key == "megatron_resharding_seconds"
            else self.ours_seconds
        )
        other = getattr(self, key)
        return other / ours if ours and other is not None else None

    def as_json(self) -> dict[str, Any]:
        """Return all fields and ratios."""
        over = self.peak_bytes - self.max_layout_bytes if self.peak_bytes is not None else None
        return {
            **dataclasses.asdict(self),
            "peak_over_max_layout_bytes": over,
            "times_ours": {
                key: self.times_ours(key)
                for key in (
                    "mbridge_seconds",
                    "megatron_bridge_seconds",
                    "megatron_resharding_seconds",
                    "gather_broadcast_seconds",
                )
            },
        }
