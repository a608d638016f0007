"""Answer of `plan`: a job plan as numbers (`--json`), as sentences of a verdict, and as tables."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.memory import GIB, MIB, gib
from hybrid_engine.layouts.parallelism import Parallelism, ShardedParallelism
from hybrid_engine.planning.planner import frozen_tensors
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import Holdings, SideLayout, first_members, rank_classes
from hybrid_engine.tools.plan.cluster_plan import JobPlan

GATHER = "gather of all weights, as verl and TRL"
"""Label of a gather, in which every rank receives the parts of all tensors that it lacks.

See docs/comparison.md."""

MinMeanMax = Mapping[str, float]
"""Smallest, mean and largest value over ranks or hosts."""
Ranges = Mapping[str, MinMeanMax]
"""Name -> bytes over ranks or hosts."""


@dataclass(frozen=True)
class Answer:
    """Answer of `plan`.

    Attributes:
        job: the planned job.
        planning: seconds of planning, and peak memory of the process in bytes.
        rank: numbers of one rank, if requested.
        later: later switches with frozen weights, if requested.
        remarks: settings that the numbers ignore, and reasons why a job would be refused.
    """

    job: JobPlan
    planning: Mapping[str, float]
    rank: Mapping[str, Any] | None = None
    later: LaterSwitches | None = None
    remarks: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `plan --json`."""
        facts = {
            "verdict": JobVerdict(self.job).as_dict(),
            **facts_of(self.job),
            "planning": self.planning,
        }
        if self.rank is not None:
            facts["rank"] = self.rank
        if self.later is not None:
            facts["later_switches"] = {
                "bytes": {**moved_bytes(self.later.bytes), **_ranges(kept=self.later.kept)},
                "incremental_mb": self.later.incremental_mb,
            }
        facts["remarks"] = [*self.remarks]
        return facts


def range_of(values: np.ndarray) -> MinMeanMax:
    """Return the smallest, mean and largest entry of an array by rank or host."""
    return {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}


def moved_bytes(summary: ByteSummary) -> Ranges:
    """Return the bytes of a switch by rank; `least` is the lower bound of all plans."""
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
    """Return the bytes that each host receives from others, and their lower bound."""
    return _ranges(received=plan.received_by_host, least=plan.bytes.network_lower_bound)


def device_memory(plan: JobPlan) -> Ranges:
    """Return the bytes of device memory by rank; see `MemoryPeaks` and `TrainingMemory`."""
    memory = plan.memory
    state = memory.state
    inelastic = {} if state.inelastic is None else {"inelastic": state.inelastic}
    gathered = {"gathered": plan.working.gathered} if plan.working.gathered.any() else {}
    return _ranges(
        params=state.params,
        **inelastic,
        grads=state.grads,
        optimizer=state.optimizer,
        training=state.total,
        activations=plan.working.activations,
        **gathered,
        vllm_step=np.array([plan.cache.step]),
        inference=memory.inference,
        largest_bucket=np.array([memory.bucket]),
        switch=memory.switch,
        interleaved_switch=memory.interleaved_switch,
        peak=plan.peak,
    )


def host_memory(plan: JobPlan) -> Ranges:
    """Return the bytes of host memory of offloaded state and message copies while generating."""
    return _ranges(per_rank=plan.on_host, per_host=plan.host_nbytes)


def assumptions(plan: JobPlan) -> str:
    """Return sentences on settings, other than sizes, that affect the peaks of device memory."""
    released = "leave the device while it trains (release_weights: true)"
    if plan.memory.keeps_inference:
        released = "stay on the device while it trains (release_weights: false)"
    left = "Parameters leave page by page as they are read, which on GPUs needs cuda-bindings"
    if not plan.cluster.has_elastic_buffers:
        left = (
            "Without cuda-bindings parameters leave whole, at the end of a switch, "
            "and ranks of a host send messages"
        )
    return f"Inference weights {released}. {left}."


