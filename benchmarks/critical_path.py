"""Estimate the seconds of a large job's switch from bandwidths, and the bound of the hardware.

    python -m benchmarks.critical_path [--only TEXT] [--json FILE]
    python -m benchmarks.critical_path --measured     # beside what one H100 took
    python -m tests.software_gpu --gib 300 -- python -m benchmarks.critical_path --host

Nothing is measured and no device is needed. The planner plans each job for rank 0, with parameters
at the offsets that they have in the memory of both engines, and the work of this plan is counted:

    launches     kernels that `transports/runs.py` queues on a GPU
    mapped       chunks of peers' memory that are mapped once, in the first switch
    exports      chunks whose descriptors are exported once

Both sides share their memory, so later switches map nothing (`memory/pool.py`).
Then the fill is simulated bucket by bucket, in the order of `switch/weight_container.py`. Three
resources work in parallel:

    host      queues copies, waits for them, synchronizes with other ranks
    device    pulls the data of a bucket over the links and processes it, in order
    PCIe      copies parameters to the host; all copies are queued at the start

`bound` is the largest of the times that links, HBM and PCIe take alone, at the same rates. For the
large jobs optimizer state is not included: it moves before and after the fill. With `--measured`
it is, where the measured switch had it. `--host` takes the CPU time of this machine to queue the
copies of a fill, without the launches themselves; nothing is copied.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import driver_costs
from benchmarks.driver_costs import GIVE_BACK, TAKE
from benchmarks.launching import parser_of, write_figures
from benchmarks.resharding.cases import QWEN3_1_7B
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
from hybrid_engine.transports.copies import BatchedCopies
from hybrid_engine.transports.pull import source_extents
from hybrid_engine.transports.runs import Origin, runs_of, tiles_of
from tests.zoo.published_configs import DEEPSEEK_V3, QWEN3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B

RANKS_PER_HOST = 8
ITEMSIZE = 2
OPTIMIZER_NBYTES = 12
"""Bytes of Adam's state per parameter: main parameter and two moments in float32."""
MIB = 2**20
GRANULE = 2 * MIB
PIECE_NBYTES = 256 * MIB
"""Memory of one piece is mapped while another is copied (`memory/offload_items.py`)."""
RANK = 0


@dataclass(frozen=True)
class Rates:
    """Inputs: bandwidths in 10^9 bytes per second and direction, times in microseconds.

    Attributes:
        hbm, nvlink, infiniband: nominal bandwidths of an H100 or H200 with one 400 Gbit/s adapter
            per GPU.
        pcie: measured on an H100 and an H200.
        copy: copies of the plan within a GPU, each byte counted once: 400 copies of 512 KiB in one
            `_foreach_copy_` on an H100. The kernel of `transports/tile_kernel.py` was not measured.
        launch: host time to queue a kernel.
        kernel: device time of the shortest kernel.
        mapped: host time to map and unmap a chunk of a peer, between two processes on one H200.
        export: host time to export a chunk's descriptor, on an H200.
        bucket: host time of a bucket for agreement, waits and bookkeeping: fitted to fills of 30
            and of 110 buckets on an H100, beside the driver's calls and the copies. What no part
            explains is not charged.
    """

    hbm: float = 3350.0
    nvlink: float = 450.0
    infiniband: float = 50.0
    pcie: float = 55.0
    copy: float = 540.0
    launch: float = 10.0
    kernel: float = 3.0
    mapped: float = 250.0
    export: float = 850.0
    bucket: float = 280.0

    def seconds(self, nbytes: Mapping[Link, float]) -> float:
        """Return the seconds to move `nbytes` over the links, one link after the other."""
        rates = {Link.HOST: self.nvlink, Link.NETWORK: self.infiniband}
        return sum(nbytes.get(link, 0) / rate / 1e9 for link, rate in rates.items())


