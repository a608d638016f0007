"""What a job plan says, as plain numbers: the content of `plan --json`, and of the tables in terminal and browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from hybrid_engine.advisor.cluster_plan import GIB, JobPlan
from hybrid_engine.advisor.other_systems import PeerBytes
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.planning.plan import ByteCount, Link, ReshardPlan
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.planning.summary import ByteSummary


@dataclass(frozen=True, slots=True)
class MinMeanMax:
    """Smallest, mean and largest of a number that every rank or host has."""

    min: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: np.ndarray) -> MinMeanMax:
        return cls(values.min().item(), values.mean().item(), values.max().item())


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model's size; `served_bytes`: of the tensors that vLLM serves, each once."""

    layers: int
    experts: int
    tensors: int
    served_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ByteFacts:
    """Bytes of a switch by rank; `least`: no plan lets ranks receive less."""

    received: MinMeanMax
    received_same_host: MinMeanMax
    received_across_hosts: MinMeanMax
    copied_on_the_rank: MinMeanMax
    sent: MinMeanMax
    sent_same_host: MinMeanMax
    sent_across_hosts: MinMeanMax
    least: MinMeanMax

    @classmethod
    def of(cls, summary: ByteSummary) -> ByteFacts:
        return cls(
            received=MinMeanMax.of(summary.received),
            received_same_host=MinMeanMax.of(summary.host),
            received_across_hosts=MinMeanMax.of(summary.network),
            copied_on_the_rank=MinMeanMax.of(summary.own),
            sent=MinMeanMax.of(summary.sent),
            sent_same_host=MinMeanMax.of(summary.sent_host),
            sent_across_hosts=MinMeanMax.of(summary.sent_network),
            least=MinMeanMax.of(summary.lower_bound),
        )


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes that come to each host from others, and the least that must."""

    received: MinMeanMax
    least: MinMeanMax


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes by rank (`memory_peaks.MemoryPeaks`), and the device's."""

    params: MinMeanMax
    grads: MinMeanMax
    optimizer: MinMeanMax
    training: MinMeanMax
    inference: MinMeanMax
    switch: MinMeanMax
    interleaved_switch: MinMeanMax
    peak: MinMeanMax
    size: float
    fits: bool


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of offloaded state, and the host's; None where its size is not known."""

    per_rank: MinMeanMax
    per_host: MinMeanMax
    size: float | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    device: DeviceMemory
    host: HostMemory


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Everything about a job, in bytes and seconds.

    Attributes:
        train, infer: the sizes that are set, by attribute, and the data parallel size.
        across_hosts: by host. sequential: bytes in sequential rank order.
        peers: the same job elsewhere.
        seconds: estimated, by rank. link_bytes_per_second: what was assumed for that, by link.
    """

    model: ModelFacts
    world_size: int
    ranks_per_host: int
    train: Mapping[str, Any]
    infer: Mapping[str, Any]
    bytes: ByteFacts
    across_hosts: HostBytes
    sequential: ByteFacts
    peers: Sequence[PeerBytes]
    memory: MemoryFacts
    seconds: MinMeanMax
    link_bytes_per_second: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank does; bytes by link. `staging`: memory of its messages between hosts."""

    rank: int
    transfers: int
    buckets: int
    received: Mapping[str, int]
    sent: Mapping[str, int]
    staging: int
    peers: int
    planning_seconds: float


@dataclass(frozen=True, slots=True)
class PlanningCost:
    """Seconds, and the peak of the process in bytes."""

    seconds: float
    peak_memory: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of `plan`; `rank` where one was asked for."""

    job: JobFacts
    planning: PlanningCost
    rank: RankFacts | None = None

    def as_dict(self) -> dict[str, Any]:
        """The content of `plan --json`."""
        of_rank = {} if self.rank is None else {"rank": asdict(self.rank)}
        return {**asdict(self.job), "planning": asdict(self.planning), **of_rank}


def named(facts: ByteFacts | HostBytes | DeviceMemory | HostMemory) -> Iterator[tuple[str, MinMeanMax]]:
    """The numbers that every rank or host has, with their names."""
    for field in fields(facts):
        if isinstance(value := getattr(facts, field.name), MinMeanMax):
            yield field.name, value


def facts_of(plan: JobPlan) -> JobFacts:
    """What a job plan says."""
    memory, host_gib = plan.memory, plan.cluster.host_gib
    return JobFacts(
        model=ModelFacts(
            layers=plan.table.dims.num_layers,
            experts=plan.table.dims.num_experts,
            tensors=len(plan.table.shapes),
            served_bytes=plan.model_nbytes,
            dtype=plan.dtype,
        ),
        world_size=plan.world_size,
        ranks_per_host=plan.cluster.ranks_per_host,
        train=_sizes(plan.train),
        infer=_sizes(plan.infer),
        bytes=ByteFacts.of(plan.bytes),
        across_hosts=HostBytes(
            MinMeanMax.of(plan.received_by_host), least=MinMeanMax.of(plan.bytes.network_lower_bound)
        ),
        sequential=ByteFacts.of(plan.sequential),
        peers=plan.peers,
        memory=MemoryFacts(
            device=DeviceMemory(
                params=MinMeanMax.of(memory.params),
                grads=MinMeanMax.of(memory.grads),
                optimizer=MinMeanMax.of(memory.optimizer),
                training=MinMeanMax.of(memory.training),
                inference=MinMeanMax.of(memory.inference),
                switch=MinMeanMax.of(memory.switch),
                interleaved_switch=MinMeanMax.of(memory.interleaved_switch),
                peak=MinMeanMax.of(memory.device),
                size=plan.cluster.device_gib * GIB,
                fits=plan.fits_device,
            ),
            host=HostMemory(
                per_rank=MinMeanMax.of(memory.host),
                per_host=MinMeanMax.of(plan.host_nbytes),
                size=None if host_gib is None else host_gib * GIB,
                fits=plan.fits_host,
            ),
        ),
        seconds=MinMeanMax.of(plan.seconds),
        link_bytes_per_second={link.value: rate * 1e9 for link, rate in plan.cluster.link_gbps.items()},
    )


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


def _sizes(sizes: TrainParallelism | InferenceParallelism) -> dict[str, Any]:
    """Those that are set, by attribute, and the data parallel size."""
    defaults = asdict(type(sizes)(world_size=sizes.world_size))
    changed = {name: value for name, value in asdict(sizes).items() if value != defaults[name]}
    return {**changed, "data": sizes.data}
