"""Predict the seconds of a fill and of a switch, beside those that one H100 took.

    python -m benchmarks.critical_path [--json FILE]

Nothing is measured and no device is needed. A switch of one rank is planned, and its buckets, bytes
and memory are charged with the costs of a bucket, of copies and of the driver's calls. Three
resources work in parallel:

    host      takes vLLM's memory, queues the copies of a bucket and waits for them
    device    copies the data of a bucket and processes it, in order
    PCIe      copies parameters to the host; all copies are queued at the start
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.driver_costs import GIVE_BACK, TAKE, seconds_of
from benchmarks.launching import parser_of, write_figures
from benchmarks.resharding.cases import QWEN3_1_7B
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.memory.device_pages import chunk_nbytes_for
from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.models import table_for
from hybrid_engine.planning.planner import plan_sides
from tests.zoo.published_configs import QWEN3_8B

ITEMSIZE = 2
OPTIMIZER_NBYTES = 12
"""Bytes of Adam's state per parameter: main parameter and two moments in float32."""
MIB = 2**20
GRANULE = 2 * MIB
BUCKET_NBYTES = 64 * MIB
"""Size of a bucket in the version that was measured."""
PIECE_NBYTES = 256 * MIB
"""Memory of one piece is mapped while another is copied (`memory/offload_items.py`)."""

HBM = 3350e9
"""Nominal bytes per second of an H100's memory."""
PCIE = 55e9
"""Bytes per second in one direction, measured on an H100 and an H200."""
COPY = 540e9
"""Bytes per second of the plan's copies, each byte counted once: 400 copies of 512 KiB in one
`_foreach_copy_` on an H100. The kernel of `transports/tile_kernel.py` was not measured."""
LAUNCH = 10e-6
"""Host seconds to queue a kernel. The copies of a dense model's bucket are one."""
BUCKET = 280e-6
"""Host seconds of a bucket for agreement, waits and bookkeeping: fitted to fills of 30 and of 110
buckets on an H100, beside the driver's calls and the copies. What no part explains is not charged.
"""


@dataclass(frozen=True)
class Share:
    """Work of a bucket.

    Attributes:
        nbytes: bytes that are copied.
        leaving: bytes of parameters that are offloaded after the copies.
        segments: bytes of each segment that vLLM's allocator takes for the bucket.
    """

    nbytes: int
    leaving: float
    segments: Sequence[int]


@dataclass(frozen=True)
class Work:
    """Work of a switch: its buckets, and the bytes of Megatron's flat buffer of parameters."""

    shares: Sequence[Share]
    parameter_nbytes: int

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimizer's state."""
        return self.parameter_nbytes // ITEMSIZE * OPTIMIZER_NBYTES


def segments_of(sizes: Iterable[int]) -> list[int]:
    """Return the segments that torch's allocator takes for blocks of these sizes, all in bytes.

    Blocks of up to 1 MiB share segments of 2, those below 10 MiB segments of 20; a larger block has
    one of its own.
    """
    segments = []
    free = {2 * MIB: 0, 20 * MIB: 0}
    for size in sizes:
        if size >= 10 * MIB:
            segments.append(round_up(size, GRANULE))
            continue
        shared = 2 * MIB if size <= MIB else 20 * MIB
        if free[shared] < size:
            segments.append(shared)
            free[shared] = shared
        free[shared] -= size
    return segments


def work_of(config: dict[str, Any]) -> Work:
    """Plan the switch of a dense model on one rank, and count its work."""
    table = table_for(config)
    source = training_side(table, TrainParallelism(1))
    destination = inference_side(table, InferenceParallelism(1))
    unserved = [name for name in table.shapes if not table.is_served(name)]
    plan = plan_sides(source, destination, [0], BUCKET_NBYTES, unserved, 0)
    trained = source.layout_of(0).buffers.values()
    # Megatron's DDP aligns parameters in its flat buffer
    parameter_nbytes = sum(round_up(buffer.numel, 64) for buffer in trained) * ITEMSIZE
    groups: dict[str, int] = {}
    for buffer in destination.layout_of(0).buffers.values():
        groups[buffer.group] = groups.get(buffer.group, 0) + buffer.numel * ITEMSIZE
    total = sum(bucket.nbytes for bucket in plan.buckets)
    shares = [
        Share(
            bucket.nbytes,
            parameter_nbytes * bucket.nbytes / total,
            segments_of(groups[group] for group in bucket.groups),
        )
        for bucket in plan.buckets
    ]
    return Work(shares, parameter_nbytes)


