"""What the process itself holds: over many cycles, and over the time of one."""

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
"""Cycles before the first count: pools, caches and the host arena fill in these."""

_SECONDS_BETWEEN_SAMPLES = 0.005


def held() -> dict[str, int]:
    """Bytes and numbers that this process holds now.

    rss_bytes: anonymous memory in RAM. memfd_bytes: pages of the memory files that it owns. fds, threads: numbers.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "memfd_bytes": memfd_nbytes(),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def memfd_nbytes() -> int:
    """Pages of this process's own memory files."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:hybrid_engine."):
                total += os.stat(fd).st_blocks * 512
        except FileNotFoundError:  # the listing's own descriptor, closed by now
            continue
    return total


def grow(worker: ActorHybridWorker, num_cycles: int) -> dict[str, Any]:
    """Switch to inference and back `num_cycles` times after some that warm up; what all ranks held after each."""
    samples = []
    for number in range(WARM_UP_CYCLES + num_cycles):
        worker.sharding.enter(State.INFER)
        worker.sharding.enter(State.TRAIN)
        if number >= WARM_UP_CYCLES - 1:
            samples.append(_sum_over_ranks(held()))
    return {"cycles": num_cycles, "first": samples[0], "last": samples[-1], "samples": samples}


def _sum_over_ranks(values: Mapping[str, int]) -> dict[str, int]:
    everyone = gather(values)
    return {name: sum(one[name] for one in everyone) for name in values}


def trace_cycle(worker: ActorHybridWorker) -> dict[str, Any]:
    """Device bytes of this rank over one switch to inference and back: training and inference, by time.

    `events`: when each switch began and ended. On a CPU the host arena is not counted: it stands for host memory.
    """
    started = time.perf_counter()
    samples: list[tuple[float, int, int]] = []
    events = []
    with _sampling(worker, samples, started):
        for target in (State.INFER, State.TRAIN):
            before = time.perf_counter() - started
            worker.sharding.enter(target)
            events.append(
                {
                    "name": f"to {target.value}",
                    "start": before,
                    "stop": time.perf_counter() - started,
                }
            )
            time.sleep(20 * _SECONDS_BETWEEN_SAMPLES)
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
    """Note the bytes again and again in a thread of its own."""
    over = threading.Event()
    adaptor = worker.inference.adaptor

    def sample() -> None:
        while not over.wait(_SECONDS_BETWEEN_SAMPLES):
            try:
                inference = adaptor.resident_nbytes()
            except RuntimeError:  # the books changed while they were read
                continue
            samples.append((time.perf_counter() - started, memfd_nbytes(), inference))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
