"""A job as it would be on a cluster: both layouts, who moves what, what fits, how long it takes.

load_config(YAML, number of ranks)  ->  plan_job(config, number of ranks, cluster)  ->  JobPlan
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hybrid_engine.advisor.activations import Step, activation_nbytes, gathered_nbytes, vllm_step_nbytes
from hybrid_engine.config import HybridConfig
from hybrid_engine.config.job_rules import critic_memory, critic_of, megatron_training, what_stays
from hybrid_engine.errors import ConfigError, DependencyError, Violation
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.memory import (
    GIB,
    MIB,
    MemoryPeaks,
    Phase,
    Stays,
    TrainingMemory,
    plan_memory,
    sharded_memory,
)
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.sharded import PackedModel, sharded_side
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelDims, ModelTable
from hybrid_engine.planning.plan import Link, ReshardPlan
from hybrid_engine.planning.planner import largest_bucket, plan_sides
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

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
    """The hosts, devices and links that the job runs on.

    Attributes:
        ranks_per_host: consecutive ranks.
        device_gib: memory of one device. host_gib: of one host; None: not checked.
        link_gbps: 10^9 bytes per second of one rank, by link.
        has_elastic_buffers: training buffers release memory by pages, and peers of a host read them; on GPUs that needs
            cuda-bindings.
    """

    ranks_per_host: int = 8
    device_gib: float = DEVICE_GIB["h200"]
    host_gib: float | None = None
    link_gbps: Mapping[Link, float] = field(default_factory=lambda: LINK_GBPS)
    has_elastic_buffers: bool = True

    def hosts(self, num_ranks: int) -> list[int]:
        """Host number of every rank."""
        return [rank // self.ranks_per_host for rank in range(num_ranks)]

    def relaying_hosts(self, num_ranks: int) -> set[int]:
        """Hosts to which a byte comes once, however many of their ranks need it: the ranks read each other's memory."""
        return set(self.hosts(num_ranks)) if self.has_elastic_buffers else set()


