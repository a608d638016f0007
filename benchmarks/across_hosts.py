"""Resharding between simulated hosts: four ranks of one machine, messages over gloo, no engines.

    python -m benchmarks.across_hosts [--train TP PP] [--infer TP PP] [--hosts a,b,a,b]
                                      [--layers N] [--json FILE]

Fills the same weights with and without relay buffers, and with and without sending the next bucket
ahead while a bucket is written and committed. The variants take turns; the median of several fills
counts. `network` is the traffic between ranks of different simulated hosts. It runs over the
loopback of this machine, so its bytes hold anywhere and its seconds do not.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.flat_models import ModelShape
from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.resharding.measuring import gather
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.planner import plan
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.weight_container import FillReport, WeightContainer
from hybrid_engine.transports.context import RelayBuffers, TransportContext
from hybrid_engine.transports.router import TransportSet, export_handles

WARM_UP = 1


@dataclass(frozen=True)
class Variant:
    """Options of a fill."""

    is_relayed: bool
    sends_ahead: bool


VARIANTS = {
    "neither": Variant(is_relayed=False, sends_ahead=False),
    "relayed": Variant(is_relayed=True, sends_ahead=False),
    "one bucket ahead": Variant(is_relayed=False, sends_ahead=True),
    "both": Variant(is_relayed=True, sends_ahead=True),
}


class PlainWeights:
    """Inference weights in flat buffers without an engine. `release` keeps their memory."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._groups: dict[str, dict[str, torch.Tensor]] = {}
        for buffer_id, buffer in layout.buffers.items():
            if buffer_id.rank == rank:
                flat = torch.zeros(buffer.numel, dtype=getattr(torch, buffer.dtype))
                self._groups.setdefault(buffer.group, {})[buffer_id.name] = flat

    def layout(self) -> Layout:
        return self._layout

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return {name: flat for group in groups for name, flat in self._groups[group].items()}

    def commit(self, groups: Sequence[str]) -> None: ...

    def finish_fill(self) -> None: ...

    def abandon(self) -> None: ...

    def release(self) -> None: ...

    def checksum(self) -> float:
        """Sum of all elements in float64."""
        buffers = [flat for group in self._groups.values() for flat in group.values()]
        return sum(float(flat.double().sum()) for flat in buffers)


def containers(arguments: Namespace) -> tuple[dict[str, WeightContainer], dict[str, torch.Tensor]]:
    """Return a container per variant and the source buffers of this rank. Collective."""
    rank = dist.get_rank()
    hosts = arguments.hosts.split(",")
    num_ranks = len(hosts)
    table = table_for(ModelShape(arguments.layers, 1024, 2816, 16, 8, 16384).config())
    source = training_side(table, TrainParallelism(num_ranks, *arguments.train)).layout()
    destination = inference_side(table, InferenceParallelism(num_ranks, *arguments.infer)).layout()
    buffers = {
        buffer_id.name: allocate_elastic(buffer.numel, getattr(torch, buffer.dtype), "cpu", "param")
        for buffer_id, buffer in source.buffers.items()
        if buffer_id.rank == rank
    }
    for number, flat in enumerate(buffers.values()):
        # the period is prime, so that no two shards are equal
        flat.copy_(torch.arange(flat.numel()) % 251 + number % 5)
    weights = PlainWeights(destination, rank)
    by_variant = {}
    for name, variant in VARIANTS.items():
        rank_plan = plan(
            Side.split(source, num_ranks),
            Side.split(destination, num_ranks),
            hosts,
            arguments.bucket_mb * 2**20,
            source.tensors,
            rank,
            relaying_hosts=hosts if variant.is_relayed else (),
        )
        relays = RelayBuffers(rank, rank_plan.relays)
        handles = {}  # handles of the memory of all ranks
        for exported in gather(export_handles(rank, {**buffers, **relays.tensors})):
            handles.update(exported)
        router = TransportSet.connect(
            TransportContext(rank, source.buffers, handles, dist.new_group(), relays=relays)
        )
        by_variant[name] = WeightContainer(
            weights, rank_plan, router, sends_ahead=variant.sends_ahead
        )
    return by_variant, buffers


def measure(arguments: Namespace) -> dict[str, Any]:
    """Fill `repeat` times by each variant; return the figures of this rank."""
    by_variant, source = containers(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in by_variant}
    reports: dict[str, FillReport] = {}
    for number in range(WARM_UP + arguments.repeat):
        for name, container in by_variant.items():
            dist.barrier()
            started = time.perf_counter()
            container.begin()
            reports[name] = container.fill(source)
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
            container.release()
    checksums = {name: container._weights.checksum() for name, container in by_variant.items()}
    if len(set(checksums.values())) != 1:
        raise AssertionError(f"results of the variants differ: {checksums}")
    return {
        name: {
            "seconds": statistics.median(seconds[name]),
            "network": report.nbytes_by_link[Link.NETWORK],
            "host": report.nbytes_by_link[Link.HOST],
            "own": report.nbytes_by_link[Link.SELF],
        }
        for name, report in reports.items()
    }


def run_rank(values: dict[str, Any]) -> None:
    """Measure on one rank; rank 0 writes the figures of all ranks."""
    dist.init_process_group("gloo")
    by_rank = gather(measure(Namespace(**values)))
    if dist.get_rank() == 0:
        Path(values["out"]).write_text(json.dumps(by_rank))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, print a line per variant, write the figures."""
    parser = parser_of(__doc__)
    sizes = {"type": int, "nargs": "+", "metavar": ("TP", "PP")}
    parser.add_argument(
        "--train", default=[2, 2], **sizes, help="tensor and pipeline parallel size in training"
    )
    parser.add_argument(
        "--infer", default=[1], **sizes, help="tensor and pipeline parallel size in generation"
    )
    parser.add_argument("--hosts", default="a,b,a,b", help="simulated host of each rank")
    parser.add_argument(
        "--layers", type=int, default=2, help="layers of 24 MB, in addition to 64 MB of vocabulary"
    )
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=9, help="timed fills of each variant")
    arguments = parser.parse_args()
    job = {**vars(arguments), "json": None}
    num_ranks = len(arguments.hosts.split(","))
    by_rank = figures_of_ranks("benchmarks.across_hosts", job, num_ranks, 600)
    figures = {
        name: {
            key: (max if key == "seconds" else sum)(figures[name][key] for figures in by_rank)
            for key in by_rank[0][name]
        }
        for name in by_rank[0]
    }
    for name, row in figures.items():
        traffic = ", ".join(f"{key} {row[key] / 1e6:.1f} MB" for key in ("network", "host", "own"))
        print(f"{name:16} {row['seconds'] * 1e3:7.1f} ms, sum over all ranks: {traffic}")
    write_figures(arguments.json, figures)


if __name__ == "__main__":
    main_or_rank(main, run_rank)
