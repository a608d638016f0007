"""Cost of the parts of a switch on a GPU, compared with plain copies in the same run.

    python -m benchmarks.gpu [--json FILE] [--repeat N] [--layers N] [--device cuda|cpu]

    offload, onload   the Offloader; floor: a plain copy of the same bytes to or from page-locked
                      memory
    reshard           training to inference layout on one rank, QKV de-interleaved; floor: a plain
                      device copy
    pull              two processes on one GPU, TP=2 to DP=2, each reads half of the weights from
                      the other; floor: plain device copies in both processes at the same time
    memory            peak of the device memory in use, and the remainder after an offload

Every time is the median of the repeats, with the time of its floor and `of_floor`, floor over time:
at 1 it is as fast as the floor. A wrong result ends the script. `make gpu-check` takes the same
figures from a smaller model and judges them (tests/gpu/test_stage1_memory.py).

Needs a GPU; exits with status 2 without one. `--device cpu` tries the script with a tiny model on
the CPU and a simulated CUDA driver; those times mean nothing.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.flat_models import TINY, ModelShape, rank_job
from benchmarks.launching import parser_of, write_figures
from benchmarks.offload_figures import offload_figures, reshard_figures
from benchmarks.pull_figures import PullTask, pull_figures
from benchmarks.targets import SIMULATED, target_named
from benchmarks.timings import Memory, Timing
from hybrid_engine.errors import TransportError

NO_GPU = 2
"""Exit status without a GPU."""
BUCKET_NBYTES = 256 * 2**20
TINY_BUCKET_NBYTES = 2**15


def measure(target_name: str, shape: ModelShape, bucket_nbytes: int, repeat: int) -> dict[str, Any]:
    """Return all figures, and a reason for each part that could not be measured."""
    job = rank_job(shape, 1, 0, bucket_nbytes)
    missing = {}
    with target_named(target_name) as target:
        figures = [
            *offload_figures(target, job.source.numel, repeat),
            *reshard_figures(target, job, repeat),
        ]
        name = (
            "cpu: these times mean nothing"
            if target.is_simulated
            else torch.cuda.get_device_name(target.device)
        )
    try:
        figures += pull_figures(PullTask((target_name, target_name), shape, bucket_nbytes, repeat))
    except (TransportError, RuntimeError) as error:
        missing["pull"] = str(error)
    return {
        "device": name,
        "model": asdict(shape),
        "timings": [asdict(figure) for figure in figures if isinstance(figure, Timing)],
        "memory": [asdict(figure) for figure in figures if isinstance(figure, Memory)],
        "missing": missing,
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="timed runs; the median counts")
    parser.add_argument(
        "--layers", type=int, default=ModelShape.num_layers, help="layers of the model on a GPU"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the script"
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        target, shape, bucket_nbytes = SIMULATED, TINY, TINY_BUCKET_NBYTES
    elif torch.cuda.is_available():
        target, shape, bucket_nbytes = "cuda:0", ModelShape(arguments.layers), BUCKET_NBYTES
    else:
        print(
            "benchmarks.gpu needs a GPU and found none; `--device cpu` tries the script",
            file=sys.stderr,
        )
        sys.exit(NO_GPU)
    figures = measure(target, shape, bucket_nbytes, arguments.repeat)
    _print(figures)
    write_figures(arguments.json, figures)


def _print(figures: dict[str, Any]) -> None:
    console = Console()
    times = Table(
        "", "GB", "seconds", "GB/s", "floor", "its seconds", "of the floor", title=figures["device"]
    )
    for row in figures["timings"]:
        times.add_row(
            row["name"],
            f"{row['nbytes'] / 1e9:.3f}",
            f"{row['seconds']:.4f}",
            f"{row['gb_per_second']:.1f}",
            row["floor"],
            f"{row['floor_seconds']:.4f}",
            f"{row['of_floor']:.0%}",
        )
    sizes = Table("", "GB", "whole", "its GB", "ratio")
    for row in figures["memory"]:
        sizes.add_row(
            row["name"],
            f"{row['nbytes'] / 1e9:.3f}",
            row["whole"],
            f"{row['whole_nbytes'] / 1e9:.3f}",
            f"{row['ratio']:.4f}",
        )
    console.print(times, sizes)
    for name, reason in figures["missing"].items():
        console.print(f"{name}: not measured, {reason}")


if __name__ == "__main__":
    main()