@dataclass(frozen=True)
class CacheRoom:
    """Room for the KV cache in vLLM's share of a device, on the rank that has least; sizes in bytes.

    vLLM does not start unless one sequence of `max_model_len` fits. Captured graphs come off the share too, and are not
    known here; layers with a window need less.

    Attributes:
        device: its memory. utilization: vLLM's share of it.
        weights: vLLM's.
        step: an estimate of what its largest step takes.
        per_token: what a token takes in the cache.
        longest: tokens of the longest sequence (`max_model_len`); 0: not known.
        given: the cache's size where the configuration says it (`kv_cache_mb`), whatever the share.
        beside: of training, what the configuration leaves on the device while vLLM generates.
    """

    device: float
    utilization: float
    weights: int
    step: int
    per_token: int
    longest: int
    given: int | None = None
    beside: int = 0

    @property
    def share(self) -> int:
        """vLLM's part of the device, rounded as it does (`request_memory`)."""
        return math.ceil(self.device * self.utilization)

    @property
    def room(self) -> float:
        """Left for the cache; negative where weights and a step alone do not fit."""
        return self.share - self.weights - self.step if self.given is None else self.given

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in the cache."""
        return max(0, int(self.room // self.per_token))

    @property
    def num_sequences(self) -> float:
        """Longest sequences that fit at once; 0 where their length is not known."""
        return self.num_tokens / self.longest if self.longest else 0.0

    @property
    def least(self) -> int:
        """Bytes without which vLLM does not start: weights, a step, one sequence."""
        return self.weights + self.step + max(1, self.longest) * self.per_token

    @property
    def needed(self) -> float:
        """The least share of the device for these, in hundredths; above 1 there is none."""
        return math.ceil(100 * self.least / self.device) / 100

    @property
    def taken(self) -> float:
        """Taken of the device while vLLM generates: by vLLM, and by what stays of training."""
        vllm = self.share if self.given is None else self.weights + self.step + self.given
        return vllm + self.beside

    @property
    def left(self) -> float:
        """Left of the device beside that; negative: so much is missing."""
        return self.device - self.taken

    @property
    def lack(self) -> float:
        """Bytes without which vLLM does not start, or not beside what stays of training; 0: it starts."""
        return max(0.0, max(1, self.longest) * self.per_token - self.room, -self.left)

    @property
    def fits(self) -> bool:
        """Whether vLLM starts."""
        return self.lack == 0


def token_nbytes(dims: ModelDims, infer: InferenceParallelism, itemsize: int) -> int:
    """Bytes of a token in the cache of the rank that has most layers.

    In each layer a key and a value for each of the rank's key/value heads (one where there are fewer heads than ranks),
    or what multi-head latent attention keeps in their place, whole on every rank. `itemsize`: bytes of an element.
    """
    heads = max(1, dims.num_kv_heads // infer.tensor)
    numel = dims.latent_kv_size or 2 * heads * dims.head_dim
    return numel * -(-dims.num_layers // infer.pipeline) * itemsize


@dataclass(frozen=True, eq=False)
class Working:
    """Estimates of what training steps take beside state; int arrays by rank, or by pipeline stage.

    Attributes:
        activations: of the actor. critic: of the critic.
        gathered: what FSDP2 gathers.
    """

    activations: np.ndarray
    critic: np.ndarray
    gathered: np.ndarray

    @classmethod
    def of_megatron(cls, config: HybridConfig, table: ModelTable, world_size: int) -> Working:
        """The estimates by pipeline stage, where Megatron trains."""
        actor = config.actor_config
        own = activation_nbytes(table, Step.of(actor, actor.sizes(world_size)))
        of_critic = np.zeros_like(own)
        if config.critic_config is not None:
            critic = critic_of(config, world_size)
            of_critic = activation_nbytes(critic.table, Step.of(critic.actor, critic.actor.sizes(world_size)))
        return cls(own, of_critic, np.zeros_like(own))

    def by_rank(self, num_ranks: int) -> Working:
        """The same of every rank of every stage: the ranks of a stage follow one another."""
        times = num_ranks // len(self.activations)
        return Working(*(np.repeat(each, times) for each in (self.activations, self.critic, self.gathered)))


def job_phases(
    config: HybridConfig,
    state: TrainingMemory,
    inference: np.ndarray,
    bucket: int,
    critic: TrainingMemory | None,
    working: Working,
) -> dict[str, Phase]:
    """Return what is on a device in every phase of a job, but that of a reference, which a job need not have.

    `inference`: bytes of vLLM's weights. `bucket`: of the largest bucket. All arrays are by rank, or all by pipeline
    stage.
    """
    found = dict(plan_memory(state, inference, bucket, critic, stays=what_stays(config)).phases)
    del found["reference"]
    steps = {"train": working.activations + working.gathered, "critic train": working.critic}
    for name, nbytes in steps.items():
        if name in found:
            found[name] = replace(found[name], by_model={**found[name].by_model, "activations": nbytes})
    return found


def stays_beside(phases: Mapping[str, Phase]) -> int:
    """Bytes of training on a device beside vLLM while it generates, on the rank with most; prefetches keep off."""
    beside = [nbytes for model, nbytes in phases["generate"].by_model.items() if model != "vLLM"]
    return int(np.max(sum(beside), initial=0))


def cache_room(
    config: HybridConfig,
    table: ModelTable,
    infer: InferenceParallelism,
    device: float,
    weights: int,
    longest: int,
    beside: int,
) -> CacheRoom:
    """Return the room on a device of so many bytes; see `CacheRoom` for the arguments."""
    generate, itemsize = config.generate_config, DTYPE_NBYTES[config.served_dtype]
    narrow = str(generate.vllm.get("kv_cache_dtype", "auto")).startswith("fp8")
    return CacheRoom(
        device,
        generate.gpu_memory_utilization,
        weights,
        vllm_step_nbytes(table, infer, generate, itemsize, device),
        token_nbytes(table.dims, infer, 1 if narrow else itemsize),
        longest,
        None if (given := generate.kv_cache_mb) is None else given * MIB,
        beside,
    )


@dataclass(frozen=True, eq=False)
class JobPlan:
    """A job's layouts, bytes and memory. Arrays are by rank.

    Attributes:
        config: of the job.
        table: its model.
        train, infer: sizes; `infer.rank_order` is the chosen order, None if sequential.
        source, destination: both layouts.
        bytes: of the chosen order. sequential: of sequential order.
        memory: the training state, and the peaks of a switch alone.
        phases: of the job -> bytes on a device, with all that the configuration leaves there.
        working: an estimate of what a training step takes: activations, and what FSDP2 gathers.
        on_host: bytes that are copied to host memory while vLLM generates, and of copies of messages.
        max_model_len: tokens of the longest sequence that vLLM is to serve; 0: not known.
    """

    config: HybridConfig
    table: ModelTable
    train: TrainParallelism | ShardedParallelism
    infer: InferenceParallelism
    cluster: Cluster
    source: SideLayout
    destination: SideLayout
    bytes: ByteSummary
    sequential: ByteSummary
    memory: MemoryPeaks
    phases: Mapping[str, Phase]
    working: Working
    on_host: np.ndarray
    max_model_len: int

    @property
    def world_size(self) -> int:
        return self.infer.world_size

    @property
    def bucket_nbytes(self) -> int:
        """Bytes at which the planner closes a bucket."""
        return self.config.generate_config.bucket_mb * MIB

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

    @cached_property
    def gathered(self) -> np.ndarray:
        """Bytes that each rank would receive if every parameter were gathered whole on all of them."""
        return self.source.holdings.model_nbytes - self.source.holdings.nbytes_by_rank()

    @cached_property
    def peak(self) -> np.ndarray:
        """Most bytes on each device in any phase, without vLLM's KV cache."""
        return np.max([phase.total for phase in self.phases.values()], axis=0)

    @cached_property
    def taken(self) -> dict[str, float]:
        """Phase -> bytes on the device with most; in `generate` with all of vLLM's share, where it starts."""
        found = {name: float(phase.total.max()) for name, phase in self.phases.items()}
        if self.cache.fits:
            found["generate"] = max(found["generate"], self.cache.taken)
        return found

    @property
    def fullest_phase(self) -> str:
        """The phase in which a device has most."""
        return max(self.taken, key=self.taken.__getitem__)

    @property
    def left(self) -> float:
        """Bytes of the device that are left in that phase; negative: so much is missing."""
        return self.cluster.device_gib * GIB - self.taken[self.fullest_phase]

    @property
    def fits_device(self) -> bool:
        """Whether every rank's peak is within its device."""
        return bool(self.peak.max() <= self.cluster.device_gib * GIB)

    @cached_property
    def cache(self) -> CacheRoom:
        """Room for the KV cache in vLLM's share of a device."""
        device, weights = self.cluster.device_gib * GIB, int(self.memory.inference.max())
        return cache_room(
            self.config, self.table, self.infer, device, weights, self.max_model_len, stays_beside(self.phases)
        )

    @cached_property
    def host_nbytes(self) -> np.ndarray:
        """Host memory that is taken while vLLM generates, by host."""
        return np.bincount(self.cluster.hosts(self.world_size), weights=self.on_host).astype(np.int64)

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
        bucket = self.bucket_nbytes
        return plan_sides(self.source, self.destination, hosts, bucket, unserved, rank, relaying_hosts=relaying)


