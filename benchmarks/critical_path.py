"""Estimate the seconds of a large job's switch from given bandwidths, beside the hardware's bound.

    python -m benchmarks.critical_path [--only TEXT] [--json FILE] [--nvlink 450] [--pcie 50] ...

Nothing is measured and no device is needed: the project's planner plans each job, for rank 0, with the memory of both
sides where it lies in live engines, and its copies are counted:

    transfers    of the plan that this rank pulls
    alone        copies, if those that lie backwards were each by itself
    launches     kernels that `transports/copies.py` queues

Then the fill is gone through bucket by bucket, as `switch/weight_container.py` does it. Three things work at a time:

    host      queues copies, waits for them, meets the others, gives memory back
    device    pulls what a bucket reads over the links, processes it, in order
    PCIe      copies parameters to the host, all of them queued at the start

`bound` is the larger of links, HBM and PCIe alone, at the same rates. Weights of vLLM that are asleep and the
optimizer's state are not in it: they come before and after.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it is started by its path

from benchmarks.launching import parser_of, write_figures
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.memory.device_pages import chunk_nbytes_for
from hybrid_engine.models import table_for
from hybrid_engine.planning.coalescing import coalesce
from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.planning.planner import plan_sides
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.copies import Run, origins_at, runs_of
from tests.zoo.published_configs import DEEPSEEK_V3, QWEN3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B

RANKS_PER_HOST, ITEMSIZE, GRANULE, RANK = 8, 2, 2 * 2**20, 0


@dataclass(frozen=True)
class Rates:
    """Inputs of the estimate: bandwidths in 10^9 bytes per second and direction, times in microseconds.

    Attributes:
        hbm, nvlink, infiniband, pcie: nominal, of an H100 or H200 with one adapter of 400 Gbit/s each.
        launch: of the host, to make two views and queue a kernel; view: to make one more pair for a batch.
        kernel: of the device, the shortest.
        chunk: of the host, to unmap and free one of 32 MiB, as measured on an H100; larger ones take up to 318.
        bucket: of the host for everything else in a bucket: agreement, bookkeeping, vLLM's processing. Assumed; on an
            H100 a bucket of Qwen3-1.7B took 2,700 with its kernels and chunks.
    """

    hbm: float = 3350.0
    nvlink: float = 450.0
    infiniband: float = 50.0
    pcie: float = 50.0
    launch: float = 10.0
    view: float = 2.0
    kernel: float = 3.0
    bucket: float = 2400.0
    chunk: float = 69.0

    def seconds(self, nbytes: Mapping[Link, float]) -> float:
        """Return the seconds that bytes take over the links, one link after the other."""
        rates = {Link.HOST: self.nvlink, Link.NETWORK: self.infiniband}
        return sum(nbytes.get(link, 0) / rate / 1e9 for link, rate in rates.items())


@dataclass(frozen=True)
class Job:
    """A model, and how many ranks hold it in which way on either side."""

    name: str
    config: dict[str, Any]
    num_ranks: int
    train: Mapping[str, int]
    infer: Mapping[str, int]


_QWEN3_0_6B = {
    **QWEN3_8B,
    **{
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "tie_word_embeddings": True,
}
JOBS = (
    Job("0.6B, 2: TP2 -> TP1 x DP2", _QWEN3_0_6B, 2, {"tensor": 2}, {}),
    Job("30B-A3B, 8: EP8 -> TP8", QWEN3_30B_A3B, 8, {"expert": 8}, {"tensor": 8}),
    Job("30B-A3B, 8: EP8 -> TP2 x DP4", QWEN3_30B_A3B, 8, {"expert": 8}, {"tensor": 2}),
    Job(
        "30B-A3B, 16: EP8 PP2 -> TP8 x DP2",
        QWEN3_30B_A3B,
        16,
        {"expert": 8, "pipeline": 2},
        {"tensor": 8},
    ),
    Job(
        "235B, 8: TP4 EP8 -> TP8",
        QWEN3_235B_A22B,
        8,
        {"tensor": 4, "expert": 8, "expert_tensor": 1},
        {"tensor": 8},
    ),
    Job(
        "235B, 64: TP4 PP4 EP16 -> TP8 x DP8",
        QWEN3_235B_A22B,
        64,
        {
            "tensor": 4,
            "pipeline": 4,
            "expert": 16,
            "expert_tensor": 1,
            "num_layers_in_last_pipeline_stage": 22,
        },
        {"tensor": 8},
    ),
    Job(
        "DeepSeek-V3, 256: PP16 EP16 -> TP32 x DP8",
        DEEPSEEK_V3,
        256,
        {"pipeline": 16, "expert": 16, "expert_tensor": 1, "num_layers_in_last_pipeline_stage": 1},
        {"tensor": 32},
    ),
)
"""The example, and the six of the issue that asked for these figures."""


@dataclass(frozen=True)
class Share:
    """Work of rank 0 in a bucket.

    Attributes:
        transfers: that it pulls, or that come to it. alone, launches: see the module.
        views: pairs that batches are made of.
        nbytes: by link, its own memory too.
        leaving: bytes of its parameters that go once the bucket is sent.
    """

    transfers: int
    alone: int
    launches: int
    views: int
    nbytes: Mapping[Link, int]
    leaving: float


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ALIGNMENT = 64
_TENSORS_OF_A_KERNEL = 64  # of torch's kernel for lists of pairs


def places_in_training(side: SideLayout, ranks: Iterable[int]) -> dict[BufferId, int]:
    """Where each parameter begins in Megatron's buffers, in elements: one for experts, one for all else, last first."""
    found: dict[BufferId, int] = {}
    for rank in ranks:
        ends = {True: 0, False: 0}
        for buffer_id, buffer in reversed(side.layout_of(rank).buffers.items()):
            is_expert = ".experts." in buffer_id.name
            found[buffer_id] = ends[is_expert]
            ends[is_expert] += -(-buffer.numel // _ALIGNMENT) * _ALIGNMENT
    return found


def places_in_vllm(side: SideLayout, rank: int) -> dict[str, tuple[str, int]]:
    """Canonical tensor -> vLLM's fused parameter of all experts of a layer, and where in it, in elements."""
    experts: dict[str, set[int]] = {}
    numels: dict[str, int] = {}
    for buffer_id, buffer in side.layout_of(rank).buffers.items():
        if match := _EXPERT.fullmatch(buffer_id.name):
            layer, number, matrix = match.groups()
            experts.setdefault(layer, set()).add(int(number))
            numels[matrix] = buffer.numel
    found = {}
    for layer, numbers in experts.items():
        for index, number in enumerate(sorted(numbers)):
            found[f"{layer}.{number}.gate_proj.weight"] = f"{layer}.w13", 2 * index * numels["gate"]
            found[f"{layer}.{number}.up_proj.weight"] = (
                f"{layer}.w13",
                (2 * index + 1) * numels["gate"],
            )
            found[f"{layer}.{number}.down_proj.weight"] = f"{layer}.w2", index * numels["down"]
    return found


def shares_of(job: Job) -> list[Share]:
    """Plan a job and count what rank 0 does in each bucket."""
    table = table_for(job.config)
    source = training_side(table, TrainParallelism(job.num_ranks, **job.train))
    destination = inference_side(table, InferenceParallelism(job.num_ranks, **job.infer))
    hosts = [rank // RANKS_PER_HOST for rank in range(job.num_ranks)]
    unserved = [name for name in table.shapes if not table.is_served(name)]
    nbytes = GenerateConfig().bucket_mb * 2**20
    plan = plan_sides(source, destination, hosts, nbytes, unserved, RANK, set(hosts))
    peers = {transfer.src_rank for bucket in plan.buckets for transfer in bucket.transfers}
    places = places_in_training(source, peers), places_in_vllm(destination, RANK)
    own_nbytes = ITEMSIZE * sum(buffer.numel for buffer in source.layout_of(RANK).buffers.values())
    weights = [bucket.nbytes for bucket in plan.buckets]
    return [
        _share(bucket, *places, own_nbytes * weight / sum(weights))
        for bucket, weight in zip(plan.buckets, weights, strict=True)
    ]


def _share(
    bucket: Bucket,
    trained: Mapping[BufferId, int],
    served: Mapping[str, tuple[str, int]],
    leaving: float,
) -> Share:
    pulled = [
        transfer for transfer in (*bucket.transfers, *bucket.fan_out) if transfer.dst_rank == RANK
    ]
    # the planner joins what goes from one parameter to another
    live = [
        _from_live(each, trained)
        for each in coalesce(_to_live(transfer, served) for transfer in pulled)
    ]
    runs: list[Run] = []
    num_indices = 0  # lists of numbers by which runs go backwards, each made by a kernel of its own
    for _, same in groupby(sorted(live, key=_way), _way):
        of_way = [*_runs(list(same))]
        num_indices += len({run.lengths[0] for run in of_way if run.is_cut and not run.is_dense})
        runs += of_way
    boxes = [run.lengths[0] if run.is_cut else 1 for run in runs]
    dense = sum(count for run, count in zip(runs, boxes, strict=True) if run.is_dense)
    num_with_gaps = sum(not run.is_dense for run in runs)
    launches = -(-dense // _TENSORS_OF_A_KERNEL) + num_with_gaps + num_indices
    with_gaps = sum(count for run, count in zip(runs, boxes, strict=True) if not run.is_dense)
    alone = launches - num_with_gaps - num_indices + with_gaps
    nbytes = {link: sum(each.nbytes for each in pulled if each.link is link) for link in Link}
    return Share(len(pulled), alone, launches, dense, nbytes, leaving)


def _way(transfer: Transfer) -> bool:
    """Transports are called one after the other: within the rank, and from others."""
    return transfer.link is Link.SELF


def _from_live(transfer: Transfer, trained: Mapping[BufferId, int]) -> Transfer:
    """The same copy out of Megatron's buffers; a relay buffer is as planned."""
    if (src := transfer.src).buffer not in trained:
        return transfer
    kind = "experts" if ".experts." in src.buffer.name else "dense"
    offset = trained[src.buffer] + src.offset
    return replace(
        transfer, src=replace(src, buffer=BufferId(src.buffer.rank, kind), offset=offset)
    )


def _to_live(transfer: Transfer, served: Mapping[str, tuple[str, int]]) -> Transfer:
    """The same copy into vLLM's fused parameters."""
    if (dst := transfer.dst).buffer.name not in served:
        return transfer
    name, start = served[dst.buffer.name]
    return replace(
        transfer,
        dst=replace(dst, buffer=BufferId(dst.buffer.rank, name), offset=start + dst.offset),
    )


def _runs(transfers: Sequence[Transfer]) -> Iterator[Run]:
    return runs_of(
        transfers, origins_at({transfer.src.buffer for transfer in transfers}, torch.bfloat16)
    )


def seconds_of(shares: Sequence[Share], rates: Rates, *, offloads: bool) -> float:
    """Go through a fill; `offloads`: parameters leave bucket by bucket."""
    host = device = 0.0
    saved = [*accumulate(share.leaving / rates.pcie / 1e9 for share in shares)]
    chunk = chunk_nbytes_for(int(sum(share.leaving for share in shares)), GRANULE)
    for index, share in enumerate(shares):
        host += (rates.bucket + share.launches * rates.launch + share.views * rates.view) / 1e6
        moved = sum(share.nbytes.values())
        pulling = max(
            rates.seconds(share.nbytes),
            2 * moved / rates.hbm / 1e9,
            share.launches * rates.kernel / 1e6,
        )
        device = max(device, host - share.launches * rates.launch / 1e6) + pulling
        host = max(host, device)  # the copies are waited for
        device += 2 * moved / rates.hbm / 1e9  # and processed, for which nobody waits
        if offloads and index:
            host = (
                max(host, saved[index - 1]) + shares[index - 1].leaving / chunk * rates.chunk / 1e6
            )
    return max(
        host,
        device,
        saved[-1] + shares[-1].leaving / chunk * rates.chunk / 1e6 if offloads else 0.0,
    )


def bound_of(shares: Sequence[Share], rates: Rates, *, offloads: bool) -> float:
    """The slowest of links, HBM and PCIe, if nothing else took time."""
    over_links = rates.seconds({link: sum(share.nbytes[link] for share in shares) for link in Link})
    in_memory = 4 * sum(sum(share.nbytes.values()) for share in shares) / rates.hbm / 1e9
    to_host = sum(share.leaving for share in shares) / rates.pcie / 1e9 if offloads else 0.0
    return max(over_links, in_memory, to_host)


def figures_of(job: Job, rates: Rates) -> dict[str, Any]:
    """Return a job's counts, and its seconds and their bound where parameters stay and where they leave."""
    shares = shares_of(job)
    counts = {
        name: sum(getattr(share, name) for share in shares)
        for name in ("transfers", "alone", "launches")
    }
    found: dict[str, Any] = {"job": job.name, "buckets": len(shares), **counts}
    found["received"] = sum(
        share.nbytes[Link.HOST] + share.nbytes[Link.NETWORK] for share in shares
    )
    for name, offloads in {"stay": False, "leave": True}.items():
        seconds, bound = (each(shares, rates, offloads=offloads) for each in (seconds_of, bound_of))
        found[name] = {"seconds": seconds, "bound": bound, "percent": 100 * bound / seconds}
    return found


def main() -> None:
    """Print a row for each job, and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="only jobs whose name has this text")
    for field in fields(Rates):
        parser.add_argument(f"--{field.name}", type=float, default=field.default)
    arguments = parser.parse_args()
    rates = Rates(**{field.name: getattr(arguments, field.name) for field in fields(Rates)})
    rows = [figures_of(job, rates) for job in JOBS if arguments.only in job.name]
    table = Table("job", title="of rank 0; seconds by a model, not measured", title_justify="left")
    for column in (
        "buckets",
        "received, GB",
        "transfers",
        "alone",
        "launches",
        "stay, s",
        "bound",
        "%",
    ):
        table.add_column(column, justify="right")
    for column in ("leave, s", "bound", "%"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = (str(row[name]) for name in ("transfers", "alone", "launches"))
        modelled = (
            f"{row[name][key]:{'.0f' if key == 'percent' else '.3f'}}"
            for name in ("stay", "leave")
            for key in ("seconds", "bound", "percent")
        )
        table.add_row(
            row["job"], str(row["buckets"]), f"{row['received'] / 1e9:.2f}", *counts, *modelled
        )
    Console(width=160).print(table)
    write_figures(arguments.json, {"rates": asdict(rates), "figures": rows})


if __name__ == "__main__":
    main()
