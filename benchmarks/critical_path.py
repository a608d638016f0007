"""Estimate the seconds of a large job's switch from bandwidths, and the bound of the hardware.

    python -m benchmarks.critical_path [--only TEXT] [--json FILE] [--nvlink 450] [--pcie 50] ...

Nothing is measured and no device is needed. The planner plans each job for rank 0, with parameters
at the offsets that they have in the memory of both engines, and the copies of the plan are counted:

    launches     kernels that `transports/copies.py` queues
    alone        kernels without the merging of copies in reverse order

Then the fill is simulated bucket by bucket, in the order of `switch/weight_container.py`. Three
resources work in parallel:

    host      queues copies, waits for them, synchronizes with other ranks, releases memory
    device    pulls the data of a bucket over the links and processes it, in order
    PCIe      copies parameters to the host; all copies are queued at the start

`bound` is the largest of the times that links, HBM and PCIe take alone, at the same rates. The
weights that vLLM offloaded and the optimizer state are not included; they move before and after the
fill.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

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
from tests.zoo.published_configs import DEEPSEEK_V3, QWEN3_30B_A3B, QWEN3_235B_A22B

RANKS_PER_HOST = 8
ITEMSIZE = 2
GRANULE = 2 * 2**20
RANK = 0


@dataclass(frozen=True)
class Rates:
    """Inputs: bandwidths in 10^9 bytes per second and direction, times in microseconds.

    Attributes:
        hbm, nvlink, infiniband, pcie: nominal bandwidths of an H100 or H200 with one 400 Gbit/s
            adapter per GPU.
        launch: host time to make two views and queue a kernel.
        view: host time to make one more pair of views for a batch.
        kernel: device time of the shortest kernel.
        chunk: host time to unmap and free a chunk of 32 MiB, measured on an H100; larger chunks
            take up to 318.
        bucket: host time of a bucket for agreement, bookkeeping and vLLM's processing. Assumed; on
            an H100 a bucket of Qwen3-1.7B took 2,700 including its kernels and chunks.
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
        """Return the seconds to move `nbytes` over the links, one link after the other."""
        rates = {Link.HOST: self.nvlink, Link.NETWORK: self.infiniband}
        return sum(nbytes.get(link, 0) / rate / 1e9 for link, rate in rates.items())


@dataclass(frozen=True)
class Job:
    """A model, its number of ranks, and its parallel sizes on both sides."""

    name: str
    config: dict[str, Any]
    num_ranks: int
    train: Mapping[str, int]
    infer: Mapping[str, int]