@dataclass(frozen=True)
class Job:
    """A model, its number of ranks, and its parallel sizes on both sides.

    Attributes:
        exports_all: True for a version that exports all chunks, whether a peer reads them or not.
    """

    name: str
    config: dict[str, Any]
    num_ranks: int
    train: Mapping[str, int] = field(default_factory=dict)
    infer: Mapping[str, int] = field(default_factory=dict)
    bucket_mb: int = GenerateConfig().bucket_mb
    exports_all: bool = False


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
        launches, mapped: see the docstring of the module; `mapped` counts those that no earlier
            bucket has mapped.
        nbytes: received bytes by link, including copies within the rank.
        leaving: bytes of parameters that are offloaded after the bucket is sent.
        segments: bytes of each segment that vLLM's allocator takes for the bucket.
        copies: the copies, those queued together in one list.
    """

    launches: int
    mapped: int
    nbytes: Mapping[Link, int]
    leaving: float
    segments: Sequence[int]
    copies: Sequence[list[Transfer]]


@dataclass(frozen=True)
class Work:
    """Work of rank 0 in a fill and on the way back.

    Attributes:
        shares: work of the buckets.
        flats: bytes of rank 0's parameters, by flat buffer.
        chunk: bytes of a chunk of a flat buffer, by rank and name.
        exports: see the docstring of the module.
    """

    shares: Sequence[Share]
    flats: Mapping[str, int]
    chunk: Mapping[BufferId, int]
    exports: int

    @property
    def parameter_nbytes(self) -> int:
        """Bytes of rank 0's parameters."""
        return sum(self.flats.values())

    def sum_of(self, name: str) -> int:
        """Return the sum of an attribute over the buckets."""
        return sum(getattr(share, name) for share in self.shares)


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ALIGNMENT = 64


def flat_of(buffer: BufferId) -> BufferId:
    """Return the flat buffer of Megatron's DDP that holds a parameter: experts have their own."""
    return BufferId(buffer.rank, "experts" if ".experts." in buffer.name else "dense")


