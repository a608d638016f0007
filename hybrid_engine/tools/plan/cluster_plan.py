"""Plan of a job on a cluster: both layouts, transfers, memory, and time.

load_config(YAML, number of ranks)  ->  plan_job(config, number of ranks, cluster)  ->  JobPlan
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from hybrid_engine.config import ActorConfig, HybridConfig
from hybrid_engine.config.job_rules import critic_of, megatron_training, what_stays
from hybrid_engine.config.rules import JobContext
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.kv_cache import LayerCache, layer_caches, sequence_nbytes
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
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
)
from hybrid_engine.layouts.sharded import PackedModel, sharded_side
from hybrid_engine.models.config_json import longest_of
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Link, ReshardPlan, link_seconds
from hybrid_engine.planning.planner import largest_bucket, plan_sides
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.tools.plan.activations import (
    Step,
    activation_nbytes,
    gathered_nbytes,
    step_tokens,
    vllm_step_nbytes,
)
from hybrid_engine.tools.plan.traced_side import traced_positions, traced_side

UNKNOWN_LENGTH = 2048
"""Tokens of the longest sequence that vLLM assumes if config.json has no key for it."""
_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

LINK_GBPS: Mapping[Link, float] = {Link.SELF: 2000.0, Link.HOST: 400.0, Link.NETWORK: 45.0}
"""Assumed rates of one rank in each direction, in gigabytes (10^9 bytes) per second.

They are somewhat below the nominal rates of a copy within an H200's memory, NVLink 4, and one
400 Gbit/s adapter for each GPU."""

PCIE_GBPS = 55.0
"""10^9 bytes per second to and from page-locked host memory, as measured on an H100 and an H200."""
BUCKET_SECONDS = 280e-6
"""Seconds of the host for a bucket beside its copies, fitted to two fills on an H100."""

DEVICE_GIB: Mapping[str, float] = {
    "a100-40": 39.3,
    "a100-80": 79.1,
    "l40s": 44.3,
    "h100": 79.1,
    "h200": 139.7,
    "b200": 178.3,
}
"""Device -> memory in GiB as CUDA reports it, less than the nominal size.

Boards of one name differ by about 0.2 GiB."""
RESERVE_GIB = 6.0
"""Largest estimate of what no plan counts on a device, in GiB.

