"""A job as it would be on a cluster: both layouts, who moves what, what fits, how long it takes.

read_model(directory)  ->  parse_job(sizes)  ->  a trainer (trainers.py)  ->  plan_job(...)  ->  JobPlan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hybrid_engine.advisor.cache_room import CacheRoom, token_nbytes
from hybrid_engine.advisor.other_systems import PeerBytes
from hybrid_engine.advisor.trainers import PlannedTrainer
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.memory_peaks import MemoryPeaks
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Link, ReshardPlan
from hybrid_engine.planning.planner import DEFAULT_BUCKET_NBYTES, plan_sides
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

GIB = 1024**3
LINK_GBPS: Mapping[Link, float] = {Link.SELF: 2000.0, Link.HOST: 400.0, Link.NETWORK: 45.0}
"""Assumed gigabytes (10^9) per second of one rank, in each direction: a copy within an H200's memory, NVLink 4, one
400 Gbit/s adapter for each GPU; each somewhat below its nominal rate."""

DEVICE_GIB: Mapping[str, float] = {
    "a100-40": 39.3,
    "a100-80": 79.1,
    "l40s": 44.3,
    "h100": 79.1,
    "h200": 139.7,
    "b200": 178.3,
}
"""Memory that CUDA reports of a device, which is less than its name says; boards of one name differ by some 0.2 GiB."""


@dataclass(frozen=True)
class Cluster:
    """What the job runs on.

    Attributes:
        ranks_per_host: consecutive ranks.
        device_gib: memory of one device. host_gib: of one host; None: not checked.
        link_gbps: 10^9 bytes per second of one rank, by link.
        gpu_memory_utilization: share of a device that vLLM may use, weights and KV cache.
        has_elastic_buffers: training buffers release memory by pages, and peers of a host read them; on GPUs that needs
            cuda-bindings.
    """

    ranks_per_host: int = 8
    device_gib: float = DEVICE_GIB["h200"]
    host_gib: float | None = None
    link_gbps: Mapping[Link, float] = field(default_factory=lambda: LINK_GBPS)
    has_elastic_buffers: bool = True
    gpu_memory_utilization: float = 0.5

    def hosts(self, num_ranks: int) -> list[int]:
        """Host number of every rank."""
        return [rank // self.ranks_per_host for rank in range(num_ranks)]

    def relaying_hosts(self, num_ranks: int) -> set[int]:
        """Hosts to which a byte comes once, however many of their ranks need it: the ranks read each other's memory."""
        return set(self.hosts(num_ranks)) if self.has_elastic_buffers else set()


