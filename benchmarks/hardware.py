"""Everything that is asked of one GPU, in one command of at most ten minutes.

    python -m benchmarks.hardware OUT [--budget 540] [--slow 1] [--vllm NAME=VALUE]

    stage1     checks of memory and copies, also between two processes (tests/gpu)
    stage2     checks of both engines
    switch     whole switches: exposed seconds, driver calls, kernels, waits, most memory
    fills      resharding beside its peers, three sizes of bucket, with traces
    driver     cost of the driver's calls

A step begins only if a part of its time is left, and ends when the budget does; the steps that
decide most come first. OUT gets figures.json and log.txt, and results.tar.gz with all records,
profiles and traces; they are written after every step, so a killed command loses one step. Exits
with 1 if a step failed, or did not begin.

`--model tiny --device cpu` tries the sequence, but for the last step, without a GPU. Steps of one
rank also run over the GPU in software:

    python -m tests.software_gpu -- python -m benchmarks.hardware OUT --model tiny --only switch
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.launching import ROOT, parser_of, write_figures
from hybrid_engine.tools.launching import run_ranks
from tests.gpu.offline.run import environment

LEAST_SHARE = 0.4
"""Share of a step's time below which it does not begin."""
MOST_SHARE = 1.5
"""Times its seconds after which a step is killed, so that one that hangs costs no other."""
TINY = "tiny"
BUCKETS_MB = ("256", "64", "1024")


@dataclass(frozen=True)
class Step:
    """A program of the sequence: its seconds at most, estimated, and its arguments for Python."""

    name: str
    seconds: float
    arguments: tuple[str, ...]


@dataclass
class Result:
    """Outcome of a step. `figures` is the JSON that it wrote, if any."""

    name: str
    status: str
    seconds: float = 0.0
    figures: Any = None


def steps(place: Path, model: str, device: str, vllm: list[str], slow: float = 1) -> Iterator[Step]:
    """Yield the steps, which write below `place`; `slow` multiplies their seconds."""
    engine = [part for text in vllm for part in ("--vllm", text)]
    profile = ("--profile", str(place / "profiles"))

    def bench(name: str, seconds: int, module: str, *options: str) -> Step:
        json_file = ("--json", str(place / f"{name}.json"))
        return Step(name, seconds * slow, ("-m", f"benchmarks.{module}", *json_file, *options))

    def checks(stage: str, usual: int) -> Step:
        seconds = usual * slow
        options = (f"--device={device}", "-k", stage, "--budget", str(seconds), *engine)
        records = ("--records", str(place / f"{stage}.jsonl"))
        files = (str(ROOT / "tests/gpu"), f"--confcutdir={ROOT / 'tests/gpu'}")
        quiet = ("-p", "no:cacheprovider", "--timeout", str(seconds))
        return Step(stage, seconds, ("-m", "pytest", *files, *quiet, *records, *options))

    yield checks("stage1", 80)
    yield checks("stage2", 180)
    cycles = ("--model", model, "--cycles", "4")
    yield bench("switch", 90, "switch", *cycles, *profile, *engine)
    sizes = ("--bucket-mb", *BUCKETS_MB)
    yield bench("fills", 120, "reshard", "--only", model, "--runs", "3", *sizes, *profile, *engine)
    if model != TINY:
        yield bench("driver", 30, "driver", "--gib", "2")


def run(step: Step, seconds: float, place: Path) -> Result:
    """Run a step for at most `seconds`; append its output to the log.

    In an unpacked offline bundle (tests/gpu/offline), with the bundle's variables.
    """
    started = time.monotonic()
    bundle = environment(ROOT.parent) if (ROOT.parent / "packages").is_dir() else {}
    variables = {**bundle, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    variables["RESHARD_VERBOSE"] = "1"  # all output of its ranks
    ended = run_ranks(step.arguments, 1, seconds, environment=variables, directory=ROOT)
    spent = time.monotonic() - started
    with (place / "log.txt").open("a") as log:
        log.write(f"== {step.name}: {' '.join(step.arguments)}\n{ended.output}\n")
    status = {None: f"no end within {seconds:.0f} s", 0: "passed"}.get(
        ended.status, f"status {ended.status}"
    )
    written = place / f"{step.name}.json"
    figures = json.loads(written.read_text()) if written.is_file() else None
    return Result(step.name, status, spent, figures)


def pack(place: Path, out: Path, results: list[Result]) -> None:
    """Write what is known so far to `out`."""
    write_figures(out / "figures.json", [asdict(result) for result in results])
    (out / "log.txt").write_bytes((place / "log.txt").read_bytes())
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        archive.add(place, arcname="results")


def main() -> int:
    """Run the steps within the budget; return 1 unless all passed."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the results")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all steps")
    parser.add_argument(
        "--slow", type=float, default=1, help="times as long as a step takes on an H100"
    )
    parser.add_argument("--model", default="qwen3-1.7b", help="a model of benchmarks.reshard")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="these steps alone")
    parser.add_argument("--vllm", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.budget
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="hardware-") as directory:
        place = Path(directory)
        (place / "log.txt").write_text("")
        for step in steps(place, arguments.model, arguments.device, arguments.vllm, arguments.slow):
            if arguments.only and step.name not in arguments.only:
                continue
            left = end - time.monotonic()
            if left < LEAST_SHARE * step.seconds:
                results.append(Result(step.name, f"not begun: {left:.0f} s left"))
            else:
                results.append(run(step, min(left, MOST_SHARE * step.seconds), place))
            print(f"{step.name}: {results[-1].status}, {results[-1].seconds:.0f} s", flush=True)
            pack(place, out, results)
        print((place / "log.txt").read_text())
    return int(any(result.status != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
