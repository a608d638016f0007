"""The numbers of an answer as people read them: sections of rows, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.advisor.facts import (
    GATHER,
    Answer,
    MinMeanMax,
    Ranges,
    bytes_across_hosts,
    device_memory,
    host_memory,
    moved_bytes,
    prefetched_bytes,
    range_of,
)
from hybrid_engine.advisor.later_switches import LaterSwitches
from hybrid_engine.advisor.prefetch_estimate import PrefetchEstimate
from hybrid_engine.layouts.memory_plan import GIB

UNITS = "GiB are 2^30 bytes, MiB 2^20; min, mean and max are over ranks, or over hosts where a row says so."


@dataclass(frozen=True)
class Unit:
    """In which tables of a job are written."""

    name: str
    nbytes: int

    @classmethod
    def of(cls, job: JobPlan) -> Unit:
        """MiB for a job of which a GiB would be little to see, as for a model for trials; else GiB."""
        return cls("GiB", GIB) if float(job.memory.device.max()) >= GIB / 10 else cls("MiB", 2**20)

    def number(self, nbytes: float) -> str:
        """Bytes in this unit."""
        size = nbytes / self.nbytes
        return f"{size:.3f}" if abs(size) >= 1e-3 or nbytes == 0 else f"{size:.3g}"


@dataclass(frozen=True)
class Row:
    """Numbers under one name; `is_part`: of those of a row above."""

    label: str
    numbers: MinMeanMax
    is_part: bool = False

    def cells(self, unit: Unit) -> tuple[str, str, str, str]:
        """The label, and numbers in a unit."""
        low, mean, high = (unit.number(self.numbers[name]) for name in ("min", "mean", "max"))
        return self.label, low, mean, high


@dataclass(frozen=True)
class Section:
    """Rows that belong together; `note` explains what is not plain."""

    title: str
    unit: Unit
    rows: tuple[Row, ...]
    note: str = ""


def sections_of(answer: Answer) -> Iterator[Section]:
    """In the order in which they are read."""
    job = answer.job
    yield _moved(job)
    yield _memory(job)
    if answer.prefetch is not None:
        yield _prefetched(answer.prefetch, Unit.of(job))
    if answer.later is not None:
        yield _later(answer.later, Unit.of(job))


def how_many(number: int, what: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number:,} {what}" + "s" * (number != 1)


_PARTS = "  of it "
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


def _rows(numbers: Ranges, labels: Mapping[str, str]) -> Iterator[Row]:
    for name, label in labels.items():
        if name in numbers:
            is_part = name in _IS_PART
            yield Row(_PARTS * is_part + label, numbers[name], is_part)


def _moved(job: JobPlan) -> Section:
    unit = Unit.of(job)
    hosts = len(set(job.cluster.hosts(job.world_size)))
    across = bytes_across_hosts(job)
    rows = (
        *_rows(moved_bytes(job.bytes), _MOVED),
        Row("received by a host from other hosts", across["received"]),
        Row("least that a host must receive", across["least"]),
        Row("received, with infer_rank_order: sequential", range_of(job.sequential.received)),
        Row(f"received by a {GATHER}", range_of(job.gathered)),
    )
    return Section(
        f"What a switch moves, {unit.name} by rank: {how_many(job.world_size, 'rank')} on {how_many(hosts, 'host')}",
        unit,
        rows,
        "Least: what is needed in generation and not held in training; no plan can receive less.",
    )


def _memory(job: JobPlan) -> Section:
    labels = {
        "params": "parameters",
        "inelastic": "leaving only at the end of a switch",
        "grads": "gradients",
        "optimizer": "optimizer state",
        "training": "training state: these three",
        "inference": "vLLM's weights",
        "switch": "a switch, if vLLM's weights came all at once",
        "interleaved_switch": "a switch, as it is" + ": bucket by bucket" * (not job.memory.keeps_inference),
        "peak": "device peak",
    }
    host = host_memory(job)
    rows = (
        *_rows(device_memory(job), labels),
        Row("host memory while generating", host["per_rank"]),
        Row("the same, by host", host["per_host"]),
    )
    note = (
        "A switch bucket by bucket takes the larger of parameters and vLLM's weights, and two buckets. The peak is the "
        f"most of any phase ({', '.join(job.phases)}), with what the configuration leaves on the device."
    )
    unit = Unit.of(job)
    return Section(f"Memory, {unit.name} by rank", unit, rows, note)


def _prefetched(estimate: PrefetchEstimate, unit: Unit) -> Section:
    labels = {
        "returning": "parameters and optimizer state, which come back",
        "within_peak": "during a rollout, within the peak above",
        "with_room": "during a rollout, with a large prefetch_mb",
        "peak_with_room": "device peak with that",
    }
    return Section(f"prefetch: auto, {unit.name} by rank", unit, tuple(_rows(prefetched_bytes(estimate), labels)))


def _later(later: LaterSwitches, unit: Unit) -> Section:
    title = f"Later switches, {unit.name} by rank, with incremental: auto and incremental_mb: {later.incremental_mb}"
    kept = Row("kept on the device", range_of(np.asarray(later.kept)))
    return Section(title, unit, (*_rows(moved_bytes(later.bytes), _MOVED), kept))