JOBS = (
    Job("30B-A3B, 8: EP8 -> TP8", QWEN3_30B_A3B, 8, {"expert": 8}, {"tensor": 8}),
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


@dataclass(frozen=True)
class Share:
    """Work of rank 0 in a bucket.

    Attributes:
        alone, launches: see the docstring of the module.
        views: pairs of views in batched copies.
        nbytes: received bytes by link, including copies within the rank.
        leaving: bytes of parameters that are offloaded after the bucket is sent.
    """

    alone: int
    launches: int
    views: int
    nbytes: Mapping[Link, int]
    leaving: float


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ALIGNMENT = 64
_PAIRS_OF_A_KERNEL = 64  # limit of torch's kernel for _foreach_copy_


def offsets_in_training(side: SideLayout, ranks: Iterable[int]) -> dict[BufferId, int]:
    """Return the offset of each parameter, in elements, in the flat buffers of Megatron's DDP.

    Megatron has a buffer for experts and a buffer for all other parameters, and fills them from the
    last parameter.
    """
    offsets: dict[BufferId, int] = {}
    for rank in ranks:
        ends = {True: 0, False: 0}
        for buffer_id, buffer in reversed(side.layout_of(rank).buffers.items()):
            is_expert = ".experts." in buffer_id.name
            offsets[buffer_id] = ends[is_expert]
            ends[is_expert] += -(-buffer.numel // _ALIGNMENT) * _ALIGNMENT
    return offsets


def places_in_vllm(side: SideLayout, rank: int) -> dict[str, tuple[str, int]]:
    """Map a canonical expert tensor to vLLM's fused parameter and its offset in elements."""
    experts: dict[str, set[int]] = {}
    numels: dict[str, int] = {}
    for buffer_id, buffer in side.layout_of(rank).buffers.items():
        if match := _EXPERT.fullmatch(buffer_id.name):
            layer, number, matrix = match.groups()
            experts.setdefault(layer, set()).add(int(number))
            numels[matrix] = buffer.numel
    places = {}
    for layer, numbers in experts.items():
        for index, number in enumerate(sorted(numbers)):
            gate = 2 * index * numels["gate"]
            places[f"{layer}.{number}.gate_proj.weight"] = f"{layer}.w13", gate
            places[f"{layer}.{number}.up_proj.weight"] = f"{layer}.w13", gate + numels["gate"]
            places[f"{layer}.{number}.down_proj.weight"] = f"{layer}.w2", index * numels["down"]
    return places


def shares_of(job: Job) -> list[Share]:
    """Plan a job and count the work of rank 0 in each bucket."""
    table = table_for(job.config)
    source = training_side(table, TrainParallelism(job.num_ranks, **job.train))
    destination = inference_side(table, InferenceParallelism(job.num_ranks, **job.infer))
    hosts = [rank // RANKS_PER_HOST for rank in range(job.num_ranks)]
    unserved = [name for name in table.shapes if not table.is_served(name)]
    nbytes = GenerateConfig().bucket_mb * 2**20
    plan = plan_sides(source, destination, hosts, nbytes, unserved, RANK, set(hosts))
    peers = {transfer.src_rank for bucket in plan.buckets for transfer in bucket.transfers}
    trained = offsets_in_training(source, peers)
    served = places_in_vllm(destination, RANK)
    training_nbytes = ITEMSIZE * sum(
        buffer.numel for buffer in source.layout_of(RANK).buffers.values()
    )
    weights = [bucket.nbytes for bucket in plan.buckets]
    return [
        _share(bucket, trained, served, training_nbytes * weight / sum(weights))
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
    # as in a job, transfers are merged by their place in vLLM's fused parameters first
    merged = coalesce(_to_live(transfer, served) for transfer in pulled)
    live = [_from_live(transfer, trained) for transfer in merged]
    runs: list[Run] = []
    num_indices = 0  # index tensors for copies in reverse order; a kernel makes each
    for _, transfers in groupby(sorted(live, key=_is_local), _is_local):
        group = [*_runs(list(transfers))]
        num_indices += len({run.lengths[0] for run in group if run.is_cut and not run.is_dense})
        runs += group
    boxes = [run.lengths[0] if run.is_cut else 1 for run in runs]
    dense = sum(count for run, count in zip(runs, boxes, strict=True) if run.is_dense)
    num_with_gaps = sum(not run.is_dense for run in runs)
    # a kernel per group of dense pairs, per copy with gaps, and per index tensor
    launches = -(-dense // _PAIRS_OF_A_KERNEL) + num_with_gaps + num_indices
    with_gaps = sum(count for run, count in zip(runs, boxes, strict=True) if not run.is_dense)
    alone = launches - num_with_gaps - num_indices + with_gaps
    nbytes = dict.fromkeys(Link, 0)
    for transfer in pulled:
        nbytes[transfer.link] += transfer.nbytes
    return Share(alone, launches, dense, nbytes, leaving)


def _is_local(transfer: Transfer) -> bool:
    """Key of the transport: copies within the rank and reads from peers are queued separately."""
    return transfer.link is Link.SELF


def _from_live(transfer: Transfer, trained: Mapping[BufferId, int]) -> Transfer:
    """Return the transfer with its source in Megatron's flat buffers, unless it is a relay."""
    src = transfer.src
    if src.buffer not in trained:
        return transfer
    kind = "experts" if ".experts." in src.buffer.name else "dense"
    offset = trained[src.buffer] + src.offset
    return replace(
        transfer, src=replace(src, buffer=BufferId(src.buffer.rank, kind), offset=offset)
    )


def _to_live(transfer: Transfer, served: Mapping[str, tuple[str, int]]) -> Transfer:
    """Return the transfer with the destination in vLLM's fused parameters."""
    dst = transfer.dst
    if dst.buffer.name not in served:
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
    """Simulate a fill; with `offloads`, parameters are offloaded bucket by bucket."""
    host = device = 0.0
    # when the parameters of each bucket have arrived on the host
    saved = [*accumulate(share.leaving / rates.pcie / 1e9 for share in shares)]
    chunk = chunk_nbytes_for(int(sum(share.leaving for share in shares)), GRANULE)
    for index, share in enumerate(shares):
        host += (rates.bucket + share.launches * rates.launch + share.views * rates.view) / 1e6
        moved = sum(share.nbytes.values())
        # a copy reads and writes HBM, so its bytes count twice
        pulling = max(
            rates.seconds(share.nbytes),
            2 * moved / rates.hbm / 1e9,
            share.launches * rates.kernel / 1e6,
        )
        # the first kernel of a bucket runs while the host queues the others
        device = max(device, host - share.launches * rates.launch / 1e6) + pulling
        host = max(host, device)  # the host waits for the copies, but not for their processing
        device += 2 * moved / rates.hbm / 1e9
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
    """Return the seconds of the slowest of links, HBM and PCIe, without any other cost."""
    over_links = rates.seconds({link: sum(share.nbytes[link] for share in shares) for link in Link})
    # copied and processed, each with a read and a write
    in_memory = 4 * sum(sum(share.nbytes.values()) for share in shares) / rates.hbm / 1e9
    to_host = sum(share.leaving for share in shares) / rates.pcie / 1e9 if offloads else 0.0
    return max(over_links, in_memory, to_host)


def figures_of(job: Job, rates: Rates) -> dict[str, Any]:
    """Return the counts of a job, and seconds and bound if parameters stay and if they leave."""
    shares = shares_of(job)
    figures: dict[str, Any] = {
        "job": job.name,
        "alone": sum(share.alone for share in shares),
        "launches": sum(share.launches for share in shares),
        "received": sum(share.nbytes[Link.HOST] + share.nbytes[Link.NETWORK] for share in shares),
    }
    for name, offloads in {"stay": False, "leave": True}.items():
        seconds = seconds_of(shares, rates, offloads=offloads)
        bound = bound_of(shares, rates, offloads=offloads)
        figures[name] = {"seconds": seconds, "bound": bound, "percent": 100 * bound / seconds}
    return figures


def main() -> None:
    """Print a row per job, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    for field in fields(Rates):
        parser.add_argument(f"--{field.name}", type=float, default=field.default)
    arguments = parser.parse_args()
    rates = Rates(**{field.name: getattr(arguments, field.name) for field in fields(Rates)})
    rows = [figures_of(job, rates) for job in JOBS if arguments.only in job.name]
    table = Table("job", title="rank 0; seconds are computed, not measured", title_justify="left")
    counts = ("received, GB", "alone", "launches")
    for column in (*counts, "stay, s", "bound", "%", "leave, s", "bound", "%"):
        table.add_column(column, justify="right")
    for row in rows:
        computed = (
            f"{row[name][key]:{'.0f' if key == 'percent' else '.3f'}}"
            for name in ("stay", "leave")
            for key in ("seconds", "bound", "percent")
        )
        received = f"{row['received'] / 1e9:.2f}"
        table.add_row(row["job"], received, str(row["alone"]), str(row["launches"]), *computed)
    Console(width=160).print(table)
    write_figures(arguments.json, {"rates": asdict(rates), "figures": rows})


if __name__ == "__main__":
    main()
