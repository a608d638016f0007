"""Memory of a switch with both real engines: its peak, and growth over many cycles.

Peaks are compared with the peaks of `plan` (layouts/memory.py).
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pytest

from hybrid_engine.layouts.memory import MemoryPeaks, TrainingMemory
from hybrid_engine.switch.sharding_manager import State
from tests.harness.launch import on_engines
from tests.hybrid_engine.switch.fakes import (
    FORWARD,
    INFER,
    NBYTES,
    TRAIN,
    TRAINING_NBYTES,
    FakeInference,
    Rig,
)
from tests.zoo import workers

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "vocab_size": 520}
"""About 32 MB of float32 weights: many buckets of 1 MiB."""

KEPT = "tp2 -> dp2, weights kept"
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 -> dp2": ({"tensor_model_parallel_size": 2}, {}),
    "pp2 -> tp2": ({"pipeline_model_parallel_size": 2}, {"infer_tensor_parallel_size": 2}),
    "pp2 -> dp2, messages": ({"pipeline_model_parallel_size": 2}, {"transport": "collective"}),
    KEPT: ({"tensor_model_parallel_size": 2}, {"release_weights": False}),
}
NUM_CYCLES = 9
WARM_UP = 3
LEAK = 2**18
"""Bytes of growth allowed per cycle: 1 % of the memory that a cycle takes and returns."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("memory"), "qwen3", **SIZES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@on_engines({2: LAYOUTS}, timeout=500)
def test_peaks_are_those_of_plans_and_cycles_leak_nothing(model: Path, case: str) -> None:
    """A peak is the larger layout and two buckets, unless weights keep their memory."""
    actor, generate = LAYOUTS[case]
    worker = workers.build_worker(model, actor, {**generate, "bucket_mb": 1})
    sharding = worker.sharding
    offloader = sharding.offloader
    for state in (State.INFER, State.FORWARD):
        sharding.enter(state)
    training = offloader.resident_nbytes()["param"]
    inference = worker.inference.adaptor.nbytes
    bucket = max(bucket.nbytes for bucket in sharding.plan.buckets)
    assert len(sharding.plan.buckets) > 8  # so that a bucket is small beside a layout
    peak = sharding.enter(State.INFER).peak_bytes
    left = sum(offloader.resident_nbytes().values())
    highest = 0
    usages: list[dict[str, int]] = []
    for cycle in range(NUM_CYCLES):
        sharding.enter(State.TRAIN)
        of_state = sum(offloader.resident_nbytes().values())
        highest = max(highest, sharding.enter(State.INFER).peak_bytes)
        if cycle >= WARM_UP:
            usages.append(
                _measure_process(sum(arena.nbytes for arena in offloader._arenas.values()))
            )
    worker.shutdown()
    params, rest, nothing = (np.array([nbytes]) for nbytes in (training, of_state - training, 0))
    state = TrainingMemory(params, rest, nothing, copied=params)
    peaks = MemoryPeaks(state, np.array([inference]), bucket, keeps_inference=case == KEPT)
    if case == KEPT:
        # The loader layout of a bucket keeps its memory too, on a CPU.
        assert peaks.state.total < peaks.device <= highest <= peaks.device + bucket
        assert peaks.interleaved_switch <= peak <= peaks.interleaved_switch + bucket
    else:
        assert peak <= max(training, inference) + 2 * bucket
        assert peak < 0.9 * (training + inference)
        assert highest <= peaks.device
        assert left == 0
    resident = [usage.pop("resident") for usage in usages]
    # Libraries grow at some cycle once; a leak of the switch grows at every cycle.
    assert median(after - before for before, after in pairwise(resident)) < LEAK, resident
    before, *_, after = usages
    assert after.pop("arenas") == before.pop("arenas")
    assert {
        name: (before[name], after[name]) for name in before if after[name] > before[name]
    } == {}


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


class KeepingInference(FakeInference):
    """Releases weights but keeps their memory."""

    def release(self, keep: Collection[str] = ()) -> None:
        live = self.live
        super().release(keep)
        self.live = live


@pytest.mark.parametrize(("is_elastic", "is_kept"), [(False, False), (True, True), (False, True)])
def test_planned_peaks_match_late_offload_and_kept_weights(
    job: None, is_elastic: bool, is_kept: bool
) -> None:
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
    state = TrainingMemory(
        *(np.array([TRAINING_NBYTES[kind]]) for kind in TRAINING_NBYTES), copied=np.array([0])
    )
    state = state if is_elastic else state.leaving_whole()
    bucket = max(bucket.nbytes for bucket in rig.manager.plan.buckets)
    peaks = MemoryPeaks(state, np.array([NBYTES]), bucket, keeps_inference=is_kept)
    assert measured[FORWARD] == peaks.interleaved_switch == 2 * NBYTES
    assert measured[TRAIN] == peaks.device == peaks.state.total + is_kept * NBYTES