def plan_job(
    config: HybridConfig,
    world_size: int,
    cluster: Cluster | None = None,
    progress: Callable[[str], None] = lambda _: None,
    inference: Callable[[ModelTable, InferenceParallelism, str], SideLayout] = inference_side,
) -> JobPlan:
    """Lay out both sides, choose the order of ranks, count bytes.

    Args:
        config: checked for `world_size` ranks (`load_config`).
        cluster: what they run on; default: hosts of 8 H200.
        progress: is told what is being done.
        inference: lays out vLLM's side; whoever plans several jobs of a model may keep what it gave.

    Raises ConfigError where FSDP2 trains and transformers does not build the model, and for the order "auto" without
    scipy.
    """
    cluster, generate, dtype = cluster or Cluster(), config.generate_config, config.served_dtype
    table, hf_config = read_model(config.model)
    progress("laying out both sides")
    source, state, working = _training(config, world_size, table)
    infer = generate.sizes(world_size)
    positions = inference(table, infer, dtype)
    hosts, relaying = cluster.hosts(world_size), cluster.relaying_hosts(world_size)
    progress("counting bytes")
    sequential = summarize(source.holdings, positions.holdings, hosts, relaying)
    progress("choosing the order of ranks")
    try:
        chosen = rank_order(generate.infer_rank_order, source.holdings, positions.holdings, hosts, infer.tensor)
    except DependencyError as error:
        key, remedy = "generate_config.infer_rank_order", "Install it or set it to sequential"
        raise ConfigError([Violation(key, str(error), remedy)]) from error
    destination, moved = positions, sequential
    if chosen != tuple(range(world_size)):
        progress("counting bytes in that order")
        infer = replace(infer, rank_order=chosen)
        destination = inference_side(table, infer, dtype)
        moved = summarize(source.holdings, destination.holdings, hosts, relaying)
    if not cluster.has_elastic_buffers:
        state = state.leaving_whole()
    weights = destination.num_elements * DTYPE_NBYTES[dtype]
    progress("making buckets")
    bucket = largest_bucket(source, destination, generate.bucket_mb * MIB)
    critic = critic_memory(config, world_size)
    return JobPlan(
        config=config,
        table=table,
        train=config.train_sizes(world_size),
        infer=infer,
        cluster=cluster,
        source=source,
        destination=destination,
        bytes=moved,
        sequential=sequential,
        memory=MemoryPeaks(state, weights, bucket, keeps_inference=not generate.release_weights),
        phases=job_phases(config, state, weights, bucket, critic, working),
        working=working,
        on_host=host_bytes(state, critic, what_stays(config)) + copied_messages(config, cluster, moved),
        max_model_len=longest_sequence(config, hf_config),
    )


