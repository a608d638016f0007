"""One rank of the benchmark: builds both real engines of each case and times the contenders one after the other."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from benchmarks.resharding.measuring import Contender, Digests, agreed, gather, measure
from benchmarks.resharding.ours import Ours, OursCopies
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.ranks.job import default_backend, own_device
from hybrid_engine.switch.sharding_manager import State
from hybrid_engine.trainer.worker import ActorHybridWorker

SECONDS_TO_WAIT = 900
"""Longest wait of one rank for another."""

_NUM_VALUES = 1_000_003
"""Different values in a tensor; a prime, so that no cut of a tensor repeats another one's."""


@dataclass(frozen=True)
class Entry:
    """A contender and where its figures go.

    Attributes:
        key: prefix of its keys in `Figures`.
        build: makes it from the worker, collectively.
        compared_with: the contender whose result it must reproduce.
    """

    key: str
    build: Callable[[ActorHybridWorker], Contender]
    compared_with: str | None = None


def entries(*, bridge: bool = False) -> list[Entry]:
    """All contenders, in the order in which they run; `bridge`: Megatron-Bridge too."""
    # these import Megatron, which is patched when the worker is built
    from benchmarks.resharding.bridges import MbridgeExport, MegatronBridgeExport
    from benchmarks.resharding.gather_broadcast import GatherBroadcast
    from benchmarks.resharding.megatron_core import MegatronResharding, OursToMegatron

    optional = [Entry("megatron_bridge", MegatronBridgeExport, "ours")] if bridge else []
    return [
        Entry("ours", Ours),
        Entry("ours_copies", OursCopies, "ours"),
        Entry("floor", Floor),
        Entry("mbridge", MbridgeExport, "ours"),
        *optional,
        Entry("gather_broadcast", GatherBroadcast, "ours"),
        Entry("ours_to_megatron", OursToMegatron),
        Entry("megatron_resharding", MegatronResharding, "ours_to_megatron"),
    ]


@dataclass(frozen=True)
class Request:
    """What is to be done with every case.

    Attributes:
        runs: timed runs of each contender; 0 times none.
        budget: seconds for the runs of one contender; see `measure`.
        cycles: switches there and back over which growth is watched; 0 for none.
        timeline: trace memory over one cycle.
        bridge: time Megatron-Bridge too.
        vllm: further engine arguments.
    """

    runs: int
    budget: float
    cycles: int = 0
    timeline: bool = False
    bridge: bool = False
    vllm: Mapping[str, Any] = field(default_factory=dict)


def main(job: str, out: str) -> None:
    """Run the cases of the job file; rank 0 writes all figures so far after each one."""
    values = json.loads(Path(job).read_text())
    request = Request(**values["request"])
    own_device()
    dist.init_process_group(default_backend(), timeout=timedelta(seconds=SECONDS_TO_WAIT))
    directory = Path(job).parent / f"rank{dist.get_rank()}"
    rows = []
    for case in (Case(**each) for each in values["cases"]):
        started = time.perf_counter()
        figures = Figures.of(case)
        _, failure = agreed(partial(run_case, case, directory, request, figures))
        if failure is not None:
            figures.reasons["case"] = failure
        rows.append(figures.as_json())
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(rows))
            print(f"{case.name}: {time.perf_counter() - started:.0f} s", flush=True)
    dist.destroy_process_group()


def run_case(case: Case, directory: Path, request: Request, figures: Figures) -> None:
    """Build, time, shut down. Errors of the build are raised; those of a contender are its reason."""
    worker = ActorHybridWorker(case.config(directory, request.vllm), weights_only=True)
    try:
        _fill_with_values(worker)
        _switch_once(worker, figures)
        results: dict[str, Digests] = {}
        for entry in entries(bridge=request.bridge) if request.runs else ():
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
    """Give every canonical tensor values of its own, on all ranks that hold some of it the same."""
    adaptor = worker.train.weights
    layout, buffers = adaptor.layout(), adaptor.buffers()
    values = (torch.randn(_NUM_VALUES, generator=torch.Generator().manual_seed(0)) * 0.02).to(
        worker.job.device
    )
    for name, shards in layout.shards_by_tensor().items():
        shape = layout.tensors[name]
        first = zlib.crc32(name.encode()) % _NUM_VALUES
        turned = values.roll(first).to(buffers[shards[0].place.buffer.name].dtype)
        whole = turned.repeat(-(-math.prod(shape) // _NUM_VALUES))[: math.prod(shape)].view(shape)
        for shard in shards:
            region, place = shard.region, shard.place
            box = tuple(
                slice(low, high) for low, high in zip(region.offsets, region.ends, strict=True)
            )
            flat = buffers[place.buffer.name]
            flat.as_strided(
                region.lengths, place.strides, flat.storage_offset() + place.offset
            ).copy_(whole[box])


def _switch_once(worker: ActorHybridWorker, figures: Figures) -> None:
    """A whole switch there and back, for bytes, peak and phases; the second one, for the first one also plans."""
    sharding = worker.sharding
    training, inference = _resident(worker), worker.inference.adaptor.nbytes
    for _ in range(2):
        report = sharding.enter(State.INFER)
        sharding.enter(State.TRAIN)
    received, own, least = (
        gather(value) for value in (report.bytes_received, report.bytes_own, report.bytes_least)
    )
    figures.bytes_received, figures.bytes_own, figures.bytes_least = (
        sum(received),
        sum(own),
        sum(least),
    )
    peaks = gather((report.peak_bytes, max(training, inference)))
    figures.peak_bytes, figures.max_layout_bytes = max(peaks, key=lambda pair: pair[0] - pair[1])
    figures.inference_bytes = sum(gather(inference))
    figures.bucket_bytes = max(bucket.nbytes for bucket in sharding.plan.buckets)
    figures.weights_kept = not worker.config.generate_config.release_weights
    figures.num_tensors = len(worker.table.shapes)
    figures.switch_phases = dict(report.seconds_by_phase)


def _resident(worker: ActorHybridWorker) -> int:
    """Bytes of training state on this rank's device now."""
    worker.sharding.offloader.onload(set(KINDS))
    return sum(
        nbytes
        for owners in worker.sharding.offloader.resident_nbytes().values()
        for nbytes in owners.values()
    )


def _time(
    entry: Entry,
    worker: ActorHybridWorker,
    request: Request,
    figures: Figures,
    results: dict[str, Digests],
) -> None:
    """Time one contender and check what it wrote."""
    key = f"{entry.key}_seconds"
    contender, failure = agreed(lambda: entry.build(worker))
    if failure is None:
        outcome, failure = agreed(lambda: measure(contender, request.runs, request.budget))
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
    if dist.get_rank() == 0:
        print(
            f"{entry.key}: {timing.seconds:.4f} s, and {timing.commit_seconds:.4f} s of repacking",
            flush=True,
        )


def _difference(entry: Entry, results: dict[str, Digests]) -> str | None:
    """Which parameters differ from those of the contender that it is compared with; the same answer on every rank."""
    if entry.compared_with is None:
        return None
    own, expected = results[entry.key], results.get(entry.compared_with, {})
    different = sorted(name for name in {*own, *expected} if own.get(name) != expected.get(name))
    found = gather((len(different), len(expected), different[:1]))
    if not min(total for _, total, _ in found):
        return f"nothing of {entry.compared_with} to compare with"
    if not (count := sum(count for count, _, _ in found)):
        return None
    first = next(name for _, _, names in found for name in names)
    num_parameters = sum(total for _, total, _ in found)
    return f"{count} of {num_parameters} parameters are not those of {entry.compared_with}: {first}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