def offsets_in_training(
    side: SideLayout, ranks: Iterable[int]
) -> tuple[dict[BufferId, int], dict[BufferId, int]]:
    """Return the offset of each parameter in its flat buffer, and the flat buffers' sizes.

    Both in elements. Megatron fills the buffers from the last parameter.
    """
    offsets: dict[BufferId, int] = {}
    ends: dict[BufferId, int] = {}
    for rank in ranks:
        for buffer_id, buffer in reversed(side.layout_of(rank).buffers.items()):
            flat = flat_of(buffer_id)
            offsets[buffer_id] = ends.get(flat, 0)
            ends[flat] = offsets[buffer_id] + -(-buffer.numel // _ALIGNMENT) * _ALIGNMENT
    return offsets, ends


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


def segments_of(sizes: Iterable[int]) -> list[int]:
    """Return the segments that torch's allocator takes for blocks of these sizes, all in bytes.

    Blocks of up to 1 MiB share segments of 2, those below 10 MiB segments of 20; a larger block has
    one of its own.
    """
    segments = []
    free = {2 * MIB: 0, 20 * MIB: 0}
    for size in sizes:
        if size >= 10 * MIB:
            segments.append(-(-size // GRANULE) * GRANULE)
            continue
        shared = 2 * MIB if size <= MIB else 20 * MIB
        if free[shared] < size:
            segments.append(shared)
            free[shared] = shared
        free[shared] -= size
    return segments


def work_of(job: Job) -> Work:
    """Plan a job and count the work of rank 0 in each bucket."""
    table = table_for(job.config)
    source = training_side(table, TrainParallelism(job.num_ranks, **job.train))
    destination = inference_side(table, InferenceParallelism(job.num_ranks, **job.infer))
    hosts = [rank // RANKS_PER_HOST for rank in range(job.num_ranks)]
    unserved = [name for name in table.shapes if not table.is_served(name)]
    nbytes = job.bucket_mb * MIB
    plan = plan_sides(source, destination, hosts, nbytes, unserved, RANK, set(hosts))
    peers = {transfer.src_rank for bucket in plan.buckets for transfer in bucket.transfers}
    trained, numels = offsets_in_training(source, {*peers, RANK})
    flats = {flat: numel * ITEMSIZE for flat, numel in numels.items()}
    chunk = {flat: chunk_nbytes_for(nbytes, GRANULE) for flat, nbytes in flats.items()}
    parameters = {flat.name: nbytes for flat, nbytes in flats.items() if flat.rank == RANK}
    counting = _Counting(destination, trained, places_in_vllm(destination, RANK), chunk)
    weights = [bucket.nbytes for bucket in plan.buckets]
    shares = [
        counting.share(bucket, sum(parameters.values()) * weight / sum(weights))
        for bucket, weight in zip(plan.buckets, weights, strict=True)
    ]
    read = {
        flat_of(transfer.src.buffer)
        for bucket in plan.buckets
        for transfer in bucket.transfers
        if transfer.src_rank == RANK and transfer.link in (Link.HOST, Link.DEVICE)
    }
    exports = sum(
        -(-nbytes // chunk[BufferId(RANK, name)])
        for name, nbytes in parameters.items()
        if job.exports_all or BufferId(RANK, name) in read
    )
    return Work(shares, parameters, chunk, exports)


@dataclass
class _Counting:
    """Counts the work of bucket after bucket.

    Attributes:
        destination: layout of vLLM's side.
        trained: offsets in Megatron's flat buffers (`offsets_in_training`).
        served: places in vLLM's fused parameters (`places_in_vllm`).
        chunk: bytes of a chunk of a flat buffer.
        seen: chunks of peers that earlier buckets have mapped.
    """

    destination: SideLayout
    trained: Mapping[BufferId, int]
    served: Mapping[str, tuple[str, int]]
    chunk: Mapping[BufferId, int]
    seen: set[tuple[BufferId, int]] = field(default_factory=set)

    def share(self, bucket: Bucket, leaving: float) -> Share:
        """Count the work of the next bucket."""
        transfers = [*bucket.transfers, *bucket.fan_out]
        pulled = [transfer for transfer in transfers if transfer.dst_rank == RANK]
        # as in a job, transfers are merged by their place in vLLM's fused parameters first
        merged = coalesce(self._to_live(transfer) for transfer in pulled)
        live = [self._from_live(transfer) for transfer in merged]
        copies = [list(group) for _, group in groupby(sorted(live, key=_is_local), _is_local)]
        launches = sum(map(_num_launches, copies))
        nbytes = dict.fromkeys(Link, 0)
        for transfer in pulled:
            nbytes[transfer.link] += transfer.nbytes
        return Share(
            launches,
            self._map(live),
            nbytes,
            leaving,
            self._segments(bucket),
            copies,
        )

    def _map(self, live: Iterable[Transfer]) -> int:
        """Map the chunks that these reads need; return the number of new ones."""
        touched: set[tuple[BufferId, int]] = set()
        for transfer in live:
            flat = transfer.src.buffer
            if transfer.link not in (Link.HOST, Link.DEVICE) or flat not in self.chunk:
                continue
            chunk = self.chunk[flat]
            for extent in source_extents(transfer, chunk // ITEMSIZE):
                first = extent.start * ITEMSIZE // chunk
                stop = -(-extent.stop * ITEMSIZE // chunk)
                touched.update((flat, index) for index in range(first, stop))
        num_new = len(touched - self.seen)
        self.seen |= touched
        return num_new

    def _segments(self, bucket: Bucket) -> list[int]:
        """Return the segments of vLLM's parameters that the bucket completes."""
        sizes = dict.fromkeys(bucket.groups, 0)
        for buffer in self.destination.layout_of(RANK).buffers.values():
            if buffer.group in sizes:
                sizes[buffer.group] += buffer.numel * ITEMSIZE
        return segments_of(size for size in sizes.values() if size)

    def _from_live(self, transfer: Transfer) -> Transfer:
        """Return the transfer with its source in Megatron's buffers, unless it is a relay."""
        src = transfer.src
        if src.buffer not in self.trained:
            return transfer
        offset = self.trained[src.buffer] + src.offset
        return replace(transfer, src=replace(src, buffer=flat_of(src.buffer), offset=offset))

    def _to_live(self, transfer: Transfer) -> Transfer:
        """Return the transfer with the destination in vLLM's fused parameters."""
        dst = transfer.dst
        if dst.buffer.name not in self.served:
            return transfer
        name, start = self.served[dst.buffer.name]
        return replace(
            transfer,
            dst=replace(dst, buffer=BufferId(dst.buffer.rank, name), offset=start + dst.offset),
        )


def _is_local(transfer: Transfer) -> bool:
    """Key of the transport: copies within the rank and reads from peers are queued separately."""
    return transfer.link is Link.SELF


def _num_launches(transfers: Sequence[Transfer]) -> int:
    """Return the launches of the kernel for copies that are queued together: one per class."""
    buffers = {transfer.src.buffer for transfer in transfers}
    # Each buffer is a storage of its own.
    origins = {buffer: Origin(number, 0, torch.bfloat16) for number, buffer in enumerate(buffers)}
    target = Origin(0, 0, torch.bfloat16)
    runs = runs_of(transfers, origins)
    return len({tiles_of(0, run, origins[run.src.buffer], target)[0] for run in runs})


class _NoLaunch:
    """Stands for the kernel."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_arguments, **_options: None


def queueing_seconds(shares: Sequence[Share]) -> tuple[float, float]:
    """Return the host's CPU seconds to queue the copies of the first fill, and of later ones."""
    from hybrid_engine.transports import tile_kernel

    groups = [BatchedCopies(copies) for share in shares for copies in share.copies]
    ends: dict[BufferId, int] = {}
    for transfer in chain(*(group.transfers for group in groups)):
        for place in (transfer.src, transfer.dst):
            stop = place.extent(transfer.lengths).stop
            ends[place.buffer] = max(stop, ends.get(place.buffer, 0))
    flats = {
        buffer: torch.empty(numel, dtype=torch.bfloat16, device="cuda")
        for buffer, numel in ends.items()
    }
    seconds = []
    with mock.patch.object(tile_kernel, "copy_tiles", _NoLaunch()):
        for _ in range(10):
            start = time.process_time()
            for group in groups:
                group.run(
                    lambda transfer: flats[transfer.src.buffer],
                    lambda transfer: flats[transfer.dst.buffer],
                )
            seconds.append(time.process_time() - start)
    return seconds[0], min(seconds[1:])


def fill_seconds(
    shares: Sequence[Share],
    rates: Rates,
    *,
    chunk: int = 0,
    commits: bool = True,
    maps: bool = True,
) -> float:
    """Simulate a fill.

    Args:
        shares: work of the buckets.
        rates: inputs.
        chunk: with a size of chunks in bytes, parameters are offloaded bucket by bucket.
        commits: vLLM processes the weights of a bucket after its copies.
        maps: memory is mapped and unmapped in the fill.
    """
    host = 0.0
    device = 0.0
    # when the parameters of each bucket have arrived on the host
    saved = [*accumulate(share.leaving / rates.pcie / 1e9 for share in shares)]
    freeing = driver_costs.seconds_of(GIVE_BACK, chunk) if maps else 0.0
    for index, share in enumerate(shares):
        if maps:
            host += sum(driver_costs.seconds_of(TAKE, segment) for segment in share.segments)
            host += share.mapped * rates.mapped / 1e6
        host += rates.bucket / 1e6
        host += share.launches * rates.launch / 1e6
        moved = sum(share.nbytes.values())
        pulling = max(
            rates.seconds(share.nbytes),
            moved / rates.copy / 1e9,
            share.launches * rates.kernel / 1e6,
        )
        # the first kernel of a bucket runs while the host queues the others
        device = max(device, host - share.launches * rates.launch / 1e6) + pulling
        host = max(host, device)  # the host waits for the copies, but not for their processing
        if commits:
            # a copy reads and writes HBM, so its bytes count twice
            device += 2 * moved / rates.hbm / 1e9
        if chunk and index:
            host = max(host, saved[index - 1]) + shares[index - 1].leaving / chunk * freeing
    last = saved[-1] + shares[-1].leaving / chunk * freeing if chunk else 0.0
    return max(host, device, last)


def to_vllm_seconds(work: Work, rates: Rates) -> float:
    """Return the seconds of a whole switch of one rank: state leaves, then parameters by buckets.

    Releasing the state's memory is hidden by its copies.
    """
    state = work.parameter_nbytes / ITEMSIZE * OPTIMIZER_NBYTES
    chunk = max(work.chunk[BufferId(RANK, name)] for name in work.flats)
    return state / rates.pcie / 1e9 + fill_seconds(work.shares, rates, chunk=chunk)


def to_training_seconds(work: Work, rates: Rates) -> float:
    """Return the seconds of a whole switch of one rank back: parameters, then optimizer state.

    The host takes, maps and exports the memory of a piece while the previous piece is copied.
    """
    host = sum(
        driver_costs.seconds_of(GIVE_BACK, segment)
        for share in work.shares
        for segment in share.segments
    )
    copied = 0.0
    parameters = work.parameter_nbytes
    state = parameters // ITEMSIZE * OPTIMIZER_NBYTES
    for nbytes, exported in ((parameters, work.exports), (state, 0)):
        chunk = chunk_nbytes_for(nbytes, GRANULE)
        num_chunks = -(-nbytes // chunk)
        a_chunk = driver_costs.seconds_of(TAKE, chunk) + exported / num_chunks * rates.export / 1e6
        for first in range(0, nbytes, PIECE_NBYTES):
            piece = min(PIECE_NBYTES, nbytes - first)
            host += piece / chunk * a_chunk
            copied = max(copied, host) + piece / rates.pcie / 1e9
    return copied


def bound_of(shares: Sequence[Share], rates: Rates, *, offloads: bool) -> float:
    """Return the seconds of the slowest of links, HBM and PCIe, without any other cost."""
    over_links = rates.seconds({link: sum(share.nbytes[link] for share in shares) for link in Link})
    # copied and processed, each with a read and a write
    in_memory = 4 * sum(sum(share.nbytes.values()) for share in shares) / rates.hbm / 1e9
    to_host = sum(share.leaving for share in shares) / rates.pcie / 1e9 if offloads else 0.0
    return max(over_links, in_memory, to_host)


def figures_of(job: Job, rates: Rates) -> dict[str, Any]:
    """Return the counts of a job, and seconds and bound if parameters stay and if they leave."""
    work = work_of(job)
    shares = work.shares
    figures: dict[str, Any] = {
        "job": job.name,
        "buckets": len(shares),
        **{name: work.sum_of(name) for name in ("launches", "mapped")},
        "exports": work.exports,
        "received": sum(share.nbytes[Link.HOST] + share.nbytes[Link.NETWORK] for share in shares),
    }
    chunk = max(work.chunk[BufferId(RANK, name)] for name in work.flats)
    for name, offloads in {"stay": False, "leave": True}.items():
        seconds = fill_seconds(shares, rates, chunk=chunk if offloads else 0, maps=False)
        bound = bound_of(shares, rates, offloads=offloads)
        figures[name] = {"seconds": seconds, "bound": bound, "percent": 100 * bound / seconds}
    return figures


_SMALL = Job("1.7B", QWEN3_1_7B, 1, bucket_mb=64, exports_all=True)
_LARGE = Job("8B", QWEN3_8B, 1, bucket_mb=64, exports_all=True)
MEASURED: Mapping[str, tuple[Job, float]] = {
    "1.7B: fill": (_SMALL, 0.0571),
    "8B: fill": (_LARGE, 0.1005),
    "1.7B: to vLLM": (_SMALL, 0.565),
    "1.7B: to training": (_SMALL, 0.542),
}
"""Seconds on one H100 (docs/benchmarks.md), of a version with buckets of 64 MB that exported every
chunk."""


def predicted(kind: str, work: Work, rates: Rates) -> float:
    """Return the predicted seconds of a measured kind of work."""
    if kind == "fill":
        return fill_seconds(work.shares, rates, commits=False)
    return (to_vllm_seconds if kind == "to vLLM" else to_training_seconds)(work, rates)


def compared(rates: Rates) -> list[dict[str, Any]]:
    """Return measured and predicted seconds; the rest is not explained."""
    works = {job.name: work_of(job) for job in (_SMALL, _LARGE)}
    rows = []
    for name, (job, measured) in MEASURED.items():
        kind = name.split(": ")[1]
        seconds = predicted(kind, works[job.name], rates)
        error = 100 * (seconds / measured - 1)
        rows.append({"name": name, "measured": measured, "seconds": seconds, "error": error})
    return rows


def main() -> None:
    """Print a row per job, or per measured figure; write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--measured", action="store_true", help="compare with what one H100 took")
    parser.add_argument("--host", action="store_true", help="time to queue the copies, on a GPU")
    arguments = parser.parse_args()
    rates = Rates()
    if arguments.host:
        rows = []
        for job in (replace(_SMALL, bucket_mb=Job.bucket_mb), JOBS[0]):
            shares = work_of(job).shares
            launches = sum(share.launches for share in shares)
            first, later = queueing_seconds(shares)
            rows.append({"job": job.name, "launches": launches, "first": first, "later": later})
        table = Table("job", "launches", "first fill, s", "later, s")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
    elif arguments.measured:
        rows = compared(rates)
        table = _table_of_measured(rows)
    else:
        rows = [figures_of(job, rates) for job in JOBS if arguments.only in job.name]
        table = _table_of_jobs(rows)
    Console(width=180).print(table)
    write_figures(arguments.json, rows)


def _table_of_jobs(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("job", title="rank 0; seconds are computed, not measured", title_justify="left")
    counts = ("buckets", "launches", "mapped", "exports")
    columns = ("received, GB", *counts, "stay, s", "bound", "%", "leave, s", "bound")
    for column in (*columns, "%"):
        table.add_column(column, justify="right")
    for row in rows:
        computed = (
            f"{row[name][key]:{'.0f' if key == 'percent' else '.3f'}}"
            for name in ("stay", "leave")
            for key in ("seconds", "bound", "percent")
        )
        table.add_row(
            row["job"],
            f"{row['received'] / 1e9:.2f}",
            *(str(row[count]) for count in counts),
            *computed,
        )
    return table


def _table_of_measured(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("one H100", title="milliseconds", title_justify="left")
    for column in ("measured", "predicted", "error, %", "unexplained"):
        table.add_column(column, justify="right")
    for row in rows:
        unexplained = row["measured"] - row["seconds"]
        numbers = (1e3 * row["measured"], 1e3 * row["seconds"], row["error"], 1e3 * unexplained)
        table.add_row(row["name"], *(f"{number:.1f}" for number in numbers))
    return table


if __name__ == "__main__":
    main()
