"""Resharding compared with other systems: seconds, bytes and peak memory of each case.

    python -m benchmarks.reshard --json FILE [--quick] [--only TEXT] [--profile DIRECTORY]
    # a row for each size of bucket
    python -m benchmarks.reshard --only qwen3-1.7b --bucket-mb 64 256 1024
    # growth
    python -m benchmarks.reshard --only "ep=2,dp=2 -> tp=2 on 2" --train --runs 0 --cycles 50
    # plot only
    python -m benchmarks.reshard --from FILE --plot PHASES.svg

Every rank runs both engines, on CPU and gloo; 4 ranks need about 16 GiB. The package
`benchmarks.resharding` has the contenders and their checks, `benchmarks/resharding/figures.py` the
keys of the JSON. Exits with 1 and names what failed if a case or a contender did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.launching import ROOT, add_engine_arguments, parse_with_engine_arguments, parser_of
from benchmarks.resharding.cases import Case, chosen
from benchmarks.resharding.figures import Figures
from benchmarks.resharding.plots import plot_memory, plot_phases
from hybrid_engine.tools.launching import run_ranks

SECONDS_PER_CASE = 1800
BUDGET = 120.0
"""Seconds for all runs of a contender in a case."""
QUICK_BUDGET = 30.0


def main() -> int:
    """Run the cases, print and write their figures; return 1 if a case or a contender failed."""
    arguments = _arguments()
    if arguments.source is not None:
        _plot(json.loads(arguments.source.read_text()), arguments)
        return 0
    cases = chosen(
        arguments.only, arguments.quick, trains=arguments.train, buckets=arguments.bucket_mb
    )
    if not cases:
        sys.exit(f"no case's name contains {arguments.only!r}")
    default_runs = 3 if arguments.quick else 7
    request = {
        "runs": default_runs if arguments.runs is None else arguments.runs,
        "budget": QUICK_BUDGET if arguments.quick else BUDGET,
        "cycles": arguments.cycles,
        "timeline": arguments.plot_memory is not None,
        "bridge": arguments.bridge,
        "vllm": arguments.vllm,
        "profile": "" if arguments.profile is None else str(arguments.profile.absolute()),
    }
    if arguments.profile is not None:
        arguments.profile.mkdir(parents=True, exist_ok=True)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for _, group in groupby(cases, key=lambda case: case.ranks):  # one launch per number of ranks
        for row in launch(list(group), request):
            rows.append(row)
            print(_line(row), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=2))
    _plot(rows, arguments)
    failures = [f"{_name(row)}: {key}" for row in rows for key in row["reasons"]]
    if failures:
        print(f"failed, for the reasons above: {'; '.join(failures)}", file=sys.stderr)
    return int(bool(failures))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a subset, with fewer runs")
    parser.add_argument(
        "--only", default="", help="cases whose name contains this; tiny: a case to try the script"
    )
    parser.add_argument(
        "--runs", type=int, help="timed runs per contender (default: 7, quick: 3; 0: none)"
    )
    parser.add_argument(
        "--cycles", type=int, default=0, help="number of switches over which to measure growth"
    )
    parser.add_argument(
        "--train", action="store_true", help="with gradients and optimizer; needs far more memory"
    )
    parser.add_argument(
        "--bridge", action="store_true", help="with Megatron-Bridge, which must be installed"
    )
    parser.add_argument(
        "--bucket-mb",
        type=int,
        nargs="+",
        default=[],
        metavar="MB",
        help="generate_config.bucket_mb, a row for each; its default is that of the product",
    )
    parser.add_argument(
        "--profile",
        metavar="DIRECTORY",
        type=Path,
        help="write torch.profiler's trace of a further run of each contender on rank 0",
    )
    add_engine_arguments(parser)
    parser.add_argument("--plot", type=Path, help="plot the phases to this file (SVG)")
    parser.add_argument(
        "--plot-memory", type=Path, help="trace a cycle and plot the memory to this file (SVG)"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, help="plot the figures of this JSON without a run"
    )
    return parse_with_engine_arguments(parser)


def _plot(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    for path, draw in ((arguments.plot, plot_phases), (arguments.plot_memory, plot_memory)):
        if path is None:
            continue
        try:
            draw(rows, path)
        except ValueError as error:
            print(f"{path} is not drawn: {error}", file=sys.stderr)


def launch(cases: Sequence[Case], request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run cases of the same number of ranks; yield a row per case."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as directory:
        job = Path(directory, "job.json")
        out = Path(directory, "figures.json")
        job.write_text(json.dumps({"cases": [asdict(case) for case in cases], "request": request}))
        failure = _run(cases[0].ranks, [str(job), str(out)], SECONDS_PER_CASE * len(cases))
        rows = json.loads(out.read_text()) if out.is_file() else []
    yield from rows
    for case in cases[len(rows) :]:
        yield Figures.of(case, reasons={"case": failure or "the ranks ended early"}).as_json()


def _run(num_ranks: int, arguments: Sequence[str], timeout: float) -> str | None:
    """Run the ranks; return the end of their output if they failed."""
    # torch records the last 2,000 collectives; until the buffer is full, it looks like a leak
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_FR_BUFFER_SIZE": "0"}
    program = ["-m", "benchmarks.resharding.ranks", *arguments]
    ended = run_ranks(program, num_ranks, timeout, environment=environment, directory=ROOT)
    if os.environ.get("RESHARD_VERBOSE"):
        print(ended.output, flush=True)
    if ended.status is None:
        return f"no end within {timeout:g} s: {ended.output[-2000:]}"
    return None if ended.status == 0 else f"status {ended.status}: {ended.output[-2000:]}"


def _name(row: dict[str, Any]) -> str:
    layouts = f"{row['train']} -> {row['infer']} on {row['ranks']}"
    return f"{row['model']}: {layouts}, buckets of {row['bucket_mb']} MB"


def _line(row: dict[str, Any]) -> str:
    parts = [_name(row)]
    for key, value in row.items():
        if key.endswith("_seconds"):
            seconds = "-" if value is None else f"{value:.4f}"
            parts.append(f"{key.removesuffix('_seconds')} {seconds}")
    parts.append(f"peak over {row['peak_over_max_layout_bytes']} B")
    parts += [
        f"{contender} on the device {seconds:.4f}"
        for contender, seconds in row["on_device"].items()
    ]
    notes = [f"{contender}: {counts}" for contender, counts in row["profiles"].items()]
    notes += [f"{key}: {reason}" for key, reason in row["reasons"].items()]
    if growth := row["growth"]:
        changes = (
            f"{key} {first} -> {growth['last'][key]}" for key, first in growth["first"].items()
        )
        notes.append(f"{growth['cycles']} cycles: {', '.join(changes)}")
    return "  ".join(parts) + "".join(f"\n    {note}" for note in notes)


if __name__ == "__main__":
    sys.exit(main())
