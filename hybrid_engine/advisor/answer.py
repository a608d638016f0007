"""The answer of `plan`: what a job plan says in numbers (`--json`), in a few sentences, and in tables."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.config.job_rules import what_stays
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.memory import GIB, MIB, gib
from hybrid_engine.layouts.parallelism import Parallelism, ShardedParallelism
from hybrid_engine.planning.plan import ByteCount, Link, ReshardPlan
from hybrid_engine.planning.planner import frozen_tensors
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import Holdings, SideLayout, first_members, rank_classes

GATHER = "gather of all weights, as verl and TRL"
"""Every rank receives all of each tensor that it does not hold (docs/comparison.md)."""


MinMeanMax = Mapping[str, float]
"""Smallest, mean and largest of a number that every rank or host has."""
Ranges = Mapping[str, MinMeanMax]
"""Numbers of bytes that every rank or host has, by name."""


@dataclass(frozen=True)
class Answer:
    """The answer of `plan`; `rank` (what one rank does) and `later` where they were asked for.

    `planning`: seconds, and the peak of the process in bytes. `remarks`: what of the configuration the numbers leave
    out, and why a job would refuse it.
    """

    job: JobPlan
    planning: Mapping[str, float]
    rank: Mapping[str, Any] | None = None
    later: LaterSwitches | None = None
    remarks: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """The content of `plan --json`."""
        of_rank = {} if self.rank is None else {"rank": self.rank}
        later = {} if self.later is None else {"later_switches": facts_of_later(self.later)}
        verdict = JobVerdict(self.job).as_dict()
        return {
            "verdict": verdict,
            **facts_of(self.job),
            "planning": self.planning,
            **of_rank,
            **later,
            "remarks": [*self.remarks],
        }


def range_of(values: np.ndarray) -> MinMeanMax:
    """Return smallest, mean and largest entry of an array by rank or host."""
    return {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}


def moved_bytes(summary: ByteSummary) -> Ranges:
    """Return the bytes of a switch by rank; `least`: no plan lets ranks receive less."""
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
    """Return the bytes that come to each host from others, and the least that must."""
    return _ranges(received=plan.received_by_host, least=plan.bytes.network_lower_bound)


def facts_of_later(later: LaterSwitches) -> dict[str, Any]:
    """Bytes by rank, and the key that they need."""
    return {"bytes": {**moved_bytes(later.bytes), **_ranges(kept=later.kept)}, "incremental_mb": later.incremental_mb}


def device_memory(plan: JobPlan) -> Ranges:
    """Return bytes of device memory by rank; see `MemoryPeaks` and `TrainingMemory`."""
    memory, state = plan.memory, plan.memory.state
    late = {} if state.inelastic is None else {"inelastic": state.inelastic}
    return _ranges(
        params=state.params,
        **late,
        grads=state.grads,
        optimizer=state.optimizer,
        training=state.total,
        activations=plan.working.activations,
        **({"gathered": plan.working.gathered} if plan.working.gathered.any() else {}),
        vllm_step=np.array([plan.cache.step]),
        inference=memory.inference,
        largest_bucket=np.array([memory.bucket]),
        switch=memory.switch,
        interleaved_switch=memory.interleaved_switch,
        peak=plan.peak,
    )


def host_memory(plan: JobPlan) -> Ranges:
    """Return bytes of host memory that offloaded state takes while vLLM generates, and copies of messages."""
    return _ranges(per_rank=plan.on_host, per_host=plan.host_nbytes)


def assumptions(plan: JobPlan) -> str:
    """Name, in sentences, the settings other than sizes on which the peaks of device memory depend."""
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
    dtype, params_dtype = plan.config.served_dtype, plan.config.actor_config.params_dtype
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
        "train": sizes_as_dict(plan.train),
        "infer": sizes_as_dict(plan.infer),
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


def facts_of_rank(plan: ReshardPlan, rank: int, planning_seconds: float) -> dict[str, Any]:
    """Return the numbers of one rank's plan; bytes by link. `staging`: memory of its messages between hosts."""
    transfers = list(plan.transfers())
    count = plan.bytes_by_rank.get(rank, ByteCount(0, 0, 0, 0))
    sent = dict.fromkeys((Link.HOST.value, Link.NETWORK.value), 0)
    for each in transfers:
        if each.src_rank == rank and each.link is not Link.SELF:
            sent[each.link.value] += each.nbytes
    return {
        "rank": rank,
        "transfers": len(transfers),
        "buckets": len(plan.buckets),
        "received": {Link.SELF.value: count.own, Link.HOST.value: count.host, Link.NETWORK.value: count.network},
        "sent": sent,
        "staging": staging_nbytes(plan.buckets, plan.relays, rank),
        "peers": len({end for each in transfers for end in (each.src_rank, each.dst_rank)} - {rank}),
        "planning_seconds": planning_seconds,
    }


