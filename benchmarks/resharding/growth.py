"""Resources of a process over many cycles, and its memory during a cycle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.resharding.measuring import gather
from hybrid_engine.switch.sharding_manager import State
from hybrid_engine.trainer.worker import ActorHybridWorker

WARM_UP_CYCLES = 3
"""Cycles before the first count, in which pools, caches and the host arena fill."""

_SECONDS_BETWEEN_SAMPLES = 0.005


def resources() -> dict[str, int]:
    """Return anonymous memory, bytes of memory files, and numbers of descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "memfd_bytes": memfd_nbytes(),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def memfd_nbytes() -> int:
    """Return the bytes of the memory files that this process created."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:hybrid_engine."):
                total += os.stat(fd).st_blocks * 512
        except FileNotFoundError:  # the descriptor of the listing, already closed
            continue
    return total


def grow(worker: ActorHybridWorker, num_cycles: int) -> dict[str, Any]:
    """Switch back and forth `num_cycles` times; return the ranks' resources before and after."""
    for number in range(WARM_UP_CYCLES + num_cycles):
        worker.sharding.enter(State.INFER)
        worker.sharding.enter(State.TRAIN)
        if number == WARM_UP_CYCLES - 1:
            first = _sum_over_ranks(resources())
    return {"cycles": num_cycles, "first": first, "last": _sum_over_ranks(resources())}


def _sum_over_ranks(values: Mapping[str, int]) -> dict[str, int]:
    by_rank = gather(values)
    return {name: sum(counts[name] for counts in by_rank) for name in values}


def trace_cycle(worker: ActorHybridWorker) -> dict[str, Any]:
    """Return the device bytes of training and inference on this rank over a cycle.

    `events` has start and end of each switch. On a CPU, the host arena does not count: it stands
    for host memory.
    """
    started = time.perf_counter()
    samples: list[tuple[float, int, int]] = []
    events = []
    with _sampling(worker, samples, started):
        for target in (State.INFER, State.TRAIN):
            start = time.perf_counter() - started
            worker.sharding.enter(target)
            stop = time.perf_counter() - started
            events.append({"name": f"to {target.value}", "start": start, "stop": stop})
            time.sleep(20 * _SECONDS_BETWEEN_SAMPLES)  # separates the switches in the plot
    seconds, training, inference = map(list, zip(*samples, strict=True))
    return {
        "seconds": seconds,
        "training_bytes": training,
        "inference_bytes": inference,
        "events": events,
    }


@contextmanager
def _sampling(
    worker: ActorHybridWorker, samples: list[tuple[float, int, int]], started: float
) -> Iterator[None]:
    """Append (seconds, training bytes, inference bytes) from another thread during the block."""
    over = threading.Event()
    adaptor = worker.inference.adaptor

    def sample() -> None:
        while not over.wait(_SECONDS_BETWEEN_SAMPLES):
            try:
                inference = adaptor.resident_nbytes()
            except RuntimeError:  # a dict changed size during iteration
                continue
            samples.append((time.perf_counter() - started, memfd_nbytes(), inference))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
