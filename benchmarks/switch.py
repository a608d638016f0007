"""Whole switches of both engines with training state, compared with plain copies of the same bytes.

    python -m benchmarks.switch [--model qwen3-4b] [--cycles N] [--bucket-mb MB]
                                [--profile DIRECTORY] [--vllm NAME=VALUE] [--json FILE]

Runs one rank. A cycle is two training steps, a switch to vLLM, completions twice, and a switch
back. Seconds are medians over all cycles except the first, which also plans and allocates
page-locked host memory. `exposed` is a switch and what the step or the completions after it take
longer than the second ones, which nothing precedes: work that a switch leaves behind. The floor,
measured in the same process, is a plain copy of the same bytes to or from page-locked memory, and
of the weights within the device. The peak of device memory is sampled in the first cycle only,
because sampling takes time.

`--profile` adds two cycles: one under Python's profiler (infer.txt, train.txt), one under torch's
(infer.json, train.json), which counts kernels, waits and calls of the driver (`counting.py`).

Needs a GPU. `--model tiny` tries the script on the CPU; its times mean nothing.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.counting import Profile, profiled
from benchmarks.launching import (
    add_engine_arguments,
    figures_of_ranks,
    main_or_rank,
    parse_with_engine_arguments,
    parser_of,
    write_figures,
)
from benchmarks.offload_figures import copied_nbytes
from benchmarks.resharding.cases import MODELS, Case
from benchmarks.timings import (
    PeakOfDevice,
    plain_device_copy,
    plain_host_copies,
    seconds_of,
    synchronize,
    taken_nbytes,
)
from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from hybrid_engine.tools.verify.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.trainer.worker import ActorHybridWorker

SECONDS = 1500
MOST_COPIED = 8 * 2**30
"""Upper limit for the bytes of a plain copy to or from the host; its time is scaled up."""
SAMPLING = Sampling(temperature=1.0, max_tokens=16, ignore_eos=True)


def run_rank(job: dict[str, Any]) -> None:
    """Build both engines, switch, and write the figures to `job["out"]`."""
    case = Case(job["model"], 1, "tp=1", "tp=1", trains=True, bucket_mb=job["bucket_mb"])
    with (
        tempfile.TemporaryDirectory(prefix="switch-") as directory,
        ActorHybridWorker(case.config(Path(directory), job["vllm"])) as worker,
    ):
        write_figures(Path(job["out"]), _figures(worker, job))


def _figures(worker: ActorHybridWorker, job: dict[str, Any]) -> dict[str, Any]:
    device = worker.job.device
    reports: dict[State, list[ReshardReport]] = {State.INFER: [], State.TRAIN: []}
    # by the state before it, how much longer the first step or the first completions took
    late: dict[State, list[float]] = {State.INFER: [], State.TRAIN: []}
    profiles: dict[str, Any] = {}
    taken: dict[str, int] = {}
    peak = PeakOfDevice(device)

    def note_late(state: State, action: Callable[[], object]) -> None:
        first, second = (seconds_of(device, action) for _ in range(2))
        late[state].append(first - second)

    for number in range(job["cycles"] + 2 * bool(job["profile"])):
        batch = tokens_and_labels(number, worker.table.dims.vocab_size, 4)
        note_late(State.TRAIN, partial(worker.update, batch, cross_entropy))
        torch.cuda.empty_cache()  # memory cached by torch must not count
        taken |= _memory(device, "training")
        for state in (State.INFER, State.TRAIN):
            synchronize(device)
            profiling: AbstractContextManager[Profile | None] = nullcontext()
            if number == job["cycles"]:
                profiling = _profiled(Path(job["profile"]), state)
            elif number > job["cycles"]:
                profiling = profiled(Path(job["profile"], f"{state.name.lower()}.json"))
            with nullcontext() if number else peak.watched(), profiling as profile:
                report = worker.sharding.enter(state)
            assert report is not None, "the worker was in the other state"
            print(report, flush=True)
            if number < job["cycles"]:
                reports[state].append(report)
            if profile is not None:
                profiles[state.name.lower()] = asdict(profile)
            if state is State.INFER:
                taken |= _memory(device, "generation")
                prompts = [[1, 2, 3], [4, 5, 6, 7]]
                note_late(state, partial(worker.generate_sequences, prompts, SAMPLING))
    # the first step follows no switch
    exposed = {
        "to_vllm": _exposed(reports[State.INFER], late[State.INFER]),
        "to_training": _exposed(reports[State.TRAIN], late[State.TRAIN][1:]),
    }
    weights = worker.inference.adaptor.nbytes
    copied = copied_nbytes(worker.train.offload_items())
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "cpu: these times mean nothing",
        "model": job["model"],
        "cycles": job["cycles"],
        "weights_nbytes": weights,
        "copied_nbytes": copied,
        "to_vllm": _summary(reports[State.INFER]),
        "to_training": _summary(reports[State.TRAIN]),
        "exposed": exposed,
        "profiles": profiles,
        "bucket_mb": job["bucket_mb"],
        "taken_nbytes": {**taken, "most": peak.nbytes},
        "floor": _floor(device, copied, weights),
    }


@contextmanager
def _profiled(directory: Path, state: State) -> Iterator[None]:
    """Profile the block; write the slowest functions to a file in `directory`."""
    with cProfile.Profile() as profile:
        yield
    with (directory / f"{state.name.lower()}.txt").open("w") as file:
        pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(80)


def _memory(device: torch.device, name: str) -> dict[str, int]:
    """Return the device bytes in use by all processes and by torch."""
    return {
        name: taken_nbytes(device),
        f"{name}, torch's tensors": torch.cuda.memory_allocated(device),
        f"{name}, torch's allocator": torch.cuda.memory_reserved(device),
    }


def _summary(reports: Sequence[ReshardReport]) -> dict[str, Any]:
    """Return median seconds in total and by phase; those of the first switch are separate."""
    first, *later = reports
    phases = {name for report in later for name in report.seconds_by_phase}
    return {
        "first_seconds": first.seconds,
        "first_by_phase": dict(first.seconds_by_phase),
        "seconds": statistics.median(report.seconds for report in later),
        # of the way back before
        "hidden_seconds": statistics.median(report.seconds_hidden for report in later),
        "exposed_seconds": statistics.median(report.seconds_exposed for report in later),
        "all_seconds": [report.seconds for report in later],
        "by_phase": {
            name: statistics.median(report.seconds_by_phase.get(name, 0.0) for report in later)
            for name in sorted(phases)
        },
    }


def _exposed(reports: Sequence[ReshardReport], late: Sequence[float]) -> float:
    """Return the median seconds of a switch and of what it left to do later."""
    later = [report.seconds + more for report, more in zip(reports, late, strict=False)][1:]
    return statistics.median(later or [reports[-1].seconds])


def _floor(device: torch.device, copied: int, weights: int) -> dict[str, float]:
    """Return seconds of plain copies; those with the host are scaled up from MOST_COPIED bytes."""
    part = min(MOST_COPIED, copied)  # page-locked memory for all bytes may not fit the host
    torch.cuda.empty_cache()
    copies = plain_host_copies(device, part, 3)
    return {
        "offload": copies["offload"] * copied / part,
        "onload": copies["onload"] * copied / part,
        "weights": plain_device_copy(device, weights, 3),
    }


def main() -> None:
    """Run the rank, print and write its figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-4b")
    parser.add_argument("--cycles", type=int, default=5, help="the first is a warm-up")
    parser.add_argument(
        "--bucket-mb", type=int, default=Case.bucket_mb, help="generate_config.bucket_mb"
    )
    parser.add_argument(
        "--profile", metavar="DIRECTORY", type=Path, help="write profiles of additional cycles"
    )
    add_engine_arguments(parser)
    arguments = parse_with_engine_arguments(parser)
    if arguments.cycles < 2:
        parser.error("--cycles must be at least 2: the first is a warm-up")
    if arguments.profile is not None:
        arguments.profile.mkdir(parents=True, exist_ok=True)
    job = {
        "model": arguments.model,
        "cycles": arguments.cycles,
        "bucket_mb": arguments.bucket_mb,
        "profile": "" if arguments.profile is None else str(arguments.profile.absolute()),
        "vllm": arguments.vllm,
    }
    figures = figures_of_ranks("benchmarks.switch", job, 1, SECONDS)
    _print(figures)
    write_figures(arguments.json, figures)


def _print(figures: dict[str, Any]) -> None:
    console = Console()
    columns = ("", "seconds", "exposed", "first", "GB copied", "floor, seconds", "floor / seconds")
    table = Table(*columns, title=figures["device"])
    floor = figures["floor"]
    for name, key, least in (
        ("to vLLM", "to_vllm", floor["offload"] + floor["weights"]),
        ("to training", "to_training", floor["onload"]),
    ):
        row = figures[key]
        table.add_row(
            name,
            f"{row['seconds']:.3f}",
            f"{figures['exposed'][key]:.3f}",
            f"{row['first_seconds']:.3f}",
            f"{figures['copied_nbytes'] / 1e9:.2f}",
            f"{least:.3f}",
            f"{least / row['seconds']:.0%}",
        )
    console.print(table)
    for key in ("to_vllm", "to_training", "floor", "taken_nbytes", "profiles"):
        console.print(key, figures[key])


if __name__ == "__main__":
    main_or_rank(main, run_rank)