def facts_of(plan: JobPlan) -> dict[str, Any]:
    """Return all numbers of a job for JSON, in bytes and seconds."""
    table = plan.table
    cluster = plan.cluster
    host_nbytes = cluster.host_gib and cluster.host_gib * GIB
    device = {
        **device_memory(plan),
        "size": cluster.device_gib * GIB,
        "fits": plan.fits_device,
    }
    gather = {
        "system": GATHER,
        "formula": "M - held",
        "nbytes": float(plan.gathered.mean()),
        "reason": "",
    }
    dtype = plan.config.served_dtype
    params_dtype = plan.config.actor_config.params_dtype
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
        "peers": [gather],
        "memory": {
            "device": device,
            "host": {**host_memory(plan), "size": host_nbytes, "fits": plan.fits_host},
            "assumed": {
                "release_weights": not plan.memory.keeps_inference,
                "elastic_buffers": cluster.has_elastic_buffers,
            },
        },
        "seconds": range_of(plan.seconds),
        "switch_seconds": {
            direction: {"all": range_of(every), "copies": range_of(copies)}
            for direction, (every, copies) in plan.switch_seconds.items()
        },
        "link_bytes_per_second": {link: rate * 1e9 for link, rate in cluster.link_gbps.items()},
    }


def facts_of_rank(job: JobPlan, rank: int) -> dict[str, Any]:
    """Plan one rank and return its numbers; bytes by link.

    `staging` of the result: bytes of memory for its messages between hosts.
    """
    started = time.perf_counter()
    plan = job.plan_of(rank)
    transfers = list(plan.transfers())
    ranks = {transfer.src_rank for transfer in transfers}
    moved = job.bytes
    columns = {
        "received": {"self": moved.own, "host": moved.host, "network": moved.network},
        "sent": {"host": moved.sent_host, "network": moved.sent_network},
    }
    return {
        "rank": rank,
        "transfers": len(transfers),
        "buckets": len(plan.buckets),
        "peers": len(ranks.union(transfer.dst_rank for transfer in transfers) - {rank}),
        **{
            name: {link: nbytes[rank].item() for link, nbytes in links.items()}
            for name, links in columns.items()
        },
        "staging": staging_nbytes(plan.buckets, plan.relays, rank),
        "planning_seconds": time.perf_counter() - started,
    }


def _ranges(**values: np.ndarray) -> Ranges:
    return {name: range_of(array) for name, array in values.items()}


def sizes_as_dict(sizes: Parallelism | ShardedParallelism) -> dict[str, Any]:
    """Return attribute -> size, for sizes that are not defaults, and the data parallel size."""
    defaults = asdict(type(sizes)(world_size=sizes.world_size))
    changed = {name: value for name, value in asdict(sizes).items() if value != defaults[name]}
    shards = {"num_shards": sizes.num_shards} if isinstance(sizes, ShardedParallelism) else {}
    return {**shards, **changed, "data": sizes.data}


