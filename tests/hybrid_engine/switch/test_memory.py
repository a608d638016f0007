"""Memory of a switch with both real engines: its peak, and growth over many cycles.

Peaks are compared with the peaks of `plan` (layouts/memory.py).
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pytest

from hybrid_engine.layouts.memory import MemoryPeaks, TrainingMemory
from hybrid_engine.switch.sharding_manager import State
from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.switch.fakes import FORWARD, INFER, NBYTES, TRAIN, TRAINING_NBYTES, FakeInference, Rig
from tests.zoo import workers

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "vocab_size": 520}
"""About 32 MB of float32 weights: many buckets of 1 MiB."""

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 -> dp2": ({"tensor_model_parallel_size": 2}, {}),
    "pp2 -> tp2": ({"pipeline_model_parallel_size": 2}, {"infer_tensor_parallel_size": 2}),
    "pp2 -> dp2, messages": ({"pipeline_model_parallel_size": 2}, {"transport": "collective"}),
}
KEPT = "tp2 -> dp2, weights kept"
LAYOUTS_AND_KEPT = {**LAYOUTS, KEPT: ({"tensor_model_parallel_size": 2}, {"release_weights": False})}
NUM_CYCLES = 9
WARM_UP = 3
LEAK = 2**18
"""Bytes of growth allowed per cycle: 1 % of the memory that a cycle takes and returns."""


def measure_switches(
    model: Path, actor: Mapping[str, Any], generate: Mapping[str, Any]
) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Measure one cycle with the sizes of the layouts, then the process after more cycles."""
    worker = workers.build_worker(model, actor, {**generate, "bucket_mb": 1})
    sharding = worker.sharding
    offloader = sharding.offloader
    for state in (State.INFER, State.FORWARD):
        sharding.enter(state)
    sizes = {
        "training": sum(offloader.resident_nbytes()["param"].values()),
        "inference": worker.inference.adaptor.nbytes,
        "bucket": max(bucket.nbytes for bucket in sharding.plan.buckets),
        "num_buckets": len(sharding.plan.buckets),
        "peak": sharding.enter(State.INFER).peak_bytes,
        "left": sum(sum(by_owner.values()) for by_owner in offloader.resident_nbytes().values()),
        "highest": 0,
    }
    usage: list[dict[str, int]] = []
    for cycle in range(NUM_CYCLES):
        sharding.enter(State.TRAIN)
        sizes["state"] = sum(sum(by_owner.values()) for by_owner in offloader.resident_nbytes().values())
        sizes["highest"] = max(sizes["highest"], sharding.enter(State.INFER).peak_bytes)
        if cycle >= WARM_UP:
            usage.append(_measure_process(offloader.host_nbytes()))
    worker.shutdown()
    return sizes, usage


def _measure_process(host_nbytes: int) -> dict[str, int]:
    gc.collect()  # frees reference cycles of an earlier launch
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory of the allocator
    process = psutil.Process()
    return {
        "descriptors": min(_descriptor_counts(process)),
        "threads": threading.active_count() + len(os.listdir("/proc/self/task")),
        "arenas": host_nbytes,
        "resident": process.memory_info().rss,
    }


def _descriptor_counts(process: psutil.Process) -> Iterator[int]:
    """Count open descriptors repeatedly, because the failure watch briefly opens files in /proc."""
    for _ in range(3):
        yield process.num_fds()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def measured_by_layout(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    model = workers.write_model(tmp_path_factory.mktemp("memory"), "qwen3", **SIZES)
    return engines.launch_in_turn(
        2, {name: (measure_switches, (model, *layout)) for name, layout in LAYOUTS_AND_KEPT.items()}, timeout=500
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_peak_is_the_larger_layout_and_two_buckets(measured_by_layout: Outcomes, name: str) -> None:
    for sizes, _ in measured_by_layout[name]:
        assert sizes["num_buckets"] > 8  # so that a bucket is small beside a layout
        assert sizes["peak"] <= max(sizes["training"], sizes["inference"]) + 2 * sizes["bucket"]
        assert sizes["peak"] < 0.9 * (sizes["training"] + sizes["inference"])
        assert sizes["highest"] <= planned_peaks(sizes).device  # from training
        assert sizes["left"] == 0


def planned_peaks(sizes: Mapping[str, int], **settings: bool) -> MemoryPeaks:
    """Compute the peaks of `plan` for the sizes measured on a rank."""
    params, rest, nothing = (
        np.array([nbytes]) for nbytes in (sizes["training"], sizes["state"] - sizes["training"], 0)
    )
    state = TrainingMemory(params, rest, nothing, copied=params)
    return MemoryPeaks(state, np.array([sizes["inference"]]), sizes["bucket"], **settings)


@pytest.mark.slow
def test_weights_that_keep_their_memory_add_to_all_of_training(measured_by_layout: Outcomes) -> None:
    """The loader layout of a bucket keeps its memory too, on a CPU."""
    for sizes, _ in measured_by_layout[KEPT]:
        peaks = planned_peaks(sizes, keeps_inference=True)
        assert peaks.state.total < peaks.device <= sizes["highest"] <= peaks.device + sizes["bucket"]
        assert peaks.interleaved_switch <= sizes["peak"] <= peaks.interleaved_switch + sizes["bucket"]


class KeepingInference(FakeInference):
    """Releases weights but keeps their memory."""

    def release(self, keep: Collection[str] = ()) -> None:
        live = self.live
        super().release(keep)
        self.live = live


@pytest.mark.parametrize(("is_elastic", "is_kept"), [(False, False), (True, True), (False, True)])
def test_planned_peaks_match_late_offload_and_kept_weights(job: None, is_elastic: bool, is_kept: bool) -> None:
    rig = Rig(build=False, elastic=is_elastic, release_weights=not is_kept)
    if is_kept:
        rig.inference = KeepingInference(rig.script, rig.job.rank)
    rig.build()
    rig.manager.enter(INFER)
    measured = {}
    for state in (FORWARD, TRAIN):
        rig.manager.enter(state)
        if state is TRAIN:
            rig.training.step()  # gradients take memory once they are written
        report = rig.manager.enter(INFER)
        assert report is not None
        measured[state] = report.peak_bytes
    state = TrainingMemory(*(np.array([TRAINING_NBYTES[kind]]) for kind in TRAINING_NBYTES), copied=np.array([0]))
    state = state if is_elastic else state.leaving_whole()
    bucket = max(bucket.nbytes for bucket in rig.manager.plan.buckets)
    peaks = MemoryPeaks(state, np.array([NBYTES]), bucket, keeps_inference=is_kept)
    assert measured[FORWARD] == peaks.interleaved_switch == 2 * NBYTES
    assert measured[TRAIN] == peaks.device == peaks.state.total + is_kept * NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS_AND_KEPT)
def test_cycles_leak_nothing(measured_by_layout: Outcomes, name: str) -> None:
    for _, usages in measured_by_layout[name]:
        resident = [usage.pop("resident") for usage in usages]
        # Libraries grow at some cycle once; a leak of the switch grows at every cycle.
        assert median(after - before for before, after in pairwise(resident)) < LEAK, resident
        before, *_, after = usages
        assert after.pop("arenas") == before.pop("arenas")
        grown = {name: (before[name], after[name]) for name in before if after[name] > before[name]}
        assert not grown
