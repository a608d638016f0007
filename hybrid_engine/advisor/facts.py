"""What a job plan says, as plain numbers: the content of `plan --json`, and of the tables in terminal and browser."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.planning.plan import ByteCount, Link, ReshardPlan, Transfer
from hybrid_engine.planning.relays import staging_nbytes
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


def facts_of_rank(plan: ReshardPlan, rank: int) -> dict[str, Any]:
    """What one rank does."""
    transfers = list(plan.transfers())
    count = plan.bytes_by_rank.get(rank, ByteCount(0, 0, 0, 0))
    return {
        "rank": rank,
        "transfers": len(transfers),
        "buckets": len(plan.buckets),
        "received": {"self": count.own, "host": count.host, "network": count.network},
        "sent": {link.value: _sent(transfers, rank, link) for link in (Link.HOST, Link.NETWORK)},
        "staging": staging_nbytes(plan.buckets, plan.relays, rank),
        "peers": len({each.src_rank for each in transfers} | {each.dst_rank for each in transfers}) - 1,
    }


def _sent(transfers: Iterable[Transfer], rank: int, link: Link) -> int:
    """Bytes that go over a link to other ranks."""
    return sum(each.nbytes for each in transfers if each.src_rank == rank and each.link is link)


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
