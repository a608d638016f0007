"""Run one function on several real ranks, as torchrun would, and bring back what each rank returned.

Tests call `launch`; the ranks run this module. A rank that fails or outlives the timeout
takes the whole launch down, so no test leaves a process behind.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_engine.launching import run_ranks

REPO_ROOT = Path(__file__).resolve().parents[1]


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 300,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run `function(*args)` on `num_ranks` processes; return the results by rank.

    `function` is a top-level function of an importable module under tests/; it finds RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment and creates its own process group.
    Arguments and results travel by pickle. Raises AssertionError with the ranks' output when any fails.
    """
    with tempfile.TemporaryDirectory(prefix="launch-") as directory:
        Path(directory, "args.pickle").write_bytes(pickle.dumps(args))
        ended = run_ranks(
            ["--module", "tests.launch", f"{function.__module__}:{function.__qualname__}", directory],
            num_ranks,
            timeout,
            environment={
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{REPO_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                **(env or {}),
            },
            directory=REPO_ROOT,
        )
        if ended.status is None:
            raise AssertionError(f"{function.__qualname__} on {num_ranks} ranks outlived {timeout} s:\n{ended.output}")
        if ended.status != 0:
            causes = "\n".join(path.read_text() for path in sorted(Path(directory).glob("error*.txt")))
            raise AssertionError(f"{function.__qualname__} on {num_ranks} ranks failed:\n{ended.output}\n{causes}")
        return [pickle.loads(Path(directory, f"result{rank}.pickle").read_bytes()) for rank in range(num_ranks)]


def in_turn(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Rank function of several: what each returned. Starting ranks and importing costs more than most of them do."""
    return [function(*args) for function, args in calls]


def launch_in_turn(
    num_ranks: int, calls: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], timeout: float = 300
) -> dict[str, list[Any]]:
    """Run several functions, one after the other, on the same ranks: name -> results by rank. The first failure ends
    them all."""
    by_rank = launch(in_turn, num_ranks, list(calls.values()), timeout=timeout)
    return {name: [results[index] for results in by_rank] for index, name in enumerate(calls)}


def _run_rank() -> None:
    target, directory = sys.argv[1:]
    module_name, function_name = target.split(":")
    function = getattr(importlib.import_module(module_name), function_name)
    try:
        result = function(*pickle.loads(Path(directory, "args.pickle").read_bytes()))
    except BaseException:
        error_file = Path(directory, f"error{os.environ['RANK']}.txt")
        error_file.write_text(f"rank {os.environ['RANK']}:\n{traceback.format_exc()}")
        raise
    Path(directory, f"result{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _run_rank()
