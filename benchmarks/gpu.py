"""What the switch costs on a GPU, beside what the hardware can do, measured in the same run.

    python -m benchmarks.gpu [--json FILE] [--repeat N] [--layers N] [--device cuda|cpu]

    offload, onload   MegatronOffloader, against one plain copy of as many bytes from or to page-locked memory
    reshard           training to inference layout on one rank, QKV de-interleaved, against a plain device copy
    pull              two processes on one GPU, TP=2 to DP=2, each reads the other's half, against a plain device copy
                      that both make at the same time
    memory            the most that is taken at once, and what an offload leaves on the device

Every time is the median of the repeats, with the time of its floor (the plain copy) and `of_floor`, floor over time: 1
is as fast as the floor. Bytes are beside those they are a share of. A result that is wrong ends the script.

Needs a GPU; without one it says so and ends with 2. `--device cpu` runs a tiny model on the CPU, to see that the script
works: those figures mean nothing. **The GPU part has never run yet.**
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_figures import Memory, Timing, memory, plain_device_copy, raise_unless_written, seconds_of, timing
from benchmarks.gpu_layouts import TINY, ModelShape, RankJob, rank_job
from benchmarks.gpu_pull import PullTask, pull_figures
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of
from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.transports.copies import copy_straight

NO_GPU = 2
"""Exit status without a GPU."""
BUCKET_NBYTES, TINY_BUCKET_NBYTES = 256 * 2**20, 2**15


class DeviceUse:
    """Bytes taken on the device since this was made, at the moments when `observe` is called.

    From the driver, since elastic buffers are outside of torch's allocator. None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._taken()
        self.peak = 0

    def observe(self) -> int:
        """Bytes taken now."""
        taken = self._taken() - self._before
        self.peak = max(self.peak, taken)
        return taken

    def _taken(self) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


# Offload.


