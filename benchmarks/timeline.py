"""Count what a switch does on each rank, and the seconds that it exposes, over the GPU in software.

    python -m tests.software_gpu --gpus 2 -- python -m benchmarks.timeline [--ranks 1|2]
        [--generate transport=collective] [--json FILE]

One rank, or two with TP=2 -> TP=1 x DP=2, each of which reads the other's half. Counts are those of
the third switch each way, by rank.

Seconds are those of the timeline (tests/software_gpu/native/timeline.cpp): the host's calls, copies
at the rates of an H100, and waits, without Python and without computing, but for that of a training
step. Every byte counts so many times that a rank copies COPIED_NBYTES to the host. `exposed` is a
switch and what the step or the completions after it take longer than the second ones, which nothing
precedes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.launching import (
    engine_arguments,
    figures_of_ranks,
    main_or_rank,
    parser_of,
    write_figures,
)
from benchmarks.offload_figures import copied_nbytes
from benchmarks.resharding.cases import Case
from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.switch.states import State
from hybrid_engine.tools.verify.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.trainer.worker import ActorHybridWorker
from tests.gpu.sizes import SOFTWARE_GPU
from tests.software_gpu.device import counted, library, timed
from tests.software_gpu.switch_calls import KINDS

SECONDS = 900
NUM_ROUNDS = 3
COPIED_NBYTES = 24.1e9
"""What a switch of 1.7 billion parameters with Adam copies to the host, and back."""
KV_CACHE_MB = 256
"""More than the gradients leave, less than all training state."""
STEP_SECONDS = 0.5
"""Forward and backward passes, before the optimizer's step; and of completions."""
LAYOUTS = {1: ("tp=1", "tp=1"), 2: ("tp=2", "tp=1,dp=2")}
SAMPLING = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
COUNTED = {
    **KINDS,
    "chunks mapped": ("cuMemMap",),
    "exports": ("cuMemExportToShareableHandle",),
    "imports": ("cuMemImportFromShareableHandle",),
}
"""Counts of the table -> functions of the driver. The last three are parts of those before."""


def run_rank(job: dict[str, Any]) -> None:
    """Build both engines, switch, and write the figures of all ranks to `job["out"]`."""
    case = Case("small", job["ranks"], *LAYOUTS[job["ranks"]], trains=True, bucket_mb=16)
    generate = {"check_compute": "off", "kv_cache_mb": KV_CACHE_MB, **job["generate"]}
    with (
        tempfile.TemporaryDirectory(prefix="timeline-") as directory,
        ActorHybridWorker(case.config(Path(directory), SOFTWARE_GPU.vllm, **generate)) as worker,
    ):
        for number in range(NUM_ROUNDS):
            figures = _round(worker, number)
        of_ranks = worker.job.agreement.gather(figures, dict[str, Any], "figures")
        if worker.job.rank == 0:
            write_figures(Path(job["out"]), of_ranks)


def _round(worker: ActorHybridWorker, number: int) -> dict[str, Any]:
    """Switch to vLLM and back; return the counts and the timeline's seconds of both."""

    def loss(logits: torch.Tensor, *others: Any, **named: Any) -> Any:
        library().software_gpu_timeline_compute(STEP_SECONDS)
        return cross_entropy(logits, *others, **named)

    batch = tokens_and_labels(number, worker.table.dims.vocab_size, 4)
    prompts = [[1, 2, 3]] * 2
    after: Mapping[State, Callable[[], object]] = {
        State.INFER: partial(worker.generate_sequences, prompts, SAMPLING),
        State.TRAIN: partial(worker.update, batch, loss),
    }
    worker.update(batch, loss)  # makes the optimizer's state
    scale = COPIED_NBYTES / copied_nbytes(worker.train.offload_items())
    library().software_gpu_timeline_scale(scale)
    torch.cuda.synchronize()
    figures = {}
    for state, action in after.items():
        calls: Counter[str]
        with counted() as calls, timed() as switch:
            worker.sharding.enter(state)
        taken = [_seconds_of(action) for _ in range(2)]
        figures[state.name.lower()] = {
            "counts": {kind: sum(calls[name] for name in names) for kind, names in COUNTED.items()},
            "seconds": switch.seconds,
            "exposed": switch.seconds + taken[0] - taken[1],
        }
    return figures


def _seconds_of(action: Callable[[], object]) -> float:
    with timed() as timeline:
        action()
        library().software_gpu_timeline_compute(STEP_SECONDS)
        torch.cuda.synchronize()
    return timeline.seconds


def main() -> None:
    """Run the ranks, print and write their figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, choices=sorted(LAYOUTS), default=1)
    parser.add_argument(
        "--generate", action="append", default=[], metavar="KEY=VALUE", help="of generate_config"
    )
    arguments = parser.parse_args()
    job = {**vars(arguments), "json": "", "generate": engine_arguments(arguments.generate)}
    figures = figures_of_ranks("benchmarks.timeline", job, arguments.ranks, SECONDS)
    lanes = {
        f"{rank}: to {way}": lane for rank, row in enumerate(figures) for way, lane in row.items()
    }
    table = Table("after the second switch", *lanes, title="by rank")
    for kind in COUNTED:
        table.add_row(kind, *(str(lane["counts"][kind]) for lane in lanes.values()))
    for name in ("seconds", "exposed"):
        table.add_row(f"{name}, s", *(f"{lane[name]:.3f}" for lane in lanes.values()))
    Console(width=160).print(table)
    write_figures(arguments.json, figures)


if __name__ == "__main__":
    main_or_rank(main, run_rank)