It is memory of CUDA contexts, communicators, libraries' workspaces, and captured graphs. Contexts,
communicators and remains of an offload took 3.4 GiB of an H200, beside vLLM's share
(tests/gpu/sizes.py)."""


@dataclass(frozen=True)
class Cluster:
    """Hosts, devices and links of a job.

    Attributes:
        ranks_per_host: number of consecutive ranks on each host.
        device_gib: memory of one device.
        host_gib: memory of one host; None: not checked.
        link_gbps: 10^9 bytes per second of one rank, by link.
        has_elastic_buffers: training buffers release memory page by page, and peers on a host can
            read them; on GPUs this needs cuda-bindings.
        reserve_gib: memory of a device below which a job that fits is called tight.
    """

    ranks_per_host: int = 8
    device_gib: float = DEVICE_GIB["h200"]
    host_gib: float | None = None
    link_gbps: Mapping[Link, float] = field(default_factory=lambda: LINK_GBPS)
    has_elastic_buffers: bool = True
    reserve_gib: float = RESERVE_GIB

    def hosts(self, num_ranks: int) -> list[int]:
        """Return the host number of every rank."""
        return [rank // self.ranks_per_host for rank in range(num_ranks)]

    def relaying_hosts(self, num_ranks: int) -> set[int]:
        """Return the hosts that receive each byte only once, for all their ranks.

        Their ranks read it from each other's memory.
        """
        return set(self.hosts(num_ranks)) if self.has_elastic_buffers else set()


@dataclass(frozen=True)
class CacheRoom:
    """Room for the KV cache in vLLM's share of a device, on the rank with the least, in bytes.

    vLLM does not start unless one sequence of `max_model_len` fits. Captured graphs also take
    memory from the share, which is not known here.

    Attributes:
        device: memory of the device.
        utilization: vLLM's fraction of it.
        weights: bytes of vLLM's weights.
        step: estimated bytes of vLLM's largest step.
        layers: caches of the layers of the fullest pipeline stage.
        in_flight: tokens of all scheduled steps, which windows cache in addition.
        longest: tokens of the longest sequence (`max_model_len`).
        given: size of the cache if the configuration sets it (`kv_cache_mb`), independent of the
            share.
        beside: bytes of training state that stay on the device while vLLM generates.
    """

    device: float
    utilization: float
    weights: int
    step: int
    layers: tuple[LayerCache, ...]
    in_flight: int
    longest: int
    given: int | None = None
    beside: int = 0

    @property
    def share(self) -> int:
        """Bytes of vLLM's share of the device, rounded as in vLLM (`request_memory`)."""
        return math.ceil(self.device * self.utilization)

    @property
    def room(self) -> float:
        """Bytes left for the cache; negative if weights and a step alone do not fit."""
        return self.share - self.weights - self.step if self.given is None else self.given

    @property
    def sequence(self) -> int:
        """Bytes that vLLM requires for one longest sequence: it may be computed in few steps."""
        return sequence_nbytes(self.layers, self.longest, self.in_flight)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit in the cache, in longest sequences."""
        cached = sequence_nbytes(self.layers, self.longest)
        beyond_windows = self.sequence - cached
        # In units of longest sequences, since a window caches the same for 5,000 and 50,000 tokens.
        # A longest sequence of 1,000 tokens in 10 MB and a room of 25 MB make 2,500 tokens.
        return max(0, int(self.room - beyond_windows)) * self.longest // max(1, cached)

    @property
    def needed(self) -> float:
        """Smallest sufficient fraction of the device, in steps of 0.01; above 1 if none is."""
        least = self.weights + self.step + self.sequence
        return math.ceil(100 * least / self.device) / 100

    @property
    def taken(self) -> float:
        """Bytes used on the device during generation, by vLLM and training state that stays."""
        # vLLM takes its share whole: what weights and a step leave becomes cache.
        vllm = self.share if self.given is None else self.weights + self.step + self.given
        return vllm + self.beside

    @property
    def left(self) -> float:
        """Bytes left for the cache beyond one longest sequence, or on the device if fewer.

        vLLM does not start if they are negative.
        """
        return min(self.room - self.sequence, self.device - self.taken)


@dataclass(frozen=True, eq=False)
class JobPlan:
    """Layouts, traffic and memory of a job; arrays are by rank.

    Attributes:
        config: configuration of the job.
        table: parameter table of its model.
        train, infer: parallel sizes; `infer.rank_order` is the chosen order, None if sequential.
        cluster: hosts, devices and links.
        source, destination: layouts of both sides.
        bytes: bytes of a switch in the chosen order.
        sequential: bytes of a switch in sequential order.
        memory: training state, and peaks of a switch alone.
        phases: phase of the job -> bytes on a device, with all state that the configuration keeps
            there.
        activations: estimated activations of a training step of the actor.
        gathered_in_step: estimated bytes of parameters and gradients that FSDP2 gathers; else 0.
        stays: state that stays on the device.
        on_host: bytes of offloaded state in host memory while vLLM generates, and of copies of
            messages.
        stage_caches: caches of the layers of every stage.
        max_model_len: tokens of the longest sequence that vLLM serves.
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
    activations: np.ndarray
    gathered_in_step: int
    stays: Stays
    on_host: np.ndarray
    stage_caches: Sequence[tuple[LayerCache, ...]]
    max_model_len: int

    @property
    def world_size(self) -> int:
        return self.infer.world_size

    @property
    def hosts(self) -> list[int]:
        """Host number of every rank."""
        return self.cluster.hosts(self.world_size)

    @property
    def bucket_nbytes(self) -> int:
        """Bytes at which the planner closes a bucket."""
        return self.config.generate_config.bucket_mb * MIB

    @property
    def model_nbytes(self) -> int:
        """Bytes of all tensors that vLLM serves, without replicas."""
        return self.destination.model_nbytes

    @cached_property
    def seconds(self) -> np.ndarray:
        """Estimated seconds of each rank's transfers: links in turn, by the larger direction."""
        moved = self.bytes
        # Links carry both directions at once.
        nbytes = {
            Link.SELF: moved.own,
            Link.HOST: np.maximum(moved.host, moved.sent_host),
            Link.NETWORK: np.maximum(moved.network, moved.sent_network),
        }
        return link_seconds(nbytes, self.cluster.link_gbps)

    @cached_property
    def switch_seconds(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Estimated seconds of each rank's switches, and those of links and PCIe in them.

        On the way to vLLM optimizer state leaves first, then parameters while they are read, but
        for those that leave whole at the end. If both sides share memory (memory/pool.py), only
        what neither gradients nor the KV cache have room for leaves first, and the rest behind
        generation. On the way back parameters come first, the rest behind the next training step.
        """

        def pcie_seconds(nbytes: Any) -> np.ndarray:
            return np.zeros(self.world_size) + nbytes / PCIE_GBPS / 1e9

        state = self.memory.state
        kept = self.stays.kinds | self.stays.fitting
        kinds = copied_kinds(state, kept)
        params = pcie_seconds(kinds.get("param", 0))
        first = pcie_seconds(kinds.get("optimizer", 0))
        inelastic = 0 if state.inelastic is None else state.inelastic
        # No more than leaves at all: parameters that stay have no copy to wait for.
        late = np.minimum(params, pcie_seconds(inelastic))
        meanwhile = params - late
        if self.cluster.has_elastic_buffers and self.config.generate_config.incremental == "off":
            dropped = 0 if "grad" in kept else state.grads
            beyond_gradients = pcie_seconds(np.maximum(self.memory.inference - dropped, 0))
            cached = pcie_seconds(max(self.cache.room, 0))
            # In shared memory, training state can stay where the KV cache will be, until
            # generation. Only the rest has to leave first, and of that no more than vLLM's weights
            # need beyond the gradients.
            first = np.clip(params + first - cached, 0, beyond_gradients)
            meanwhile = 0 * params
        # PCIe and the links between ranks work at the same time.
        copies = first + np.maximum(self.seconds, meanwhile) + late
        num_buckets = -(-self.memory.inference // self.bucket_nbytes)
        return {
            "to_vllm": (copies + num_buckets * BUCKET_SECONDS, copies),
            "to_training": (params, params),
        }

    @cached_property
    def received_by_host(self) -> np.ndarray:
        """Bytes that each host receives from others; int array by host."""
        return self._by_host(self.bytes.network)

    def _by_host(self, nbytes: np.ndarray) -> np.ndarray:
        return np.bincount(self.hosts, weights=nbytes).astype(np.int64)

    @cached_property
    def gathered(self) -> np.ndarray:
        """Bytes that each rank would receive in a gather of all parameters on every rank."""
        return self.source.model_nbytes - self.source.nbytes_by_rank()

    @cached_property
    def peak(self) -> np.ndarray:
        """Peak bytes of each device over all phases, without vLLM's KV cache."""
        return np.max([phase.total for phase in self.phases.values()], axis=0)

    @cached_property
    def taken(self) -> dict[str, float]:
        """Phase -> bytes on the device with most; `generate` has vLLM's share if vLLM starts."""
        taken = {name: float(phase.total.max()) for name, phase in self.phases.items()}
        if self.cache.left >= 0:
            taken["generate"] = max(taken["generate"], self.cache.taken)
        return taken

    @property
    def fullest_phase(self) -> str:
        """Phase with the largest use of a device."""
        return max(self.taken, key=self.taken.__getitem__)

    @cached_property
    def left(self) -> dict[str, float]:
        """Place -> bytes left in it, negative if it has too few.

        The places are "Device" in its fullest phase, "Cache" of vLLM with one longest sequence in
        it, and "Host", if its size is known.
        """
        device = self.cluster.device_gib * GIB - self.taken[self.fullest_phase]
        left = {"Device": device, "Cache": self.cache.left}
        if self.cluster.host_gib is not None:
            left["Host"] = self.cluster.host_gib * GIB - self.host_nbytes.max().item()
        return left

    @property
    def verdict(self) -> tuple[str, list[str]]:
        """Verdict "fits", "tight" or "does not fit", and the places that decide it.

        A job is tight if a device, or vLLM's share of it, has less left than the reserve.
        """
        if lacking := [place for place, nbytes in self.left.items() if nbytes < 0]:
            return "does not fit", lacking
        spare = {"Device": self.left["Device"]}
        if self.cache.given is None:  # else what is not counted takes nothing from the cache
            spare["Cache"] = self.cache.room - self.cache.sequence
        reserve = self.cluster.reserve_gib * GIB
        if short := [place for place, nbytes in spare.items() if nbytes < reserve]:
            return "tight", short
        return "fits", ["Device"]

    @cached_property
    def cache(self) -> CacheRoom:
        """Room for the KV cache in vLLM's share of a device."""
        generate = self.config.generate_config
        itemsize = DTYPE_NBYTES[self.config.served_dtype]
        device = self.cluster.device_gib * GIB
        # vLLM has one number of blocks on all stages, so the stage with most bytes per sequence
        # decides.
        layers = max(self.stage_caches, key=partial(sequence_nbytes, length=self.max_model_len))
        if str(generate.vllm.get("kv_cache_dtype", "auto")).startswith("fp8"):
            # 8 bits: one byte where the served dtype has `itemsize`.
            layers = tuple(
                replace(layer, per_token=layer.per_token // itemsize) for layer in layers
            )
        cache_mb = generate.kv_cache_mb
        in_phase = self.phases["generate"].by_model
        training = [nbytes for model, nbytes in in_phase.items() if model != "vLLM"]
        return CacheRoom(
            device=device,
            utilization=generate.gpu_memory_utilization,
            weights=int(self.memory.inference.max()),
            step=vllm_step_nbytes(self.table, self.infer, generate, itemsize, device),
            layers=layers,
            # vLLM schedules a step per stage while one ends.
            in_flight=(self.infer.pipeline + 1) * step_tokens(generate, device),
            longest=self.max_model_len,
            given=None if cache_mb is None else cache_mb * MIB,
            beside=int(np.max(sum(training), initial=0)),
        )

    @cached_property
    def host_nbytes(self) -> np.ndarray:
        """Bytes of host memory used while vLLM generates; int array by host."""
        return self._by_host(self.on_host)

    def plan_of(self, rank: int) -> ReshardPlan:
        """Return all transfers of one rank."""
        return plan_sides(
            self.source,
            self.destination,
            self.hosts,
            self.bucket_nbytes,
            [name for name in self.table.shapes if not self.table.is_served(name)],
            rank,
            relaying_hosts=self.cluster.relaying_hosts(self.world_size),
        )


def plan_job(
    config: HybridConfig,
    world_size: int,
    cluster: Cluster | None = None,
    num_mtp_layers: int | None = None,
) -> JobPlan:
    """Lay out both sides, choose the order of ranks, and count bytes and memory.

    Args:
        config: configuration, checked for `world_size` ranks (`load_config`).
        world_size: number of ranks.
        cluster: hosts, devices and links; default: hosts of 8 H200.
        num_mtp_layers: see `load_config`.

    Raises:
        ConfigError: if FSDP2 trains and transformers cannot build the model, and as
            `traced_positions` for a model without a name table.
        DependencyError: for the order "auto" without scipy.
        ModelError: vLLM cannot construct such a model without memory.
    """
    cluster = cluster or Cluster()
    generate = config.generate_config
    dtype = config.served_dtype
    table = JobContext.of(config, world_size, num_mtp_layers).table
    source, state, gathered = _training(config, world_size, table)
    train = config.train_sizes(world_size)
    infer = generate.sizes(world_size)
    hosts = cluster.hosts(world_size)
    lay_out: Callable[[InferenceParallelism], SideLayout]
    if table.is_derived:
        # How vLLM divides it among stages and what its layers cache is in no rule.
        traced = traced_positions(config, table, infer, len(set(hosts)))
        lay_out = partial(traced_side, traced, source.shapes)
        cached = [planned.caches for planned in traced]
        longest = traced[0].max_model_len
    else:
        lay_out = partial(inference_side, table, dtype=dtype)
        cached = layer_caches(table, infer, DTYPE_NBYTES[dtype])
        longest = longest_sequence(config)
    positions = lay_out(infer)
    relaying = cluster.relaying_hosts(world_size)
    sequential = summarize(source, positions, hosts, relaying)
    order = rank_order(generate.infer_rank_order, source, positions, hosts, infer.tensor)
    # Sequential order needs no second layout.
    destination = positions
    moved = sequential
    if order != tuple(range(world_size)):
        infer = replace(infer, rank_order=order)
        destination = lay_out(infer)
        moved = summarize(source, destination, hosts, relaying)
    if not cluster.has_elastic_buffers:
        state = state.leaving_whole()
    weights = destination.num_elements * DTYPE_NBYTES[dtype]
    bucket = largest_bucket(source, destination, generate.bucket_mb * MIB)
    critic = None
    activations = _activations(config.actor_config, table, train)
    steps = {"train": activations + gathered}
    if config.critic_config is not None:
        model = critic_of(config, world_size)
        _, critic, gathered_by_critic = _training(model.alone, world_size, model.table)
        sizes = model.alone.train_sizes(world_size)
        steps["critic train"] = _activations(model.actor, model.table, sizes) + gathered_by_critic
    keeps_inference = not generate.release_weights
    stays = what_stays(config, state, critic, cluster.device_gib * GIB)
    # Gradients are among them only where they are copied.
    on_host = sum(copied_kinds(state, stays.kinds).values(), np.zeros_like(state.copied))
    if critic is not None and not stays.critic:
        on_host = on_host + critic.copied
    phases = dict(plan_memory(state, weights, bucket, critic, stays=stays).phases)
    del phases["reference"]  # no configuration says whether there is one
    for name, nbytes in steps.items():
        by_model = {**phases[name].by_model, "activations": nbytes}
        phases[name] = replace(phases[name], by_model=by_model)
    return JobPlan(
        config=config,
        table=table,
        train=train,
        infer=infer,
        cluster=cluster,
        source=source,
        destination=destination,
        bytes=moved,
        sequential=sequential,
        memory=MemoryPeaks(state, weights, bucket, keeps_inference=keeps_inference),
        phases=phases,
        activations=activations,
        gathered_in_step=gathered,
        stays=stays,
        on_host=on_host,
        stage_caches=cached,
        max_model_len=longest,
    )


def _training(
    config: HybridConfig,
    world_size: int,
    table: ModelTable,
) -> tuple[SideLayout, TrainingMemory, int]:
    """Return the training layout, its memory, and the bytes that FSDP2 gathers in a step."""
    actor = config.actor_config
    if actor.fsdp is None:
        return *megatron_training(actor, table, world_size), 0
    sizes = actor.fsdp.sizes(world_size)
    model = sharded_model(config, table)
    source = sharded_side(table, model, sizes, actor.params_dtype)
    state = sharded_memory(source, model, sizes, actor.params_dtype)
    return source, state, gathered_nbytes(model, actor)


def _activations(
    actor: ActorConfig,
    table: ModelTable,
    sizes: TrainParallelism | ShardedParallelism,
) -> np.ndarray:
    """Return the activations of a training step by rank; the ranks of a stage are consecutive."""
    by_stage = activation_nbytes(table, Step.of(actor, sizes))
    # FSDP2's ranks are all alike: one stage.
    return np.repeat(by_stage, sizes.world_size // len(by_stage))


def sharded_model(config: HybridConfig, table: ModelTable) -> PackedModel:
    """Return the model that FSDP2 shards. Raises ConfigError if transformers cannot build it."""
    try:
        from hybrid_engine.backends.fsdp.names import packed_model_of
    except ImportError as error:
        raise ConfigError.of(
            "actor_config.fsdp",
            f"transformers and torch determine how FSDP2 splits a model: {error}",
            "Install both",
            code="needs-package",
        ) from error
    return packed_model_of(config.model, table)


def copied_kinds(state: TrainingMemory, stays: Collection[str]) -> dict[str, np.ndarray]:
    """Return kind of training state that leaves the device -> bytes copied to host memory."""
    nbytes = {
        "param": state.params,
        "optimizer": state.optimizer,
        # Megatron drops gradients, so this is 0 there; FSDP2 copies them.
        "grad": state.copied - state.params - state.optimizer,
    }
    return {kind: copied for kind, copied in nbytes.items() if kind not in stays}


def longest_sequence(config: HybridConfig) -> int:
    """Return the tokens of the longest sequence that vLLM accepts.

    Raises ConfigError if the configuration has more than the model, which vLLM refuses.
    """
    generate = config.generate_config
    longest = generate.max_model_len
    limit = longest_of(config.hf_config())
    if longest is None:
        return limit or UNKNOWN_LENGTH
    is_overridden = "hf_overrides" in generate.vllm or os.environ.get(_LONGER) == "1"
    if limit is not None and longest > limit and not is_overridden:
        raise ConfigError.of(
            "generate_config.max_model_len",
            f"{longest:,} tokens, but the model has {limit:,} positions (config.json)",
            f"Lower it; vLLM takes longer sequences with {_LONGER}=1 only",
            code="out-of-range",
        )
    return longest
