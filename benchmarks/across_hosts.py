"""Resharding between hosts that are pretended: four ranks of this machine, messages over gloo, no engines.

    python -m benchmarks.across_hosts [--train TP PP] [--infer TP PP] [--hosts a,b,a,b] [--layers N] [--json FILE]

The same fill in four ways, one after the other in each round; the median of several: with relay buffers or without, and
with the next bucket's messages under way while a bucket is written and committed, or only after. `network` is what
crosses between ranks that take themselves to be on different hosts. Here that is this machine's loopback, which is
neither a network's speed nor its latency: bytes hold anywhere, seconds do not. `--commit-ms` waits so long for each
bucket's commit, as an engine would that repacks weights on its device.
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
class Way:
    """How a fill goes."""

    is_relayed: bool
    is_ahead: bool


WAYS = {
    "neither": Way(False, False),
    "relayed": Way(True, False),
    "one bucket ahead": Way(False, True),
    "both": Way(True, True),
}


class PlainWeights:
    """Inference weights that are flat buffers and nothing else; their memory is kept, a commit takes some seconds."""

    def __init__(self, layout: Layout, rank: int, commit_seconds: float) -> None:
        self._layout = layout
        self._commit_seconds = commit_seconds
        self._groups: dict[str, dict[str, torch.Tensor]] = {}
        for buffer_id, buffer in layout.buffers.items():
            if buffer_id.rank == rank:
                flat = torch.zeros(buffer.numel, dtype=getattr(torch, buffer.dtype))
                self._groups.setdefault(buffer.group, {})[buffer_id.name] = flat

    def layout(self) -> Layout:
        """Of all ranks."""
        return self._layout

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The buffers of these groups."""
        return {name: flat for group in groups for name, flat in self._groups[group].items()}

    def commit(self, groups: Sequence[str]) -> None:
        """Wait: buffers are in force as they are."""
        time.sleep(self._commit_seconds)

    def finish_fill(self) -> None:
        """Do nothing: all memory is the buffers' own."""

    def abandon(self) -> None:
        """Do nothing: no rank waits for another in `commit`."""

    def release(self) -> None:
        """The memory is kept."""

    def checksum(self) -> float:
        """Of all elements, in float64."""
        return sum(
            float(flat.double().sum())
            for buffers in self._groups.values()
            for flat in buffers.values()
        )


def containers(arguments: Namespace) -> tuple[dict[str, WeightContainer], dict[str, torch.Tensor]]:
    """One for each way, over the same buffers; and this rank's source. Collective."""
    rank, hosts = dist.get_rank(), arguments.hosts.split(",")
    table = table_for(ModelShape(arguments.layers, 1024, 2816, 16, 8, 16384).config())
    sides = (
        TrainParallelism(len(hosts), *arguments.train),
        InferenceParallelism(len(hosts), *arguments.infer),
    )
    source, destination = (
        side(table, sizes).layout() for side, sizes in zip(_SIDES, sides, strict=True)
    )
    buffers = {
        buffer_id.name: allocate_elastic(buffer.numel, getattr(torch, buffer.dtype), "cpu", "param")
        for buffer_id, buffer in source.buffers.items()
        if buffer_id.rank == rank
    }
    for number, flat in enumerate(buffers.values()):
        flat.copy_(torch.arange(flat.numel()) % 251 + number % 5)
    weights = PlainWeights(destination, rank, arguments.commit_ms / 1e3)
    found = {}
    for name, way in WAYS.items():
        relaying = hosts if way.is_relayed else ()
        bucket_nbytes = arguments.bucket_mb * 2**20
        sides = (Side.split(layout, len(hosts)) for layout in (source, destination))
        made = plan(*sides, hosts, bucket_nbytes, source.tensors, rank, relaying_hosts=relaying)
        relays = RelayBuffers(rank, made.relays)
        gathered: list[Any] = [None] * len(hosts)
        dist.all_gather_object(gathered, export_handles(rank, {**buffers, **relays.tensors}))
        handles = {buffer: handle for part in gathered for buffer, handle in part.items()}
        router = TransportSet.connect(
            TransportContext(rank, source.buffers, handles, dist.new_group(), relays=relays)
        )
        found[name] = WeightContainer(weights, made, router, sends_ahead=way.is_ahead)
    return found, buffers


_SIDES = training_side, inference_side


def measure(arguments: Namespace) -> dict[str, Any]:
    """Fill again and again; this rank's figures."""
    by_name, source = containers(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in by_name}
    reports: dict[str, FillReport] = {}
    for number in range(WARM_UP + arguments.repeat):
        for name, container in by_name.items():
            dist.barrier()
            started = time.perf_counter()
            container.begin()
            reports[name] = container.fill(source)
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
            container.release()
    checksums = {name: container._weights.checksum() for name, container in by_name.items()}
    if len(set(checksums.values())) != 1:
        raise AssertionError(f"the ways differ: {checksums}")
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
    """Measure on one rank; rank 0 writes the figures of all."""
    dist.init_process_group("gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, measure(Namespace(**values)))
    if dist.get_rank() == 0:
        Path(values["out"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, print a line for each way, write the figures."""
    parser = parser_of(__doc__)
    sizes = {"type": int, "nargs": "+", "metavar": ("TP", "PP")}
    parser.add_argument(
        "--train", default=[2], **sizes, help="tensor and pipeline parallel size in training"
    )
    parser.add_argument("--infer", default=[1], **sizes, help="likewise, in generation")
    parser.add_argument(
        "--hosts", default="a,b,a,b", help="where each rank takes itself to be; also their number"
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="of about 24 MB each, beside 64 MB of vocabulary"
    )
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--commit-ms", type=float, default=0.0, help="for each bucket")
    parser.add_argument(
        "--repeat", type=int, default=9, help="fills of each kind; the median counts"
    )
    arguments = parser.parse_args()
    job, num_ranks = {**vars(arguments), "json": None}, len(arguments.hosts.split(","))
    by_rank = figures_of_ranks("benchmarks.across_hosts", job, num_ranks, 600)
    figures = {
        name: {
            key: (max if key == "seconds" else sum)(figures[name][key] for figures in by_rank)
            for key in by_rank[0][name]
        }
        for name in by_rank[0]
    }
    for name, row in figures.items():
        sizes = ", ".join(f"{key} {row[key] / 1e6:.1f} MB" for key in ("network", "host", "own"))
        print(f"{name:16} {row['seconds'] * 1e3:7.1f} ms, all ranks together: {sizes}")
    write_figures(arguments.json, figures)


if __name__ == "__main__":
    main_or_rank(main, run_rank)