def _ranges(**values: np.ndarray) -> Ranges:
    return {name: range_of(each) for name, each in values.items()}


def sizes_as_dict(sizes: Parallelism | ShardedParallelism) -> dict[str, Any]:
    """Return the sizes that differ from their defaults, by attribute, and the data parallel size."""
    defaults = asdict(type(sizes)(world_size=sizes.world_size))
    changed = {name: value for name, value in asdict(sizes).items() if value != defaults[name]}
    shards = {"num_shards": sizes.num_shards} if isinstance(sizes, ShardedParallelism) else {}
    return {**shards, **changed, "data": sizes.data}


# -- later switches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LaterSwitches:
    """The cost of each switch after the first where some weights are frozen, with `incremental: auto`; with `delta`,
    the most, as what it saves between hosts depends on the values.

    Attributes:
        kept: bytes of inference weights that stay on each device while it trains, of which `incremental_mb` must be the
            largest at least; int array by rank.
        bytes: of the rest, which is sent.
    """

    kept: np.ndarray
    bytes: ByteSummary

    @property
    def incremental_mb(self) -> int:
        """The smallest value of the key with which all of it stays."""
        return -(-int(self.kept.max()) // MIB)


def later_switches(job: JobPlan, patterns: Sequence[str]) -> LaterSwitches:
    """Count the later switches of a job whose canonical tensors with these names (`*`, `?`) are frozen.

    A frozen tensor that vLLM commits together with a trained one is sent with it. Raises ConfigError for a pattern that
    matches nothing.
    """
    source, destination = job.source.holdings, job.destination.holdings
    unknown = [pattern for pattern in patterns if not fnmatch.filter(source.owners, pattern)]
    if unknown:
        remedy = "Use names of the checkpoint, as in model.safetensors.index.json"
        raise ConfigError([Violation("--frozen", f"no tensor matches {pattern}", remedy) for pattern in unknown])
    frozen = {name for pattern in patterns for name in fnmatch.filter(source.owners, pattern)}
    apart = frozen_tensors(job.source, job.destination, frozen, job.bucket_nbytes)
    hosts, relaying = job.cluster.hosts(job.world_size), job.cluster.relaying_hosts(job.world_size)
    sent = summarize(_without(source, apart), _without(destination, apart), hosts, relaying)
    return LaterSwitches(_nbytes_by_rank(job.destination, apart), sent)


def _without(holdings: Holdings, names: Collection[str]) -> Holdings:
    return replace(
        holdings,
        dtypes={name: dtype for name, dtype in holdings.dtypes.items() if name not in names},
        owners={name: owners for name, owners in holdings.owners.items() if name not in names},
    )


def _nbytes_by_rank(side: SideLayout, names: Collection[str]) -> np.ndarray:
    """Return the bytes by rank of the buffers that these tensors lie in, padding included."""
    classes = rank_classes(side.holdings)
    nbytes = []
    for rank in first_members(classes).tolist():
        buffers = {shard.place.buffer: buffer for name in names for shard, buffer in side.shards_of(rank, name)}
        nbytes.append(sum(buffer.nbytes for buffer in buffers.values()))
    return np.array(nbytes, dtype=np.int64)[classes]


# -- sentences --------------------------------------------------------------------------------------------------------


LEFT_OUT = ("CUDA context", "communicators", "workspaces of libraries", "captured graphs")
"""Uses of device memory that the peak does not count."""
_WHEN = {"train": "while training", "switch": "at the switch", "generate": "while vLLM generates"}
_LARGER_VLLM = "a larger infer_tensor_parallel_size or infer_pipeline_parallel_size"
_PHASES = {"train": "training"}
"""Their names in `plan --json`, where they differ."""


@dataclass(frozen=True)
class JobVerdict:
    """Decides whether a job can run as planned, by the bytes of the rank that has most."""

    job: JobPlan

    @property
    def fits(self) -> bool:
        """On the device, within vLLM's share of it, and on the host where its size is known."""
        return self.job.fits_device and self.job.cache.fits and self.job.fits_host is not False

    def sentences(self) -> dict[str, str]:
        """Heading -> what is to be said under it."""
        places = [(self.job.fits_device, self._of_device())]
        if not self.job.cache.fits:
            places.append((False, self._of_cache()))
        if self.job.fits_host is not None:
            places.append((self.job.fits_host, self._of_host()))
        fits = "; ".join(text for _, text in sorted(places, key=lambda place: place[0])) + "."
        return {
            "Fits" if self.fits else "Does not fit": fits,
            **({"Cache": f"{self._of_cache()}."} if self.job.cache.fits else {}),
            "Left out": self._left_out(),
            "Moves": self._moved(),
            "Takes": self._time(),
        }

    def as_dict(self) -> dict[str, Any]:
        """The part of `plan --json` of this name, in bytes."""
        return {
            "fits": self.fits,
            "room": self.job.left,
            "room_for_cache": self.job.cache.room,
            "cache_tokens": self.job.cache.num_tokens,
            "gpu_memory_utilization": self.job.cache.utilization,
            "least_gpu_memory_utilization": self.job.cache.needed,
            "peak_during": _PHASES.get(self.job.fullest_phase, self.job.fullest_phase),
            "left_out": list(LEFT_OUT),
        }

    def _of_device(self) -> str:
        phase, left = self.job.fullest_phase, self.job.left
        size = f"{self.job.cluster.device_gib:g} GiB"
        when = _WHEN.get(phase, f"in the phase {phase}")
        peak = f"the peak of {gib(self.job.taken[phase])} on a device, {when},"
        if left < 0:
            return f"{peak} is {gib(-left)} more than its {size}: {self._remedy(phase)}"
        return f"{peak} leaves {gib(left)} of its {size}"

    def _remedy(self, phase: str) -> str:
        """Name what makes a phase smaller that does not fit: first what stays in it, then sizes of what needs most."""
        actor, memory = self.job.config.actor_config, self.job.memory
        remedies = []
        if phase in ("switch", "generate"):
            remedies += self._leaving()
        elif "vLLM" in self.job.phases[phase].by_model:
            remedies.append("release vLLM's weights (release_weights: true, incremental: off)")
        if phase in ("switch", "generate") and memory.inference.max() > memory.state.params.max():
            remedies.append(f"use {_LARGER_VLLM}")
        elif actor.fsdp is not None:
            remedies.append("use more ranks, or a smaller micro_batch_size")
        else:
            expert = ", expert_model_parallel_size" * bool(self.job.table.dims.num_experts)
            sizes = f"tensor_model_parallel_size, pipeline_model_parallel_size{expert}"
            remedies.append(f"use more ranks, a larger {sizes}, or recompute_granularity: full")
        return ", or ".join(remedies)

    def _leaving(self) -> list[str]:
        """Name the keys by which what stays of training leaves the device."""
        stays = what_stays(self.job.config)
        keys = [f"offload_train_{kind}: true" for kind in sorted(stays.kinds)]
        keys += ["critic_config.offload: true"] * stays.critic
        return [f"offload training ({', '.join(keys)})"] if keys else []

    def _of_host(self) -> str:
        largest, size = gib(self.job.host_nbytes.max()), f"{self.job.cluster.host_gib:g} GiB"
        fits = "fit" if self.job.fits_host else "do not fit"
        copies = " and copies of messages" * (self.job.config.generate_config.incremental == "delta")
        return f"{largest} of offloaded training state{copies} {fits} a host of {size}"

    def _of_cache(self) -> str:
        cache = self.job.cache
        taken = f"weights of {gib(cache.weights)}, a step of {gib(cache.step)}"
        share = f"vLLM's {gib(cache.share)} (gpu_memory_utilization {cache.utilization:g})"
        if cache.given is not None:
            share = f"vLLM's weights, step and kv_cache_mb, {gib(cache.weights + cache.step + cache.given)},"
        if cache.room <= 0:
            found = f"{share} are less than {taken}"
        else:
            found = f"{share} hold {taken}, and a KV cache of {gib(cache.room)}: {cache.num_tokens:,} tokens"
            if cache.longest:
                found += f", {cache.num_sequences:.3g} sequences of {cache.longest:,}"
        if cache.fits:
            return found
        if cache.given is not None:
            return f"{found}; set kv_cache_mb for one sequence of max_model_len, within the device"
        most = 1 - cache.beside / cache.device
        beside = f" beside {gib(cache.beside)} of training, which stay" * (cache.beside > 0)
        if cache.needed > most:
            remedies = [] if cache.needed > 1 else self._leaving()  # vLLM would start without them
            remedy = ", or ".join(remedies or [f"use {_LARGER_VLLM}", "a lower max_model_len"])
            return f"{found}. No share of the device is enough{beside}: {remedy}"
        if cache.utilization > most:
            return f"{found}; it starts with at most {int(100 * most) / 100:g}{beside}"
        return f"{found}; it starts from {cache.needed:g}, or with a lower max_model_len"

    def _left_out(self) -> str:
        return f"the peak does not count {', '.join(LEFT_OUT[:-1])} and {LEFT_OUT[-1]}."

    def _moved(self) -> str:
        moved, gathered = self.job.bytes, float(self.job.gathered.mean())
        received, least = float(moved.received.mean()), float(moved.lower_bound.mean())
        if received > least:
            text = f"{gib(received)} to a rank on average, {gib(received - least)} more than the least possible"
        else:
            text = f"{gib(received)} to a rank on average, the least that these two layouts allow"
        if gathered and (saved := 1 - received / gathered) >= 0.005:
            text += f", {saved:.0%} less than all weights on every rank ({gib(gathered)})"
        return f"{text}."

    def _time(self) -> str:
        seconds = self.job.seconds
        return (
            f"{seconds.max():.3g} s for the transfers of the slowest rank ({seconds.mean():.3g} s on average), at link "
            "speeds that are assumed, not measured."
        )


# -- tables -----------------------------------------------------------------------------------------------------------


UNITS = "GiB are 2^30 bytes, MiB 2^20; min, mean and max are over ranks, or over hosts where a row says so."


@dataclass(frozen=True)
class Unit:
    """The unit of a job's tables."""

    name: str
    nbytes: int

    @classmethod
    def of(cls, job: JobPlan) -> Unit:
        """MiB for a job of which a GiB would be little to see, as for a model for trials; else GiB."""
        return cls("GiB", GIB) if float(job.memory.device.max()) >= GIB / 10 else cls("MiB", MIB)

    def number(self, nbytes: float) -> str:
        """Bytes in this unit."""
        size = nbytes / self.nbytes
        return f"{size:.3f}" if abs(size) >= 1e-3 or nbytes == 0 else f"{size:.3g}"

    def numbers(self, values: MinMeanMax) -> list[str]:
        """Min, mean and max in this unit."""
        return [self.number(values[name]) for name in ("min", "mean", "max")]


@dataclass(frozen=True)
class Section:
    """A table: label of a row -> its numbers; `note` explains what is not plain."""

    title: str
    rows: Mapping[str, list[str]]
    note: str = ""


def sections_of(answer: Answer) -> Iterator[Section]:
    """Yield the tables of an answer in reading order."""
    job = answer.job
    yield _moved(job)
    yield _memory(job)
    if answer.later is not None:
        yield _later(answer.later, job)


_PART = "  of it "
_MOVED: Mapping[str, str] = {
    "received": "received from other ranks",
    "received_same_host": "from the same host",
    "received_across_hosts": "from other hosts",
    "least": "least that a rank must receive",
    "copied_on_the_rank": "copied within the rank",
    "sent": "sent to other ranks",
    "sent_same_host": "to the same host",
    "sent_across_hosts": "to other hosts",
}
_IS_PART = {"received_same_host", "received_across_hosts", "sent_same_host", "sent_across_hosts", "inelastic"}


def _rows(numbers: Ranges, labels: Mapping[str, str], unit: Unit) -> dict[str, list[str]]:
    return {
        _PART * (name in _IS_PART) + label: unit.numbers(numbers[name])
        for name, label in labels.items()
        if name in numbers
    }


def _moved(job: JobPlan) -> Section:
    unit = Unit.of(job)
    hosts = len(set(job.cluster.hosts(job.world_size)))
    across = bytes_across_hosts(job)
    rows = _rows(moved_bytes(job.bytes), _MOVED, unit) | {
        "received by a host from other hosts": unit.numbers(across["received"]),
        "least that a host must receive": unit.numbers(across["least"]),
        "received, with infer_rank_order: sequential": unit.numbers(range_of(job.sequential.received)),
        f"received by a {GATHER}": unit.numbers(range_of(job.gathered)),
    }
    title = f"What a switch moves, {unit.name} by rank; {job.world_size:,} ranks, hosts: {hosts:,}"
    return Section(
        title, rows, "Least: what is needed in generation and not held in training; no plan can receive less."
    )


def _memory(job: JobPlan) -> Section:
    labels = {
        "params": "parameters",
        "inelastic": "leaving only at the end of a switch",
        "grads": "gradients",
        "optimizer": "optimizer state",
        "training": "training state: these three",
        "activations": "activations of a step, estimated",
        "gathered": "gathered by FSDP2, with gradients",
        "inference": "vLLM's weights",
        "vllm_step": "vLLM's largest step, estimated",
        "largest_bucket": "largest bucket of a switch",
        "switch": "a switch, if vLLM's weights came all at once",
        "interleaved_switch": "a switch, as it is" + ": bucket by bucket" * (not job.memory.keeps_inference),
        "peak": "device peak, without the KV cache",
    }
    unit, host = Unit.of(job), host_memory(job)
    rows = _rows(device_memory(job), labels, unit) | {
        "host memory while generating": unit.numbers(host["per_rank"]),
        "the same, by host": unit.numbers(host["per_host"]),
    }
    note = (
        "A switch bucket by bucket takes the larger of parameters and vLLM's weights, and two buckets. All experts of "
        "a layer are in one bucket, which may be larger than bucket_mb. The peak is the most of any phase "
        f"({', '.join(job.phases)}), with what the configuration leaves on the device."
    )
    return Section(f"Memory, {unit.name} by rank", rows, note)


def _later(later: LaterSwitches, job: JobPlan) -> Section:
    unit, is_delta = Unit.of(job), job.config.generate_config.incremental == "delta"
    keys = f"incremental: {'delta' if is_delta else 'auto'} and incremental_mb: {later.incremental_mb}"
    kept = {"kept on the device": unit.numbers(range_of(later.kept))}
    note = "At most: delta sends less of what changed between hosts, by how many values did." * is_delta
    title = f"Later switches, {unit.name} by rank, with {keys}"
    return Section(title, _rows(moved_bytes(later.bytes), _MOVED, unit) | kept, note)
