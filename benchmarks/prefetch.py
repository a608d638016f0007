"""Seconds of the RL example's iterations and switches with `generate_config.prefetch` off and auto.

    python -m benchmarks.prefetch [--config FILE] [--nproc 2] [--iterations 12] [--rounds 2]
                                  [--json FILE]

The runs alternate (off, auto, off, auto), so that a slowdown of the machine affects both. The
benchmark checks that rewards, losses and all other figures except seconds and memory are identical.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.launching import ROOT, parser_of, write_figures
from hybrid_engine.tools.launching import run_ranks

SECONDS = ("iteration_seconds", "reshard_seconds", "generate_seconds")
MEMORY = ("peak_bytes", "rss_bytes")
CHOICES = ("off", "auto")

Row = Mapping[str, Any]


def main() -> None:
    """Run both settings, print and write their figures."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--config", type=Path, default=ROOT / "examples/gpt_rl/configs/tp2_to_dp2.yaml"
    )
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--iterations", type=int, default=12, help="per run; the first does not count (default: 12)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs per setting (default: 2)")
    arguments = parser.parse_args()
    runs: dict[str, list[list[Row]]] = {choice: [] for choice in CHOICES}
    with tempfile.TemporaryDirectory(prefix="prefetch-") as directory:
        for number in range(arguments.rounds):
            for choice in CHOICES:
                out = Path(directory) / f"{choice}-{number}"
                runs[choice].append(
                    train(arguments.config, choice, arguments.nproc, arguments.iterations, out)
                )
    require_same([rows for choice in CHOICES for rows in runs[choice]])
    figures = {choice: summary(runs[choice]) for choice in CHOICES}
    for choice, row in figures.items():
        print(
            f"prefetch: {choice:4}", ", ".join(f"{name} {value:.6g}" for name, value in row.items())
        )
    write_figures(arguments.json, figures)


def train(config: Path, prefetch: str, num_ranks: int, iterations: int, out: Path) -> list[Row]:
    """Run the example; return the rows of its `metrics.jsonl`."""
    values = yaml.safe_load(config.read_text())
    # paths are relative to the file, and the changed copy is in another directory
    values["model"] = str((config.parent / values["model"]).resolve())
    values["rl_config"]["data"] = str((config.parent / values["rl_config"]["data"]).resolve())
    values["generate_config"]["prefetch"] = prefetch
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values))
    options = ["--config", str(path), "--out", str(out), f"rl_config.iterations={iterations}"]
    program = ["-m", "examples.gpt_rl.train", *options]
    ended = run_ranks(
        program, num_ranks, timeout=3600, environment={"OMP_NUM_THREADS": "1"}, directory=ROOT
    )
    if ended.status != 0:
        sys.exit(f"prefetch: {prefetch} failed:\n{ended.output}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def require_same(runs: Sequence[Sequence[Row]]) -> None:
    """Exit with the figures that differ between runs, if any."""
    first, *others = [
        [{key: value for key, value in row.items() if not _may_differ(key)} for row in rows]
        for rows in runs
    ]
    for other in others:
        for row, other_row in zip(first, other, strict=True):
            differing = [key for key in row if row[key] != other_row.get(key)]
            if differing:
                names = ", ".join(differing)
                sys.exit(
                    f"iteration {row['iteration']}: {names} differ between runs: {row}, {other_row}"
                )


def _may_differ(key: str) -> bool:
    return key.endswith("_seconds") or key == "reshard_share" or key in MEMORY


def summary(runs: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Return median seconds and largest memory, without warm-up and first iteration."""
    rows = [row for rows in runs for row in rows if row["iteration"] > 1]
    medians = {name: statistics.median(row[name] for row in rows) for name in SECONDS}
    return medians | {name: max(row[name] for row in rows) for name in MEMORY}


if __name__ == "__main__":
    main()