@dataclass(frozen=True, eq=False)
class JobPlan:
    """What was found out about a job. Arrays are by rank.

    Attributes:
        trainer: whoever trains.
        infer: sizes; `infer.rank_order` is the chosen order, None if sequential.
        train_dtype, dtype: of the weights in training and in inference.
        source, destination: both layouts.
        bytes: of the chosen order. sequential: of sequential order.
        memory: peaks. peers: others.
        max_model_len: tokens of the longest sequence that vLLM is to serve; 0: not known.
    """

    table: ModelTable
    trainer: PlannedTrainer
    infer: InferenceParallelism
    cluster: Cluster
    train_dtype: str
    dtype: str
    bucket_nbytes: int
    source: SideLayout
    destination: SideLayout
    bytes: ByteSummary
    sequential: ByteSummary
    memory: MemoryPeaks
    peers: Sequence[PeerBytes]
    max_model_len: int = 0

    @property
    def world_size(self) -> int:
        return self.infer.world_size

    @property
    def model_nbytes(self) -> int:
        """Bytes of all tensors that vLLM serves, each once."""
        return self.destination.holdings.model_nbytes

    @cached_property
    def seconds(self) -> np.ndarray:
        """Estimated seconds each rank is busy: links one after the other, each at the larger of in and out."""
        rates = {link: rate * 1e9 for link, rate in self.cluster.link_gbps.items()}
        moved = self.bytes
        return (
            moved.own / rates[Link.SELF]
            + np.maximum(moved.host, moved.sent_host) / rates[Link.HOST]
            + np.maximum(moved.network, moved.sent_network) / rates[Link.NETWORK]
        )

    @cached_property
    def received_by_host(self) -> np.ndarray:
        """Bytes that come to each host from others; int array by host."""
        hosts = self.cluster.hosts(self.world_size)
        return np.bincount(hosts, weights=self.bytes.network).astype(np.int64)

    @property
    def fits_device(self) -> bool:
        """Whether every rank's peak is within its device."""
        return bool(self.memory.device.max() <= self.cluster.device_gib * GIB)

    @property
    def cache(self) -> CacheRoom:
        """Room for the KV cache in vLLM's share of a device."""
        return CacheRoom(
            self.cluster.device_gib * GIB,
            self.cluster.gpu_memory_utilization,
            int(self.memory.inference.max()),
            token_nbytes(self.table.dims, self.infer, self.dtype),
            self.max_model_len,
        )

    @cached_property
    def host_nbytes(self) -> np.ndarray:
        """Host memory that is taken while vLLM generates, by host."""
        return np.bincount(self.cluster.hosts(self.world_size), weights=self.memory.host).astype(np.int64)

    @property
    def fits_host(self) -> bool | None:
        """Whether every host can take its ranks' state; None when its size is not known."""
        if self.cluster.host_gib is None:
            return None
        return bool(self.host_nbytes.max() <= self.cluster.host_gib * GIB)

    def plan_of(self, rank: int) -> ReshardPlan:
        """Every transfer of one rank."""
        hosts, relaying = self.cluster.hosts(self.world_size), self.cluster.relaying_hosts(self.world_size)
        unserved = [name for name in self.table.shapes if not self.table.is_served(name)]
        return plan_sides(
            self.source, self.destination, hosts, self.bucket_nbytes, unserved, rank, relaying_hosts=relaying
        )


def plan_job(
    table: ModelTable,
    trainer: PlannedTrainer,
    infer: InferenceParallelism,
    cluster: Cluster,
    *,
    order: str = "auto",
    dtype: str = "bfloat16",
    train_dtype: str | None = None,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    release_weights: bool = True,
    max_model_len: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> JobPlan:
    """Lay out both sides, choose the order of ranks, count bytes.

    Args:
        infer: sizes in sequential order.
        order: "auto" or "sequential", see `planning.rank_order`.
        dtype: of the weights in inference; `train_dtype`: in training, default: the same.
        release_weights: inference weights give up their memory while training.
        max_model_len: tokens of the longest sequence; 0: not known.
        progress: is told what is being done.

    Raises ConfigError with every violation, DependencyError for "auto" without scipy.
    """
    train_dtype = train_dtype or dtype
    progress("laying out both sides")
    source = trainer.side(table, train_dtype)
    positions = inference_side(table, infer, dtype)
    hosts, relaying = cluster.hosts(infer.world_size), cluster.relaying_hosts(infer.world_size)
    progress("counting bytes")
    sequential = summarize(source.holdings, positions.holdings, hosts, relaying)
    progress("choosing the order of ranks")
    chosen = rank_order(order, source.holdings, positions.holdings, hosts, infer.tensor)
    destination, moved = positions, sequential
    if chosen != tuple(range(infer.world_size)):
        progress("counting bytes in that order")
        infer = replace(infer, rank_order=chosen)
        destination = inference_side(table, infer, dtype)
        moved = summarize(source.holdings, destination.holdings, hosts, relaying)
    inference_nbytes, state = destination.num_elements * DTYPE_NBYTES[dtype], trainer.memory(source, train_dtype)
    if not cluster.has_elastic_buffers:
        state = state.leaving_whole()
    return JobPlan(
        table=table,
        trainer=trainer,
        infer=infer,
        cluster=cluster,
        train_dtype=train_dtype,
        dtype=dtype,
        bucket_nbytes=bucket_nbytes,
        source=source,
        destination=destination,
        bytes=moved,
        sequential=sequential,
        memory=MemoryPeaks(state, inference_nbytes, bucket_nbytes, keeps_inference=not release_weights),
        peers=trainer.peers(source.holdings, destination.holdings, infer),
        max_model_len=max_model_len,
    )
