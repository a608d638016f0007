"""What a job plan says, as plain numbers: the content of `plan --json`, and of the tables in terminal and browser."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.rank_plan import RankPlan
from hybrid_engine.planning.summary import ByteSummary


def spread_of(values: np.ndarray) -> dict[str, float]:
    """Smallest, mean and largest."""
    return {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}


def facts_of(plan: JobPlan) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    memory = plan.memory
    return {
        "model": {
            "layers": plan.table.dims.num_layers,
            "experts": plan.table.dims.num_experts,
            "tensors": len(plan.table.shapes),
            "served_bytes": plan.model_nbytes,
            "dtype": plan.dtype,
        },
        "world_size": plan.world_size,
        "ranks_per_host": plan.cluster.ranks_per_host,
        "train": {**_without_defaults(plan.train), "data": plan.train.data},
        "infer": {**_without_defaults(plan.infer), "data": plan.infer.data},
        "bytes": _bytes(plan.bytes),
        "across_hosts": _across_hosts(plan),
        "sequential": _bytes(plan.sequential),
        "peers": [asdict(peer) for peer in plan.peers],
        "memory": {
            "device": {
                "params": spread_of(memory.params),
                "grads": spread_of(memory.grads),
                "optimizer": spread_of(memory.optimizer),
                "training": spread_of(memory.training),
                "inference": spread_of(memory.inference),
                "switch": spread_of(memory.switch),
                "interleaved_switch": spread_of(memory.interleaved_switch),
                "peak": spread_of(memory.device),
                "size": plan.cluster.device_gib * 1024**3,
                "fits": plan.fits_device,
            },
            "host": {
                "per_rank": spread_of(memory.host),
                "per_host": spread_of(plan.host_nbytes),
                "size": None if plan.cluster.host_gib is None else plan.cluster.host_gib * 1024**3,
                "fits": plan.fits_host,
            },
        },
        "seconds": spread_of(plan.seconds),
        "link_bytes_per_second": {link.value: rate * 1e9 for link, rate in plan.cluster.link_gbps.items()},
    }


def facts_of_rank(plan: RankPlan) -> dict[str, Any]:
    """What one rank does."""
    transfers = list(plan.transfers())
    return {
        "rank": plan.rank,
        "transfers": len(transfers),
        "buckets": len(plan.buckets),
        "received": {link.value: plan.received(link) for link in Link},
        "sent": {link.value: plan.sent(link) for link in Link if link is not Link.SELF},
        "staging": plan.staging_nbytes,
        "peers": len({each.src_rank for each in transfers} | {each.dst_rank for each in transfers}) - 1,
    }


def _bytes(summary: ByteSummary) -> dict[str, dict[str, float]]:
    return {
        "received": spread_of(summary.received),
        "received_same_host": spread_of(summary.host),
        "received_across_hosts": spread_of(summary.network),
        "copied_on_the_rank": spread_of(summary.own),
        "sent": spread_of(summary.sent),
        "sent_same_host": spread_of(summary.sent_host),
        "sent_across_hosts": spread_of(summary.sent_network),
        "least": spread_of(summary.lower_bound),
    }


def _across_hosts(plan: JobPlan) -> dict[str, dict[str, float]]:
    """What comes to each host from others, and the least that must."""
    hosts = plan.cluster.hosts(plan.world_size)
    received = np.bincount(hosts, weights=plan.bytes.network).astype(np.int64)
    return {"received": spread_of(received), "least": spread_of(plan.bytes.network_lower_bound)}


def _without_defaults(sizes: Any) -> dict[str, Any]:
    """The sizes that are set, by attribute."""
    defaults = asdict(type(sizes)(world_size=sizes.world_size))
    return {name: value for name, value in asdict(sizes).items() if value != defaults[name]}
