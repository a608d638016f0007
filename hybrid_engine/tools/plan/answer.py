"""Answer of `plan`: a job plan as numbers (`--json`), tables of these, sentences, and explanations.

A number has the same name in JSON, in a table, and in the explanations."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import numpy as np

from hybrid_engine.errors import (
    Violation,
    require_none,
)
from hybrid_engine.layouts.memory import GIB, MIB, gib
from hybrid_engine.layouts.parallelism import Parallelism, ShardedParallelism
from hybrid_engine.planning.planner import frozen_tensors
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import Holdings, SideLayout, first_members, rank_classes
from hybrid_engine.tools.plan.cluster_plan import JobPlan

MinMeanMax = Mapping[str, float]
"""Smallest, mean and largest value over ranks or hosts."""
Ranges = Mapping[str, MinMeanMax]
"""Name -> bytes over ranks or hosts."""


def range_of(values: np.ndarray) -> MinMeanMax:
    """Return the smallest, mean and largest entry of an array by rank or host."""
    return {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}


def moved_bytes(summary: ByteSummary) -> Ranges:
    """Return the bytes of a switch by rank; `least` is the lower bound of all plans."""
    return _ranges(
        received=summary.received,
        received_same_host=summary.host,
        received_across_hosts=summary.network,
        least=summary.lower_bound,
        copied_on_the_rank=summary.own,
        sent=summary.sent,
        sent_same_host=summary.sent_host,
        sent_across_hosts=summary.sent_network,
    )


def device_memory(plan: JobPlan) -> Ranges:
    """Return the bytes of device memory by rank; see `MemoryPeaks` and `TrainingMemory`."""
    memory = plan.memory
    state = memory.state
    return _ranges(
        params=state.params,
        inelastic=state.inelastic,
        grads=state.grads,
        optimizer=state.optimizer,
        training=state.total,
        activations=plan.activations,
        gathered=plan.gathered_in_step or None,
        vllm_step=plan.cache.step,
        inference=memory.inference,
        largest_bucket=memory.bucket,
        switch=memory.switch,
        interleaved_switch=memory.interleaved_switch,
        peak=plan.peak,
    )


def facts_of(plan: JobPlan) -> dict[str, Any]:
    """Return all numbers of a job for JSON, in bytes and seconds."""
    table = plan.table
    cluster = plan.cluster
    cache = plan.cache
    status, _ = plan.verdict
    left = plan.left
    dtype = plan.config.served_dtype
    params_dtype = plan.config.actor_config.params_dtype
    train_dtype = {} if params_dtype == dtype else {"train_dtype": params_dtype}
    return {
        "verdict": {
            "status": status,
            "fits": status != "does not fit",
            "reserve": cluster.reserve_gib * GIB,
            "room": left["Device"],
            "room_for_cache": cache.room,
            "cache_tokens": cache.num_tokens,
            "gpu_memory_utilization": cache.utilization,
            "least_gpu_memory_utilization": cache.needed,
            "peak_during": _PHASES.get(plan.fullest_phase, plan.fullest_phase),
            "left_out": list(LEFT_OUT),
        },
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
        "across_hosts": _ranges(
            received=plan.received_by_host, least=plan.bytes.network_lower_bound
        ),
        "sequential": moved_bytes(plan.sequential),
        "peers": [
            {
                "system": "gather of all weights, as verl and TRL",  # docs/comparison.md
                "formula": "M - held",
                "nbytes": float(plan.gathered.mean()),
                "reason": "",
            }
        ],
        "memory": {
            "device": {
                **device_memory(plan),
                "size": cluster.device_gib * GIB,
                "fits": left["Device"] >= 0,
            },
            "host": {
                **_ranges(per_rank=plan.on_host, per_host=plan.host_nbytes),
                "size": cluster.host_gib and cluster.host_gib * GIB,
                "fits": left["Host"] >= 0 if "Host" in left else None,
            },
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
        # A rank's own copies have it at both ends.
        "peers": len(ranks.union(transfer.dst_rank for transfer in transfers) - {rank}),
        **{
            name: {link: nbytes[rank].item() for link, nbytes in links.items()}
            for name, links in columns.items()
        },
        "staging": staging_nbytes(plan.buckets, plan.relays, rank),
        "planning_seconds": time.perf_counter() - started,
    }


def _ranges(**values: np.ndarray | int | None) -> Ranges:
    """Return the range of every array, or number that all ranks have; None is left out."""
    return {
        name: range_of(np.asarray(value)) for name, value in values.items() if value is not None
    }


def sizes_as_dict(sizes: Parallelism | ShardedParallelism) -> dict[str, Any]:
    """Return attribute -> size, for sizes that are not defaults, and the data parallel size."""
    defaults = asdict(type(sizes)(world_size=sizes.world_size))
    changed = {name: value for name, value in asdict(sizes).items() if value != defaults[name]}
    shards = {"num_shards": sizes.num_shards} if isinstance(sizes, ShardedParallelism) else {}
    return {**shards, **changed, "data": sizes.data}


# -- later switches --------------------------------------------------------------------------------


def later_switches(job: JobPlan, patterns: Sequence[str]) -> dict[str, Any]:
    """Count each switch after the first with frozen tensors and `incremental: auto`.

    A frozen tensor that vLLM commits together with a trained one is sent with it.

    Args:
        job: the planned job.
        patterns: names of canonical tensors that are frozen (`*`, `?`).

    Returns:
        `bytes` that are sent, with those of inference weights that are `kept` on each device during
        training, and `incremental_mb`, the smallest value of the key with which all are kept.

    Raises:
        ConfigError: if a pattern matches no tensor.
    """
    source = job.source
    destination = job.destination
    matches = {pattern: fnmatch.filter(source.owners, pattern) for pattern in patterns}
    require_none(
        Violation(
            "--frozen",
            f"no tensor matches {pattern}",
            "Use names of the checkpoint, as in model.safetensors.index.json",
            code="no-tensor-matches",
        )
        for pattern, names in matches.items()
        if not names
    )
    frozen = {*chain(*matches.values())}
    kept = frozen_tensors(source, destination, frozen, job.bucket_nbytes)
    sent = summarize(
        _without(source, kept),
        _without(destination, kept),
        job.hosts,
        job.cluster.relaying_hosts(job.world_size),
    )
    nbytes = _nbytes_by_rank(destination, kept)
    return {
        "bytes": {**moved_bytes(sent), **_ranges(kept=nbytes)},
        # Rounded up: with a value that is too small by one byte some bucket would not stay.
        "incremental_mb": -(-int(nbytes.max()) // MIB),
    }


def _without(holdings: Holdings, names: Collection[str]) -> Holdings:
    """Return holdings without the tensors of these names."""
    return replace(
        holdings,
        dtypes={name: dtype for name, dtype in holdings.dtypes.items() if name not in names},
        placed={name: placed for name, placed in holdings.placed.items() if name not in names},
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
    # From ranks' classes back to ranks: ranks of a class hold the same buffers.
    return np.array(nbytes, dtype=np.int64)[classes]


# -- sentences -------------------------------------------------------------------------------------


LEFT_OUT = ("CUDA context", "communicators", "workspaces of libraries", "captured graphs")
"""Uses of device memory that the peak does not include."""
_WHEN = {"train": "while training", "switch": "at the switch", "generate": "while vLLM generates"}
_LARGER_VLLM = (
    "use a larger infer_tensor_parallel_size, infer_pipeline_parallel_size or (of experts) "
    "infer_expert_parallel_size"
)
_LARGER_MEGATRON = (
    "use more ranks, a larger tensor_model_parallel_size, pipeline_model_parallel_size or (of "
    "experts) expert_model_parallel_size, or recompute_granularity: full with recompute_method: "
    "uniform and recompute_num_layers: 1"
)
_PHASES = {"train": "training"}
"""Phase -> its name in `plan --json`, if different."""


def sentences_of(job: JobPlan) -> dict[str, str]:
    """Return heading -> sentence, the verdict first, with the reasons for it."""
    sentences = {"Device": _of_device(job), "Cache": _of_cache(job)}
    if job.cluster.host_gib is not None:
        sentences["Host"] = (
            f"{gib(job.host_nbytes.max())} of training state are offloaded to a host of "
            f"{job.cluster.host_gib:g} GiB"
        )
    if kinds := job.stays.kinds | job.stays.fitting:
        sentences["Stays"] = f"on the device while vLLM generates: {', '.join(sorted(kinds))}"
    moved = job.bytes
    sentences["Moves"] = (
        f"{gib(moved.received.mean())} to a rank on average; the least that these layouts allow is "
        f"{gib(moved.lower_bound.mean())}, and a gather of all weights {gib(job.gathered.mean())}"
    )
    there, back = (seconds.max() for seconds, _ in job.switch_seconds.values())
    sentences["Takes"] = (
        f"{there:.3g} s to vLLM and {back:.3g} s back on the slowest rank, at assumed speeds"
    )
    status, places = job.verdict
    reasons = "; ".join(sentences.pop(place) for place in places)
    if status == "tight":
        reserve = f"{job.cluster.reserve_gib:g} GiB"
        reasons += f"; {reserve} are reserved for what is not counted: {', '.join(LEFT_OUT)}"
    in_order = {status.capitalize(): reasons, **sentences}
    return {heading: f"{sentence}." for heading, sentence in in_order.items()}


def _of_device(job: JobPlan) -> str:
    phase = job.fullest_phase
    left = job.left["Device"]
    size = f"{job.cluster.device_gib:g} GiB"
    when = _WHEN.get(phase, f"in the phase {phase}")
    peak = f"the peak of {gib(job.taken[phase])} on a device, {when},"
    if left < 0:
        return f"{peak} is {gib(-left)} more than its {size}: {_remedy(job, phase)}"
    return f"{peak} leaves {gib(left)} of its {size}"


def _remedy(job: JobPlan, phase: str) -> str:
    """Return remedies for a phase that does not fit: offloads first, then larger sizes."""
    memory = job.memory
    has_vllm = phase in ("switch", "generate")
    remedies = []
    if has_vllm:
        remedies += _offloads(job)
    elif "vLLM" in job.phases[phase].by_model:
        remedies.append("release vLLM's weights (release_weights: true, incremental: off)")
    if has_vllm and memory.inference.max() > memory.state.params.max():
        remedies.append(_LARGER_VLLM)
    elif job.config.actor_config.fsdp is not None:
        remedies.append("use more ranks, or a smaller micro_batch_size")
    else:
        remedies.append(_LARGER_MEGATRON)
    return ", or ".join(remedies)


def _offloads(job: JobPlan) -> list[str]:
    """Return the keys that offload training state which stays on the device."""
    keys = [f"offload_train_{kind}: true" for kind in sorted(job.stays.kinds)]
    keys += ["critic_config.offload: true"] * job.stays.critic
    return [f"offload training ({', '.join(keys)})"] if keys else []


def _of_cache(job: JobPlan) -> str:
    cache = job.cache
    share = f"vLLM's {gib(cache.share)} (gpu_memory_utilization {cache.utilization:g})"
    others = f"weights of {gib(cache.weights)} and a step of {gib(cache.step)}"
    larger = ""
    if cache.room < 0:
        contents = f"{share} are {gib(-cache.room)} too few for {others}"
        larger = f"{_LARGER_VLLM}; "
    else:
        gives = f"{share} leave" if cache.given is None else "kv_cache_mb gives"
        contents = (
            f"{gives} {gib(cache.room)} for the KV cache, beside {others}: {cache.num_tokens:,} "
            f"tokens, {cache.num_tokens / cache.longest:.3g} sequences of {cache.longest:,}"
        )
    if cache.left >= 0:
        return contents
    if cache.given is not None:
        return f"{contents}; set kv_cache_mb for one sequence of max_model_len, within the device"
    # The share that leaves `beside` untouched. It is rounded down below, and `needed` is rounded
    # up, so a share that is named is enough.
    most = 1 - cache.beside / cache.device
    training = f" beside {gib(cache.beside)} of training, which stay" * (cache.beside > 0)
    if cache.needed <= most:
        share = f"from {cache.needed:g} to {int(100 * most) / 100:g}"
        return f"{contents}; {larger}it starts with gpu_memory_utilization {share}{training}"
    # Offloading helps only if vLLM would start without the training state.
    remedies = [] if cache.needed > 1 else _offloads(job)
    remedy = ", or ".join(remedies or [_LARGER_VLLM, "a lower max_model_len"])
    return f"{contents}. No share of the device is enough{training}: {remedy}"


# -- tables and explanations -----------------------------------------------------------------------


def tables_of(job: JobPlan, facts: Mapping[str, Any]) -> dict[str, Ranges]:
    """Return title -> name -> bytes of `facts`, by rank unless the name ends in `by_host`."""
    hosts = len(set(job.hosts))
    across = facts["across_hosts"]
    host = facts["memory"]["host"]
    tables: dict[str, Ranges] = {
        f"What a switch moves; {job.world_size:,} ranks, hosts: {hosts:,}": {
            **facts["bytes"],
            "received_by_host": across["received"],
            "least_by_host": across["least"],
            "received_sequential": facts["sequential"]["received"],
        },
        "Memory": {
            **device_memory(job),
            "host_memory": host["per_rank"],
            "host_memory_by_host": host["per_host"],
        },
    }
    if "later_switches" in facts:
        later = facts["later_switches"]
        keys = f"incremental: auto and incremental_mb: {later['incremental_mb']}"
        tables[f"Later switches, with {keys}"] = later["bytes"]
    return tables


def explanations(job: JobPlan, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the meaning of the names in the tables of a job, and what the numbers assume."""
    names = {name for rows in tables_of(job, facts).values() for name in rows}
    released = "leave the device while it trains (release_weights: true)"
    if job.memory.keeps_inference:
        released = "stay on the device while it trains (release_weights: false)"
    left = "Parameters leave page by page as they are read, which on GPUs needs cuda-bindings"
    if not job.cluster.has_elastic_buffers:
        left = (
            "Without cuda-bindings parameters leave whole, at the end of a switch, "
            "and ranks of a host send messages"
        )
    rates = ", ".join(f"{link} {rate:g}" for link, rate in job.cluster.link_gbps.items())
    return {
        **{name: meaning for name, meaning in _MEANINGS.items() if name in names},
        "assumed": f"Inference weights {released}. {left}.",
        "not counted": _NOT_COUNTED,
        "speeds": f"10^9 bytes per second of one rank, each direction: {rates}.",
        "units": "GiB are 2^30 bytes, MiB 2^20; min, mean and max are over ranks, or hosts.",
    }