# -- later switches --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LaterSwitches:
    """Cost of each switch after the first with frozen weights and `incremental: auto`.

    Attributes:
        kept: bytes of inference weights that stay on each device during training, for which
            `incremental_mb` must be large enough; int array by rank.
        bytes: bytes of the other weights, which are sent.
    """

    kept: np.ndarray
    bytes: ByteSummary

    @property
    def incremental_mb(self) -> int:
        """Smallest value of the key with which all frozen weights stay."""
        return -(-int(self.kept.max()) // MIB)


def later_switches(job: JobPlan, patterns: Sequence[str]) -> LaterSwitches:
    """Count the later switches of a job with frozen tensors.

    A frozen tensor that vLLM commits together with a trained one is sent with it.

    Args:
        job: the planned job.
        patterns: names of canonical tensors that are frozen (`*`, `?`).

    Raises:
        ConfigError: if a pattern matches no tensor.
    """
    source = job.source
    destination = job.destination
    frozen = set()
    violations = []
    for pattern in patterns:
        names = fnmatch.filter(source.owners, pattern)
        frozen |= set(names)
        if not names:
            problem = f"no tensor matches {pattern}"
            remedy = "Use names of the checkpoint, as in model.safetensors.index.json"
            violations.append(Violation("--frozen", problem, remedy, code="no-tensor-matches"))
    if violations:
        raise ConfigError(violations)
    kept = frozen_tensors(job.source, job.destination, frozen, job.bucket_nbytes)
    sent = summarize(
        _without(source, kept),
        _without(destination, kept),
        job.cluster.hosts(job.world_size),
        job.cluster.relaying_hosts(job.world_size),
    )
    return LaterSwitches(_nbytes_by_rank(job.destination, kept), sent)


def _without(holdings: Holdings, names: Collection[str]) -> Holdings:
    """Return holdings without the tensors of these names."""
    return replace(
        holdings,
        dtypes={name: dtype for name, dtype in holdings.dtypes.items() if name not in names},
        owners={name: owners for name, owners in holdings.owners.items() if name not in names},
    )


def _nbytes_by_rank(side: SideLayout, names: Collection[str]) -> np.ndarray:
    """Return the bytes by rank of the buffers that contain these tensors, including padding."""
    classes = rank_classes(side)
    nbytes = []
    for rank in first_members(classes).tolist():
        buffers = {}
        for name in names:
            for shard, buffer in side.shards_of(rank, name):
                buffers[shard.place.buffer] = buffer
        nbytes.append(sum(buffer.nbytes for buffer in buffers.values()))
    return np.array(nbytes, dtype=np.int64)[classes]


# -- sentences -------------------------------------------------------------------------------------


LEFT_OUT = ("CUDA context", "communicators", "workspaces of libraries", "captured graphs")
"""Uses of device memory that the peak does not include."""
_WHEN = {"train": "while training", "switch": "at the switch", "generate": "while vLLM generates"}
_LARGER_VLLM = "a larger infer_tensor_parallel_size or infer_pipeline_parallel_size"
_PHASES = {"train": "training"}
"""Phase -> its name in `plan --json`, if different."""


@dataclass(frozen=True)
class JobVerdict:
    """Verdict on whether a job can run as planned, judged by the rank with the most bytes."""

    job: JobPlan

    @property
    def fits(self) -> bool:
        """True if the job fits the device, vLLM's share of it, and a host of known size."""
        return self.job.fits_device and self.job.cache.fits and self.job.fits_host is not False

    def sentences(self) -> dict[str, str]:
        """Return heading -> sentence."""
        places = [(self.job.fits_device, self._of_device())]
        if not self.job.cache.fits:
            places.append((False, self._of_cache()))
        if self.job.fits_host is not None:
            places.append((self.job.fits_host, self._of_host()))
        # Reasons why the job does not fit come first.
        in_order = sorted(places, key=lambda place: place[0])
        heading = "Fits" if self.fits else "Does not fit"
        sentences = {heading: "; ".join(text for _, text in in_order) + "."}
        if self.job.cache.fits:
            sentences["Cache"] = f"{self._of_cache()}."
        if kinds := self.job.stays.kinds | self.job.stays.fitting:
            stays = f"on the device while vLLM generates: {', '.join(sorted(kinds))}."
            sentences["Stays"] = stays
        sentences["Left out"] = (
            f"the peak does not count {', '.join(LEFT_OUT[:-1])} and {LEFT_OUT[-1]}."
        )
        sentences["Moves"] = self._moved()
        there, copies = (seconds.max() for seconds in self.job.switch_seconds["to_vllm"])
        back = self.job.switch_seconds["to_training"][0].max()
        sentences["Takes"] = (
            f"{there:.3g} s to vLLM, {copies / there:.0%} of it for copies over links and PCIe, "
            f"and {back:.3g} s back, on the slowest rank, at speeds that are assumed, not measured."
        )
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict of `plan --json`, in bytes."""
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
        phase = self.job.fullest_phase
        left = self.job.left
        size = f"{self.job.cluster.device_gib:g} GiB"
        when = _WHEN.get(phase, f"in the phase {phase}")
        peak = f"the peak of {gib(self.job.taken[phase])} on a device, {when},"
        if left < 0:
            return f"{peak} is {gib(-left)} more than its {size}: {self._remedy(phase)}"
        return f"{peak} leaves {gib(left)} of its {size}"

    def _remedy(self, phase: str) -> str:
        """Return remedies for a phase that does not fit: offloads first, then larger sizes."""
        actor = self.job.config.actor_config
        memory = self.job.memory
        has_vllm = phase in ("switch", "generate")
        remedies = []
        if has_vllm:
            remedies += self._offloads()
        elif "vLLM" in self.job.phases[phase].by_model:
            remedies.append("release vLLM's weights (release_weights: true, incremental: off)")
        if has_vllm and memory.inference.max() > memory.state.params.max():
            remedies.append(f"use {_LARGER_VLLM}")
        elif actor.fsdp is not None:
            remedies.append("use more ranks, or a smaller micro_batch_size")
        else:
            expert = ", expert_model_parallel_size" * bool(self.job.table.dims.num_experts)
            sizes = f"tensor_model_parallel_size, pipeline_model_parallel_size{expert}"
            remedies.append(f"use more ranks, a larger {sizes}, or recompute_granularity: full")
        return ", or ".join(remedies)

    def _offloads(self) -> list[str]:
        """Return the keys that offload training state which stays on the device."""
        stays = self.job.stays
        keys = [f"offload_train_{kind}: true" for kind in sorted(stays.kinds)]
        keys += ["critic_config.offload: true"] * stays.critic
        return [f"offload training ({', '.join(keys)})"] if keys else []

    def _of_host(self) -> str:
        largest = gib(self.job.host_nbytes.max())
        size = f"{self.job.cluster.host_gib:g} GiB"
        fits = "fit" if self.job.fits_host else "do not fit"
        return f"{largest} of offloaded training state {fits} a host of {size}"

    def _of_cache(self) -> str:
        cache = self.job.cache
        taken = f"weights of {gib(cache.weights)}, a step of {gib(cache.step)}"
        share = f"vLLM's {gib(cache.share)} (gpu_memory_utilization {cache.utilization:g})"
        if cache.given is not None:
            total = cache.weights + cache.step + cache.given
            share = f"vLLM's weights, step and kv_cache_mb, {gib(total)},"
        if cache.room <= 0:
            contents = f"{share} are less than {taken}"
        else:
            contents = (
                f"{share} hold {taken}, and a KV cache of {gib(cache.room)}: "
                f"{cache.num_tokens:,} tokens, {cache.num_sequences:.3g} sequences of "
                f"{cache.longest:,}"
            )
        if cache.fits:
            return contents
        if cache.given is not None:
            return (
                f"{contents}; set kv_cache_mb for one sequence of max_model_len, within the device"
            )
        most = 1 - cache.beside / cache.device
        training = f" beside {gib(cache.beside)} of training, which stay" * (cache.beside > 0)
        if cache.needed > most:
            # Offloading helps only if vLLM would start without the training state.
            remedies = [] if cache.needed > 1 else self._offloads()
            remedy = ", or ".join(remedies or [f"use {_LARGER_VLLM}", "a lower max_model_len"])
            return f"{contents}. No share of the device is enough{training}: {remedy}"
        if cache.utilization > most:
            return f"{contents}; it starts with at most {int(100 * most) / 100:g}{training}"
        return f"{contents}; it starts from {cache.needed:g}, or with a lower max_model_len"

    def _moved(self) -> str:
        moved = self.job.bytes
        gathered = float(self.job.gathered.mean())
        received = float(moved.received.mean())
        least = float(moved.lower_bound.mean())
        text = f"{gib(received)} to a rank on average, "
        if received > least:
            text += f"{gib(received - least)} more than the least possible"
        else:
            text += "the least that these two layouts allow"
        saved = 1 - received / gathered if gathered else 0.0
        if saved >= 0.005:
            text += f", {saved:.0%} less than all weights on every rank ({gib(gathered)})"
        return f"{text}."


# -- tables ----------------------------------------------------------------------------------------


UNITS = (
    "GiB are 2^30 bytes, MiB 2^20; min, mean and max are over ranks, "
    "or over hosts where a row says so."
)


@dataclass(frozen=True)
class Unit:
    """Unit of a job's tables."""

    name: str
    nbytes: int

    @classmethod
    def of(cls, job: JobPlan) -> Unit:
        """Return MiB for a job of less than 0.1 GiB per device, such as a test model; else GiB."""
        return cls("GiB", GIB) if float(job.memory.device.max()) >= GIB / 10 else cls("MiB", MIB)

    def number(self, nbytes: float) -> str:
        """Return bytes as text in this unit."""
        size = nbytes / self.nbytes
        return f"{size:.3f}" if abs(size) >= 1e-3 or nbytes == 0 else f"{size:.3g}"

    def numbers(self, values: MinMeanMax) -> list[str]:
        """Return min, mean and max as text in this unit."""
        return [self.number(values[name]) for name in ("min", "mean", "max")]


@dataclass(frozen=True)
class NumbersTable:
    """Table of numbers: label of a row -> min, mean and max; `note` is a line below it."""

    title: str
    rows: Mapping[str, list[str]]
    note: str = ""


def tables_of(answer: Answer) -> Iterator[NumbersTable]:
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
_IS_PART = {
    "received_same_host",
    "received_across_hosts",
    "sent_same_host",
    "sent_across_hosts",
    "inelastic",
}


def _rows(numbers: Ranges, labels: Mapping[str, str], unit: Unit) -> dict[str, list[str]]:
    return {
        _PART * (name in _IS_PART) + label: unit.numbers(numbers[name])
        for name, label in labels.items()
        if name in numbers
    }


def _moved(job: JobPlan) -> NumbersTable:
    unit = Unit.of(job)
    hosts = len(set(job.cluster.hosts(job.world_size)))
    across = bytes_across_hosts(job)
    rows = _rows(moved_bytes(job.bytes), _MOVED, unit) | {
        "received by a host from other hosts": unit.numbers(across["received"]),
        "least that a host must receive": unit.numbers(across["least"]),
        "received, with infer_rank_order: sequential": unit.numbers(
            range_of(job.sequential.received)
        ),
        f"received by a {GATHER}": unit.numbers(range_of(job.gathered)),
    }
    title = f"What a switch moves, {unit.name} by rank; {job.world_size:,} ranks, hosts: {hosts:,}"
    note = "Least: what is needed in generation and not held in training; no plan can receive less."
    return NumbersTable(title, rows, note)


def _memory(job: JobPlan) -> NumbersTable:
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
        "interleaved_switch": "a switch, as it is"
        + ": bucket by bucket" * (not job.memory.keeps_inference),
        "peak": "device peak, without the KV cache",
    }
    unit = Unit.of(job)
    host = host_memory(job)
    rows = _rows(device_memory(job), labels, unit) | {
        "host memory while generating": unit.numbers(host["per_rank"]),
        "the same, by host": unit.numbers(host["per_host"]),
    }
    note = (
        "A switch bucket by bucket takes the larger of parameters and vLLM's weights, and two "
        "buckets. All experts of a layer are in one bucket, which may be larger than bucket_mb. "
        f"The peak is the most of any phase ({', '.join(job.phases)}), "
        "with what the configuration leaves on the device."
    )
    return NumbersTable(f"Memory, {unit.name} by rank", rows, note)


def _later(later: LaterSwitches, job: JobPlan) -> NumbersTable:
    unit = Unit.of(job)
    keys = f"incremental: auto and incremental_mb: {later.incremental_mb}"
    rows = _rows(moved_bytes(later.bytes), _MOVED, unit)
    rows["kept on the device"] = unit.numbers(range_of(later.kept))
    return NumbersTable(f"Later switches, {unit.name} by rank, with {keys}", rows)