def _training(config: HybridConfig, world_size: int, table: ModelTable) -> tuple[SideLayout, TrainingMemory, Working]:
    """Compute the training layout and memory of every rank."""
    actor = config.actor_config
    if actor.fsdp is None:
        source, state = megatron_training(actor, table, world_size)
        return source, state, Working.of_megatron(config, table, world_size).by_rank(world_size)
    sizes, model = actor.fsdp.sizes(world_size), sharded_model(config, table)
    source = sharded_side(table, model, sizes, actor.params_dtype)
    memory = sharded_memory(source, model, sizes, actor.params_dtype)
    return source, memory, sharded_working(config, table, model).by_rank(world_size)


def sharded_model(config: HybridConfig, table: ModelTable) -> PackedModel:
    """Return the model that FSDP2 shards. Raises ConfigError where transformers does not build it."""
    try:
        from hybrid_engine.backends.fsdp.names import packed_model_of
    except ImportError as error:
        problem = f"how FSDP2 splits a model is asked of transformers and torch: {error}"
        raise ConfigError([Violation("actor_config.fsdp", problem, "Install both")]) from error
    return packed_model_of(config.model, table)


def sharded_working(config: HybridConfig, table: ModelTable, model: PackedModel) -> Working:
    """Return the estimates of any rank where FSDP2 trains; arrays of one element."""
    actor = config.actor_config
    activations = activation_nbytes(table, Step.of(actor, ShardedParallelism(1)))
    return Working(activations, np.zeros_like(activations), np.array([gathered_nbytes(model, actor)]))


def host_bytes(state: TrainingMemory, critic: TrainingMemory | None, stays: Stays) -> np.ndarray:
    """Return the bytes that go to host memory while vLLM generates; arrays as those of `state`."""
    kept = {"param": state.params, "optimizer": state.optimizer, "grad": state.copied - state.params - state.optimizer}
    copied = state.copied - sum((kept[kind] for kind in stays.kinds), np.zeros_like(state.copied))
    return copied if critic is None or stays.critic else copied + critic.copied


def copied_messages(config: HybridConfig, cluster: Cluster, moved: ByteSummary) -> np.ndarray:
    """Return the bytes of host memory by rank that hold the last messages, with `incremental: delta`."""
    between_hosts, on_host = moved.network + moved.sent_network, moved.host + moved.sent_host
    generate = config.generate_config
    if generate.incremental != "delta":
        return np.zeros_like(on_host)
    if generate.transport == "collective" or not cluster.has_elastic_buffers:
        return between_hosts + on_host
    return between_hosts


def longest_sequence(config: HybridConfig, hf_config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence, by the configuration or the model as vLLM takes it; 0: neither says."""
    found = hf_config.get("max_position_embeddings", hf_config.get("n_positions"))
    return config.generate_config.max_model_len or (found if isinstance(found, int) else 0)