def fill_seconds(work: Work, *, is_alone: bool = True) -> float:
    """Simulate a fill; in a switch, parameters leave meanwhile, and vLLM processes the weights."""
    host = 0.0
    device = 0.0
    # when the parameters of each bucket have arrived on the host
    saved = [*accumulate(share.leaving / PCIE for share in work.shares)]
    chunk = chunk_nbytes_for(work.parameter_nbytes, GRANULE)
    freeing = [share.leaving / chunk * seconds_of(GIVE_BACK, chunk) for share in work.shares]
    for index, share in enumerate(work.shares):
        host += sum(seconds_of(TAKE, segment) for segment in share.segments) + BUCKET
        device = max(device, host) + share.nbytes / COPY
        host = max(host + LAUNCH, device)  # waits for the copies, but not for their processing
        if is_alone:
            continue
        # a copy reads and writes HBM, so its bytes count twice
        device += 2 * share.nbytes / HBM
        if index:
            host = max(host, saved[index - 1]) + freeing[index - 1]
    return max(host, device, 0.0 if is_alone else saved[-1] + freeing[-1])


def to_vllm_seconds(work: Work) -> float:
    """Return the seconds of a whole switch: optimizer state leaves, then parameters by buckets.

    Releasing the state's memory is hidden by its copies.
    """
    return work.state_nbytes / PCIE + fill_seconds(work, is_alone=False)


def to_training_seconds(work: Work) -> float:
    """Return the seconds of a whole switch back: parameters, then optimizer state.

    The host takes, maps and exports the memory of a piece while the previous piece is copied. It
    exported every chunk of the parameters in the version that was measured.
    """
    segments = [segment for share in work.shares for segment in share.segments]
    host = sum(seconds_of(GIVE_BACK, segment) for segment in segments)
    copied = 0.0
    for nbytes, calls in ((work.parameter_nbytes, (*TAKE, "export")), (work.state_nbytes, TAKE)):
        chunk = chunk_nbytes_for(nbytes, GRANULE)
        for first in range(0, nbytes, PIECE_NBYTES):
            piece = min(PIECE_NBYTES, nbytes - first)
            host += piece / chunk * seconds_of(calls, chunk)
            copied = max(copied, host) + piece / PCIE
    return copied


_MODELS = {"1.7B": QWEN3_1_7B, "8B": QWEN3_8B}
_PREDICTIONS: Mapping[str, Callable[[Work], float]] = {
    "fill": fill_seconds,
    "to vLLM": to_vllm_seconds,
    "to training": to_training_seconds,
}
MEASURED = {
    "1.7B: fill": 0.0571,
    "8B: fill": 0.1005,
    "1.7B: to vLLM": 0.565,
    "1.7B: to training": 0.542,
}
"""Seconds on one H100 (docs/benchmarks.md)."""


def compared() -> list[dict[str, Any]]:
    """Return measured and predicted seconds; the rest is not explained."""
    works = {model: work_of(config) for model, config in _MODELS.items()}
    rows = []
    for name, measured in MEASURED.items():
        model, kind = name.split(": ")
        seconds = _PREDICTIONS[kind](works[model])
        error = 100 * (seconds / measured - 1)
        rows.append({"name": name, "measured": measured, "seconds": seconds, "error": error})
    return rows


def main() -> None:
    """Print a row per measured figure; write the figures."""
    arguments = parser_of(__doc__).parse_args()
    rows = compared()
    table = Table("one H100", title="milliseconds", title_justify="left")
    for column in ("measured", "predicted", "error, %", "unexplained"):
        table.add_column(column, justify="right")
    for row in rows:
        unexplained = row["measured"] - row["seconds"]
        numbers = (1e3 * row["measured"], 1e3 * row["seconds"], row["error"], 1e3 * unexplained)
        table.add_row(row["name"], *(f"{number:.1f}" for number in numbers))
    Console(width=180).print(table)
    write_figures(arguments.json, rows)


if __name__ == "__main__":
    main()
