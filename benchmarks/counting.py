"""Counts of a switch: kernels and copies by torch's profiler, calls of the driver's virtual memory.

The profiler sees kernels, copies and calls of the runtime, but not the calls by which the engine
and vLLM's allocator map memory. Those are counted where Python makes them.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from hybrid_engine.memory.cuda_driver import CudaDriver

_ALLOCATOR = "vllm.device_allocator.cumem"
_CALLS_OF_ALLOCATOR = {
    "create_and_map": ("cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    "unmap_and_release": ("cuMemUnmap", "cuMemRelease"),
}
"""Calls of the driver in vLLM's C functions, for one segment."""
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_ON_DEVICE = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
"""Categories of a trace's events on the device."""


@dataclass
class Profile:
    """Counts of a block on one rank. On a CPU those of the device are 0.

    Attributes:
        trace: name of the trace's file, for Perfetto or chrome://tracing.
        kernels, copies, fills: operations on the device.
        busy_seconds: sum of their times; more than the wall's where streams overlap.
        waits: waits of the host for the device.
        operators: calls of torch's operators on the host.
        driver: calls of the driver's virtual memory, by name.
    """

    trace: str
    kernels: int = 0
    copies: int = 0
    fills: int = 0
    busy_seconds: float = 0.0
    waits: int = 0
    operators: int = 0
    driver: dict[str, int] = field(default_factory=dict)


@contextmanager
def profiled(trace: Path) -> Iterator[Profile]:
    """Profile the block and write its trace; the counts are complete afterwards."""
    counts = Profile(trace.name)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with driver_calls() as calls, profile(activities=activities) as profiler:
        yield counts
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    counts.driver = dict(calls)
    for event in json.loads(trace.read_text())["traceEvents"]:
        category = event.get("cat")
        if category in _ON_DEVICE:
            name = _ON_DEVICE[category]
            setattr(counts, name, getattr(counts, name) + 1)
            counts.busy_seconds += event["dur"] / 1e6
        counts.waits += event.get("name") in _WAITS
        counts.operators += category == "cpu_op"


@contextmanager
def driver_calls() -> Iterator[Counter[str]]:
    """Count calls of the driver's virtual memory during the block, by the engine and by vLLM."""
    calls: Counter[str] = Counter()
    with ExitStack() as patches:
        call = CudaDriver._call

        def counted(driver: CudaDriver, name: str, *arguments: Any) -> Any:
            calls[name] += 1
            return call(driver, name, *arguments)

        patches.enter_context(mock.patch.object(CudaDriver, "_call", counted))
        if torch.cuda.is_available():
            allocator = importlib.import_module(_ALLOCATOR)
            for function, names in _CALLS_OF_ALLOCATOR.items():
                counting = _counted(getattr(allocator, function), calls, names)
                patches.enter_context(mock.patch.object(allocator, function, counting))
        yield calls


def _counted(
    function: Callable[..., Any], calls: Counter[str], names: tuple[str, ...]
) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.update(names)
        return function(*arguments)

    return call
