"""What the switch costs on a GPU, beside what the hardware can do, measured in the same run.

    python -m benchmarks.gpu [--json FILE] [--repeat N] [--layers N] [--device cuda|cpu]

    offload, onload   the Offloader, against one plain copy of as many bytes from or to page-locked memory
    reshard           training to inference layout on one rank, QKV de-interleaved, against a plain device copy
    pull              two processes on one GPU, TP=2 to DP=2, each reads the other's half, against a plain device copy
                      that both make at the same time
    memory            the most that is taken at once, and what an offload leaves on the device

Every time is the median of the repeats, with the time of its floor (the plain copy) and `of_floor`, floor over time: 1
is as fast as the floor. Bytes are beside those they are a share of. A result that is wrong ends the script. `make
gpu-check` takes the same figures, of a smaller model, and judges them (tests/gpu/test_stage1_memory.py).

Needs a GPU; without one it says so and ends with 2. `--device cpu` runs a tiny model on the CPU with a model of CUDA's
driver, to see that the script works: those times mean nothing.
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
BUCKET_NBYTES, TINY_BUCKET_NBYTES = 256 * 2**20, 2**15


def measure(target_name: str, shape: ModelShape, bucket_nbytes: int, repeat: int) -> dict[str, Any]:
    """Every figure, and what could not be measured with the reason."""
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
        "timings": [asdict(each) for each in figures if isinstance(each, Timing)],
        "memory": [asdict(each) for each in figures if isinstance(each, Memory)],
        "missing": missing,
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each; the median counts")
    parser.add_argument(
        "--layers", type=int, default=ModelShape.num_layers, help="of the model, on a GPU"
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: a tiny model, to try the script",
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
    found = measure(target, shape, bucket_nbytes, arguments.repeat)
    _print(found)
    write_figures(arguments.json, found)


def _print(found: dict[str, Any]) -> None:
    console = Console()
    times = Table(
        "", "GB", "seconds", "GB/s", "floor", "its seconds", "of the floor", title=found["device"]
    )
    for each in found["timings"]:
        seconds, floor = f"{each['seconds']:.4f}", f"{each['floor_seconds']:.4f}"
        rate, share = f"{each['gb_per_second']:.1f}", f"{each['of_floor']:.0%}"
        times.add_row(
            each["name"], f"{each['nbytes'] / 1e9:.3f}", seconds, rate, each["floor"], floor, share
        )
    sizes = Table("", "GB", "beside", "its GB", "ratio")
    for each in found["memory"]:
        beside = each["beside"], f"{each['beside_nbytes'] / 1e9:.3f}"
        sizes.add_row(each["name"], f"{each['nbytes'] / 1e9:.3f}", *beside, f"{each['ratio']:.4f}")
    console.print(times, sizes)
    for name, reason in found["missing"].items():
        console.print(f"{name}: not measured, {reason}")


if __name__ == "__main__":
    main()
