"""What is written for a case: one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.resharding.cases import Case


@dataclass
class Figures:
    """One case. Seconds are those of the slowest rank in the median run; None where `reasons` says why.

    Attributes:
        ours_seconds: training weights to vLLM's parameters in loader layout, from released to filled memory.
        ours_allocate_seconds: of these, taking and zeroing that memory (the same task for all who write into vLLM).
        ours_copies_seconds: the copies alone, where all parameters have memory that was used before.
        ours_commit_seconds: vLLM's own repacking, not in `ours_seconds` (again the same for all).
        mbridge_seconds: mbridge's export_weights into vLLM's load_weights.
        megatron_bridge_seconds: Megatron-Bridge's export_hf_weights into vLLM's load_weights; with --bridge.
        megatron_resharding_seconds: megatron-core's resharding over gloo, into a Megatron model.
        ours_to_megatron_seconds: ours into the same model.
        gather_broadcast_seconds: gather and broadcast as MindSpeed-RL describes it, written here, into vLLM.
        floor_seconds: a plain copy of as many bytes.
        bytes_received, bytes_least, bytes_own: by all ranks, from other ranks; the least possible; inside a rank.
        peak_bytes, max_layout_bytes: of the rank on which a switch exceeds the larger of its layouts most.
        bucket_bytes: of the plan's largest bucket, on the rank that is filled most. A tensor is never in two.
        weights_kept: the whole run was made with `release_weights: false`.
        phases: contender -> phase -> seconds. spread: contender -> fastest and slowest run.
        num_runs: contender -> timed runs; a slow one has fewer.
        switch_phases: of a whole switch to inference, with offload, on rank 0.
        growth: what the ranks held after the first and the last of many cycles (`--cycles`).
        timeline: device bytes of rank 0 over one cycle (`--timeline`).
        reasons: key -> why it is null.
    """

    model: str
    ranks: int
    train: str
    infer: str
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
    bytes_own: int | None = None
    peak_bytes: int | None = None
    max_layout_bytes: int | None = None
    bucket_bytes: int | None = None
    num_tensors: int | None = None
    inference_bytes: int | None = None
    weights_kept: bool = False
    phases: dict[str, Mapping[str, float]] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_runs: dict[str, int] = field(default_factory=dict)
    switch_phases: dict[str, float] = field(default_factory=dict)
    growth: dict[str, Any] | None = None
    timeline: dict[str, Any] | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(case: Case, **more: Any) -> Figures:
        """Empty ones."""
        return Figures(case.model, case.ranks, case.train, case.infer, **more)

    def times_ours(self, key: str) -> float | None:
        """How many times as long as ours a contender into the same destination takes."""
        own = (
            self.ours_to_megatron_seconds
            if key == "megatron_resharding_seconds"
            else self.ours_seconds
        )
        other = getattr(self, key)
        return other / own if own and other is not None else None

    def _percent_of_floor(self, seconds: float | None) -> float | None:
        return 100 * self.floor_seconds / seconds if self.floor_seconds and seconds else None

    def as_json(self) -> dict[str, Any]:
        """All fields and the ratios.

        The floor writes to memory that it has already, so percent_of_floor_copies is the like for like one.
        """
        over = self.peak_bytes - self.max_layout_bytes if self.peak_bytes is not None else None
        return {
            **dataclasses.asdict(self),
            "percent_of_floor": self._percent_of_floor(self.ours_seconds),
            "percent_of_floor_copies": self._percent_of_floor(self.ours_copies_seconds),
            "bytes_over_least": self.bytes_received / self.bytes_least
            if self.bytes_least
            else None,
            "peak_over_max_layout_bytes": over,
            "times_ours": {
                key: self.times_ours(key)
                for key in (
                    *("mbridge_seconds", "megatron_bridge_seconds", "megatron_resharding_seconds"),
                    "gather_broadcast_seconds",
                )
            },
        }