def offload_figures(device: torch.device, numel: int, repeat: int) -> Iterator[Timing | Memory]:
    """Training state of `numel` parameters, as with bfloat16 and Adam: 18 bytes for each, of which 14 are copied."""
    use = DeviceUse(device)
    items = list(training_state(device, numel))
    total = sum(item.tensor.untyped_storage().nbytes() for item in items)
    copied = sum(item.tensor.untyped_storage().nbytes() for item in items if item.action == "copy")
    use.observe()
    before = [item.tensor[:: max(1, numel // 1000)].clone() for item in items if item.action == "copy"]
    offloader = MegatronOffloader(lambda: items, device)
    seconds: dict[str, list[float]] = {"offload": [], "onload": []}
    left = residual = 0
    for _ in range(repeat + 1):
        seconds["offload"].append(seconds_of(device, offloader.offload))
        left = use.observe()
        residual = sum(sum(by_owner.values()) for by_owner in offloader.resident_nbytes().values())
        seconds["onload"].append(seconds_of(device, offloader.onload))
        use.observe()
    after = [item.tensor[:: max(1, numel // 1000)] for item in items if item.action == "copy"]
    if not all(map(torch.equal, before, after)):
        raise AssertionError("an offload and onload changed the contents")
    whole = "all training bytes"
    yield memory("training, most at once", use.peak, whole, total)
    yield memory("left after an offload, as the offloader counts", residual, whole, total, is_of_device=False)
    yield memory("left after an offload, as the driver counts", left, whole, total)
    floors = plain_copies(device, copied, repeat)
    for name in ("offload", "onload"):
        first, *rest = seconds[name]
        floor = "plain copy, page-locked" if device.type == "cuda" else "plain copy"
        yield timing(name, copied, statistics.median(rest), floor, floors[name])
        yield timing(f"{name}, the first", copied, first, floor, floors[name])


def training_state(device: torch.device, numel: int) -> Iterator[OffloadItem]:
    """Parameters and gradients in elastic buffers; Adam's state too, in a buffer each."""
    for owner, kind, dtype, action in (
        ("parameters", "param", torch.bfloat16, "copy"),
        ("gradients", "grad", torch.float32, "drop"),
        ("master weights", "optimizer", torch.float32, "copy"),
        ("first moments", "optimizer", torch.float32, "copy"),
        ("second moments", "optimizer", torch.float32, "copy"),
    ):
        yield OffloadItem(owner, kind, allocate_elastic(numel, dtype, device, kind).normal_(), action)


def plain_copies(device: torch.device, nbytes: int, repeat: int) -> dict[str, float]:
    """Seconds of one copy of as many bytes to the host and back."""
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    here = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return {
        name: statistics.median(seconds_of(device, copy) for _ in range(repeat + 1))
        for name, copy in (
            ("offload", lambda: here.copy_(there, non_blocking=True)),
            ("onload", lambda: there.copy_(here, non_blocking=True)),
        )
    }


# Reshard on one rank.


def reshard_figures(device: torch.device, job: RankJob, repeat: int) -> Iterator[Timing | Memory]:
    """All buckets of the switch from a flat source into destinations on the same device."""
    use = DeviceUse(device)
    source = job.new_source(lambda numel, dtype: allocate_elastic(numel, dtype, device, "param"))
    destinations = job.new_destinations(device)
    use.observe()
    nbytes = job.read_nbytes([job.rank])

    def reshard() -> None:
        for bucket in job.buckets:
            copy_straight("local", bucket.index, bucket.transfers, lambda transfer: source, destinations)

    reshard()
    raise_unless_written(destinations)
    seconds = statistics.median(seconds_of(device, reshard) for _ in range(repeat))
    floor = plain_device_copy(device, nbytes, repeat)
    yield timing("reshard", nbytes, seconds, "plain device copy", floor)
    most = max(job.source_nbytes, job.destination_nbytes)
    yield memory("reshard with both sides there", use.peak, "the larger side", most)


# All of it.


def measure(device: torch.device, shape: ModelShape, bucket_nbytes: int, repeat: int) -> dict[str, Any]:
    """Every figure, and what could not be measured with the reason."""
    job = rank_job(shape, "tp=1,dp=1", "tp=1", 0, bucket_nbytes)
    figures = [*offload_figures(device, job.source.numel, repeat), *reshard_figures(device, job, repeat)]
    missing = {}
    if exported_buffer_of(allocate_elastic(1, torch.uint8, device, "param")) is None:
        missing["pull"] = "no elastic buffers on this device; the log says why"
    else:
        figures += pull_figures(PullTask(str(device), shape, bucket_nbytes, repeat))
    if device.type != "cuda":
        missing["device memory"] = "there is no device"
        figures = [each for each in figures if not (isinstance(each, Memory) and each.is_of_device)]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu: these figures mean nothing",
        "model": asdict(shape),
        "timings": [asdict(each) for each in figures if isinstance(each, Timing)],
        "memory": [asdict(each) for each in figures if isinstance(each, Memory)],
        "missing": missing,
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each; the median counts")
    parser.add_argument("--layers", type=int, default=ModelShape.num_layers, help="of the model, on a GPU")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a tiny model, to try the script"
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        device, shape, bucket_nbytes = torch.device("cpu"), TINY, TINY_BUCKET_NBYTES
    elif torch.cuda.is_available():
        device, shape, bucket_nbytes = torch.device("cuda", 0), ModelShape(arguments.layers), BUCKET_NBYTES
    else:
        print("benchmarks.gpu needs a GPU and found none; `--device cpu` tries the script", file=sys.stderr)
        sys.exit(NO_GPU)
    found = measure(device, shape, bucket_nbytes, arguments.repeat)
    _print(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2))


def _print(found: dict[str, Any]) -> None:
    console = Console()
    times = Table("", "GB", "seconds", "GB/s", "floor", "its seconds", "of the floor", title=found["device"])
    for each in found["timings"]:
        seconds, floor = f"{each['seconds']:.4f}", f"{each['floor_seconds']:.4f}"
        rate, share = f"{each['gb_per_second']:.1f}", f"{each['of_floor']:.0%}"
        times.add_row(each["name"], f"{each['nbytes'] / 1e9:.3f}", seconds, rate, each["floor"], floor, share)
    sizes = Table("", "GB", "beside", "its GB", "ratio")
    for each in found["memory"]:
        beside = each["beside"], f"{each['beside_nbytes'] / 1e9:.3f}"
        sizes.add_row(each["name"], f"{each['nbytes'] / 1e9:.3f}", *beside, f"{each['ratio']:.4f}")
    console.print(times, sizes)
    for name, reason in found["missing"].items():
        console.print(f"{name}: not measured, {reason}")


if __name__ == "__main__":
    main()
