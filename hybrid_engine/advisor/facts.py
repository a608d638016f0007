"""What a job plan says in plain numbers: the content of `plan --json`, and the rows of its tables and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import numpy as np

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.advisor.job_verdict import JobVerdict
from hybrid_engine.advisor.later_switches import LaterSwitches
from hybrid_engine.advisor.prefetch_estimate import PrefetchEstimate
from hybrid_engine.layouts.memory_plan import GIB
from hybrid_engine.layouts.parallelism import Parallelism, ShardedParallelism
from hybrid_engine.planning.plan import ByteCount, Link, ReshardPlan
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.planning.summary import ByteSummary

GATHER = "gather of all weights, as verl and TRL"
"""What other systems do: every rank receives every tensor but what it holds of it (docs/comparison.md)."""


class MinMeanMax(TypedDict):
    """Smallest, mean and largest of a number that every rank or host has."""

    min: float
    mean: float
    max: float


Ranges = Mapping[str, MinMeanMax]
"""Numbers of bytes that every rank or host has, by name."""


class RankFacts(TypedDict):
    """What one rank does; bytes by link. `staging`: memory of its messages between hosts."""

    rank: int
    transfers: int
    buckets: int
    received: Mapping[str, int]
    sent: Mapping[str, int]
    staging: int
    peers: int
    planning_seconds: float


class PlanningCost(TypedDict):
    """Seconds, and the peak of the process in bytes."""

    seconds: float
    peak_memory: int


@dataclass(frozen=True)
class Answer:
    """The answer of `plan`; `rank`, `prefetch` and `later` where they were asked for.

    `remarks`: what of the configuration the numbers leave out, and why a job would refuse it.
    """

    job: JobPlan
    planning: PlanningCost
    rank: RankFacts | None = None
    prefetch: PrefetchEstimate | None = None
    later: LaterSwitches | None = None
    remarks: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """The content of `plan --json`."""
        of_rank = {} if self.rank is None else {"rank": self.rank}
        ahead = {} if self.prefetch is None else {"prefetch": prefetch_facts(self.prefetch)}
        later = {} if self.later is None else {"later_switches": facts_of_later(self.later)}
        verdict = JobVerdict(self.job).as_dict()
        return {
            "verdict": verdict,
            **facts_of(self.job),
            "planning": self.planning,
            **of_rank,
            **ahead,
            **later,
            "remarks": [*self.remarks],
        }


def range_of(values: np.ndarray) -> MinMeanMax:
    """Of an array by rank or host."""
    return {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}


def moved_bytes(summary: ByteSummary) -> Ranges:
    """Of a switch, by rank; `least`: no plan lets ranks receive less."""
    return _ranges(
        received=summary.received,
        received_same_host=summary.host,
        received_across_hosts=summary.network,
        copied_on_the_rank=summary.own,
        sent=summary.sent,
        sent_same_host=summary.sent_host,
        sent_across_hosts=summary.sent_network,
        least=summary.lower_bound,
    )


def bytes_across_hosts(plan: JobPlan) -> Ranges:
    """What comes to each host from others, and the least that must."""
    return _ranges(received=plan.received_by_host, least=plan.bytes.network_lower_bound)


def facts_of_later(later: LaterSwitches) -> dict[str, Any]:
    """Bytes by rank, and the key that they need."""
    return {"bytes": {**moved_bytes(later.bytes), **_ranges(kept=later.kept)}, "incremental_mb": later.incremental_mb}


def device_memory(plan: JobPlan) -> Ranges:
    """By rank; see `memory_peaks.MemoryPeaks`."""
    memory, state = plan.memory, plan.memory.state
    late = {} if state.inelastic is None else {"inelastic": state.inelastic}
    return _ranges(
        params=state.params,
        **late,
        grads=state.grads,
        optimizer=state.optimizer,
        training=memory.training,
        inference=memory.inference,
        switch=memory.switch,
        interleaved_switch=memory.interleaved_switch,
        peak=plan.peak,
    )


def host_memory(plan: JobPlan) -> Ranges:
    """Of offloaded state."""
    return _ranges(per_rank=plan.on_host, per_host=plan.host_nbytes)


def assumptions(plan: JobPlan) -> str:
    """What the peaks of device memory depend on, beside sizes, in a sentence."""
    released = "leave the device while it trains (release_weights: true)"
    if plan.memory.keeps_inference:
        released = "stay on the device while it trains (release_weights: false)"
    left = "Parameters leave page by page as they are read, which on GPUs needs cuda-bindings"
    if not plan.cluster.has_elastic_buffers:
        left = "Without cuda-bindings parameters leave whole, at the end of a switch, and ranks of a host send messages"
    return f"Inference weights {released}. {left}."


def facts_of(plan: JobPlan) -> dict[str, Any]:
    """Everything about a job, in bytes and seconds, as JSON has it."""
    table, cluster = plan.table, plan.cluster
    host_nbytes = None if cluster.host_gib is None else cluster.host_gib * GIB
    dtype, params_dtype = plan.config.wire_dtype, plan.config.actor_config.params_dtype
    train_dtype = {} if params_dtype == dtype else {"train_dtype": params_dtype}
    return {
        "model": {
            "layers": table.dims.num_layers,
            "experts": table.dims.num_experts,
            "tensors": len(table.shapes),
            "served_bytes": plan.model_nbytes,
            "dtype": dtype,
            **train_dtype,
        },
        "world_size": plan.world_size,
        "ranks_per_host": cluster.ranks_per_host,
        "train": _sizes(plan.train),
        "infer": _sizes(plan.infer),
        "bytes": moved_bytes(plan.bytes),
        "across_hosts": bytes_across_hosts(plan),
        "sequential": moved_bytes(plan.sequential),
        "peers": [
            {"system": GATHER, "formula": "M - held", "nbytes": float(plan.gathered.mean()), "reason": ""},
        ],
        "memory": {
            "device": {**device_memory(plan), "size": cluster.device_gib * GIB, "fits": plan.fits_device},
            "host": {**host_memory(plan), "size": host_nbytes, "fits": plan.fits_host},
            "assumed": {
                "release_weights": not plan.memory.keeps_inference,
                "elastic_buffers": cluster.has_elastic_buffers,
            },
        },
        "seconds": range_of(plan.seconds),
        "link_bytes_per_second": {link.value: rate * 1e9 for link, rate in cluster.link_gbps.items()},
    }


def prefetched_bytes(estimate: PrefetchEstimate) -> Ranges:
    """By rank; see `prefetch_estimate`."""
    return _ranges(
        returning=estimate.returning,
        within_peak=estimate.within_peak,
        with_room=estimate.with_room,
        peak_with_room=estimate.peak,
    )


def prefetch_facts(estimate: PrefetchEstimate) -> dict[str, Any]:
    """Bytes by rank, and seconds of the slowest: hidden in the rollout, and left to the switch."""
    choices = {"off": estimate.returning * 0, "within_peak": estimate.within_peak, "with_room": estimate.with_room}
    return {
        "bytes": prefetched_bytes(estimate),
        "seconds_hidden": {name: estimate.seconds(nbytes) for name, nbytes in choices.items()},
        "seconds_left": {name: estimate.seconds_left(nbytes) for name, nbytes in choices.items()},
        **estimate.settings(),
    }


def facts_of_rank(plan: ReshardPlan, rank: int, planning_seconds: float) -> RankFacts:
    """What the plan of one rank says."""
    transfers = list(plan.transfers())
    count = plan.bytes_by_rank.get(rank, ByteCount(0, 0, 0, 0))
    sent = dict.fromkeys((Link.HOST.value, Link.NETWORK.value), 0)
    for each in transfers:
        if each.src_rank == rank and each.link is not Link.SELF:
            sent[each.link.value] += each.nbytes
    return RankFacts(
        rank=rank,
        transfers=len(transfers),
        buckets=len(plan.buckets),
        received={Link.SELF.value: count.own, Link.HOST.value: count.host, Link.NETWORK.value: count.network},
        sent=sent,
        staging=staging_nbytes(plan.buckets, plan.relays, rank),
        peers=len({end for each in transfers for end in (each.src_rank, each.dst_rank)} - {rank}),
        planning_seconds=planning_seconds,
    )


def _ranges(**values: np.ndarray) -> Ranges:
    return {name: range_of(each) for name, each in values.items()}


def _sizes(sizes: Parallelism | ShardedParallelism) -> dict[str, Any]:
    """Those that are set, by attribute, and the data parallel size."""
    defaults = asdict(type(sizes)(world_size=sizes.world_size))
    changed = {name: value for name, value in asdict(sizes).items() if value != defaults[name]}
    shards = {"num_shards": sizes.num_shards} if isinstance(sizes, ShardedParallelism) else {}
    return {**shards, **changed, "data": sizes.data}
