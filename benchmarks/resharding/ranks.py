"""Rank of the benchmark: builds both engines of each case and times the contenders."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.resharding.cases import Case
from benchmarks.resharding.figures import Figures
from benchmarks.resharding.floor import Floor
from benchmarks.resharding.growth import grow, trace_cycle
from benchmarks.resharding.measuring import (
    Contender,
    Digests,
    agreed,
    gather,
    measure,
    profile_run,
)
from benchmarks.resharding.ours import Ours, OursCopies
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.ranks.job import default_backend, own_device
from hybrid_engine.switch.sharding_manager import State
from hybrid_engine.trainer.worker import ActorHybridWorker

SECONDS_TO_WAIT = 900
"""Timeout of a rank that waits for another."""

_NUM_VALUES = 1_000_003
"""Number of different values in a tensor. A prime, so that no two shards of a tensor are equal."""


@dataclass(frozen=True)
class Entry:
    """A contender and the keys of its figures.

    Attributes:
        key: prefix of its keys in `Figures`.
        build: builds it from the worker, collectively.
        compared_with: contender whose result it must reproduce.
        has_buckets: True if its speed depends on the size of a bucket.
    """

    key: str
    build: Callable[[ActorHybridWorker], Contender]
    compared_with: str | None = None
    has_buckets: bool = False


def entries(*, bridge: bool = False) -> list[Entry]:
    """Return all contenders in their order; with `bridge`, also Megatron-Bridge."""
    # these modules import Megatron, which must be patched before, when the worker is built
    from benchmarks.resharding.bridges import MbridgeExport, MegatronBridgeExport
    from benchmarks.resharding.gather_broadcast import GatherBroadcast
    from benchmarks.resharding.megatron_core import MegatronResharding, OursToMegatron

    optional = [Entry("megatron_bridge", MegatronBridgeExport, "ours")] if bridge else []
    return [
        Entry("ours", Ours, has_buckets=True),
        Entry("ours_copies", OursCopies, "ours", has_buckets=True),
        Entry("floor", Floor),
        Entry("mbridge", MbridgeExport, "ours"),
        *optional,
        Entry("gather_broadcast", GatherBroadcast, "ours"),
        Entry("ours_to_megatron", OursToMegatron, has_buckets=True),
        Entry("megatron_resharding", MegatronResharding, "ours_to_megatron"),
    ]


@dataclass(frozen=True)
class Request:
    """Measurements of every case.

    Attributes:
        runs: timed runs per contender; 0 skips the contenders.
        budget: seconds for the runs of a contender; see `measure`.
        cycles: switches to inference and back over which growth is measured.
        timeline: True to trace memory over a cycle.
        bridge: True to time Megatron-Bridge.
        vllm: additional engine arguments.
        profile: directory for a trace of each contender; "" writes none.
    """

    runs: int
    budget: float
    cycles: int = 0
    timeline: bool = False
    bridge: bool = False
    vllm: Mapping[str, Any] = field(default_factory=dict)
    profile: str = ""


def main(job: str, out: str) -> None:
    """Run the cases of the job file; rank 0 writes the figures so far after each case."""
    values = json.loads(Path(job).read_text())
    request = Request(**values["request"])
    own_device()
    dist.init_process_group(default_backend(), timeout=timedelta(seconds=SECONDS_TO_WAIT))
    directory = Path(job).parent / f"rank{dist.get_rank()}"
    rows: list[dict[str, Any]] = []
    timed: set[Case] = set()  # cases without their size of bucket
    for case in (Case(**fields) for fields in values["cases"]):
        started = time.perf_counter()
        figures = Figures.of(case)
        alike = replace(case, bucket_mb=0)
        _, failure = agreed(
            partial(run_case, case, directory, request, figures, only_buckets=alike in timed)
        )
        timed.add(alike)
        if failure is not None:
            figures.reasons["case"] = failure
        rows.append(figures.as_json())
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(rows))
            print(f"{case.name}: {time.perf_counter() - started:.0f} s", flush=True)
    dist.destroy_process_group()


def run_case(
    case: Case, directory: Path, request: Request, figures: Figures, *, only_buckets: bool = False
) -> None:
    """Build, time, shut down. Errors of a contender become its reason; others propagate.

    With `only_buckets`, contenders without buckets are left out.
    """
    worker = ActorHybridWorker(case.config(directory, request.vllm), weights_only=True)
    try:
        _fill_with_values(worker)
        _switch_once(worker, figures)
        # As in a switch: weights may use their memory.
        worker.sharding.offloader.offload({"grad"})
        results: dict[str, Digests] = {}
        for entry in entries(bridge=request.bridge) if request.runs else ():
            if entry.has_buckets or not only_buckets:
                _time(entry, worker, request, figures, results)
        if request.cycles:
            figures.growth = grow(worker, request.cycles)
        if request.timeline:
            figures.timeline = trace_cycle(worker)
    except Exception:
        traceback.print_exc()
        raise
    finally:
        worker.shutdown()


def _fill_with_values(worker: ActorHybridWorker) -> None:
    """Fill every canonical tensor with different values, equal on all ranks."""
    adaptor = worker.train.weights
    layout, buffers = adaptor.layout(), adaptor.buffers()
    values = torch.randn(_NUM_VALUES, generator=torch.Generator().manual_seed(0)) * 0.02
    values = values.to(worker.job.device)
    for name, shards in layout.shards_by_tensor().items():
        shape = layout.tensors[name]
        numel = math.prod(shape)
        # crc32, because hash() differs between processes
        rolled = values.roll(zlib.crc32(name.encode()) % _NUM_VALUES)
        repeated = rolled.to(buffers[shards[0].place.buffer.name].dtype).repeat(
            math.ceil(numel / _NUM_VALUES)
        )
        tensor = repeated[:numel].view(shape)
        for shard in shards:
            region = shard.region
            box = tuple(map(slice, region.offsets, region.ends))
            flat = buffers[shard.place.buffer.name]
            offset = flat.storage_offset() + shard.place.offset
            flat.as_strided(region.lengths, shard.place.strides, offset).copy_(tensor[box])


def _switch_once(worker: ActorHybridWorker, figures: Figures) -> None:
    """Note bytes and peak of a whole switch to inference and back."""
    sharding = worker.sharding
    layout_nbytes = max(_resident(worker), worker.inference.adaptor.nbytes)
    for _ in range(2):  # the first switch also plans
        report = sharding.enter(State.INFER)
        sharding.enter(State.TRAIN)
    figures.bytes_received = sum(gather(report.bytes_received))
    figures.bytes_least = sum(gather(report.bytes_least))
    peaks = gather((report.peak_bytes, layout_nbytes))
    figures.peak_bytes, figures.max_layout_bytes = max(peaks, key=lambda pair: pair[0] - pair[1])
    figures.bucket_bytes = max(bucket.nbytes for bucket in sharding.plan.buckets)


def _resident(worker: ActorHybridWorker) -> int:
    """Return the bytes of training state on the device of this rank."""
    worker.sharding.offloader.onload(set(KINDS))
    return sum(worker.sharding.offloader.resident_nbytes().values())


def _time(
    entry: Entry,
    worker: ActorHybridWorker,
    request: Request,
    figures: Figures,
    results: dict[str, Digests],
) -> None:
    """Time a contender and check its result."""
    key = f"{entry.key}_seconds"
    contender, failure = agreed(lambda: entry.build(worker))
    if failure is None:
        outcome, failure = agreed(lambda: measure(contender, request.runs, request.budget))
        if failure is None and request.profile:
            trace = Path(request.profile, f"{figures.trace_name}-{entry.key}.json")
            profile, failure = agreed(lambda: profile_run(contender, trace))
            figures.profiles[entry.key] = profile
        agreed(contender.close)
    if failure is not None:
        figures.reasons[key] = failure
        return
    timing, results[entry.key] = outcome
    if failure := _difference(entry, results):
        figures.reasons[key] = failure
        return
    setattr(figures, key, timing.seconds)
    for part, seconds in (("commit", timing.commit_seconds), ("allocate", timing.allocate_seconds)):
        if hasattr(figures, f"{entry.key}_{part}_seconds"):
            setattr(figures, f"{entry.key}_{part}_seconds", seconds)
    figures.phases[entry.key] = dict(timing.by_phase)
    figures.spread[entry.key] = (timing.fastest, timing.slowest)
    figures.num_runs[entry.key] = timing.num_runs
    if timing.device_seconds is not None:
        figures.on_device[entry.key] = timing.device_seconds
    if dist.get_rank() == 0:
        print(
            f"{entry.key}: {timing.seconds:.4f} s, and {timing.commit_seconds:.4f} s of repacking",
            flush=True,
        )


def _difference(entry: Entry, results: dict[str, Digests]) -> str | None:
    """Describe the differences from the result of `compared_with`. Equal on every rank."""
    if entry.compared_with is None:
        return None
    actual = results[entry.key]
    expected = results.get(entry.compared_with, {})
    names = {*actual, *expected}
    differing = sorted(name for name in names if actual.get(name) != expected.get(name))
    differing_by_rank = gather(differing)
    totals = gather(len(expected))
    if not all(totals):
        return f"{entry.compared_with} has no result to compare with"
    if not any(differing_by_rank):
        return None
    count = sum(map(len, differing_by_rank))
    first = next(names[0] for names in differing_by_rank if names)
    return f"{count} of {sum(totals)} parameters differ from {entry.compared_with}: {first}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
