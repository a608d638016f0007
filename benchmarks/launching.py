"""Command-line options, launch of ranks and output of figures for all benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_engine.tools.launching import run_ranks

ROOT = Path(__file__).resolve().parents[1]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json` and the docstring of a benchmark as its help."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the repeatable option `--vllm NAME=VALUE`; parse it by `parse_with_engine_arguments`."""
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine argument of vLLM",
    )


def parse_with_engine_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; `vllm` becomes a dict."""
    arguments = parser.parse_args()
    try:
        arguments.vllm = engine_arguments(arguments.vllm)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def engine_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE, values as JSON or strings. Raises ValueError with all malformed texts."""
    parts = [text.partition("=") for text in texts]
    if wrong := ["".join(part) for part in parts if not all(part)]:
        raise ValueError(f"--vllm {', '.join(wrong)}: write name=value")
    return {name: _value_of(value) for name, _, value in parts}


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def write_figures(path: Path | None, figures: object) -> None:
    """Write `figures` to the file of `--json`, if there is one."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2))


def figures_of_ranks(
    module: str,
    job: Mapping[str, Any],
    num_ranks: int,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `python -m MODULE JOB` on all ranks; return the JSON that rank 0 writes to JOB["out"].

    Exits with the output of the ranks if they fail.

    Args:
        module: a program of this package.
        job: arguments of its ranks.
        num_ranks: number of processes.
        timeout: seconds.
        environment: further variables of the processes.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        out = Path(directory) / "figures.json"
        program = ["-m", module, json.dumps({**job, "out": str(out)})]
        variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
        ended = run_ranks(program, num_ranks, timeout, environment=variables, directory=ROOT)
        if ended.status != 0:
            sys.exit(f"{module} failed:\n{ended.output}")
        return json.loads(out.read_text())


def main_or_rank(main: Callable[[], None], run_rank: Callable[[dict[str, Any]], None]) -> None:
    """Run as a rank if started by `figures_of_ranks`, else as the main program."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        import torch  # not at the top: it is slow to import for --help

        torch.set_num_threads(1)
        run_rank(json.loads(sys.argv[1]))
    else:
        main()