_MEANINGS = {
    "received": "from other ranks.",
    "received_same_host": "part of it from ranks of the same host.",
    "received_across_hosts": "part of it from other hosts.",
    "least": "what is needed in generation and not held in training; no plan can receive less.",
    "copied_on_the_rank": "from training's to vLLM's memory of one rank.",
    "sent": "to other ranks.",
    "sent_same_host": "part of it to ranks of the same host.",
    "sent_across_hosts": "part of it to other hosts.",
    "received_by_host": "by all ranks of a host from other hosts.",
    "least_by_host": "least that a host must receive.",
    "received_sequential": "by a rank with infer_rank_order: sequential.",
    "params": "training's parameters.",
    "inelastic": "parameters that leave only at the end of a switch.",
    "grads": "gradients.",
    "optimizer": "optimizer state.",
    "training": "parameters, gradients and optimizer state.",
    "activations": "of a training step, estimated.",
    "gathered": "parameters and gradients that FSDP2 gathers, estimated.",
    "vllm_step": "vLLM's largest step, estimated.",
    "inference": "vLLM's weights.",
    "largest_bucket": (
        "of a switch. All experts of a layer are in one bucket, which may be larger than bucket_mb."
    ),
    "switch": "if vLLM's weights came all at once.",
    "interleaved_switch": (
        "a switch as it is. Bucket by bucket it takes the larger of params and inference, and two "
        "buckets."
    ),
    "peak": (
        "most of any phase, with what the configuration leaves on the device, without the KV cache."
    ),
    "host_memory": "of offloaded state and copies of messages, while vLLM generates.",
    "host_memory_by_host": "the same of all ranks of a host.",
    "kept": "vLLM's frozen weights, which stay on the device.",
}
"""Name in a table -> meaning."""
_NOT_COUNTED = (
    "on a GPU its context and workspaces, NCCL's communicators of both engines, and vLLM's "
    "captured graphs, which stay while training: 2 to 6 GiB, estimated (--reserve-gib). "
    "generate_config.vllm can give part of that back: {sleep_mode_offload_cudagraph: true, "
    "enable_nccl_comm_suspend: true}; generate_config.suspend_communicators gives back training's "
    "communicators while vLLM generates."
)
