"""Runs Megatron-LM's unit tests in a checkout of it and brings back how each ended."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hybrid_engine.launching import run_ranks

PATH_VARIABLE: Final = "MEGATRON_LM_PATH"
REPO_ROOT: Final = Path(__file__).resolve().parents[2]
PLUGIN_FOLDER: Final = Path(__file__).resolve().parent / "plugin"

FILES: Final[dict[str, int]] = {
    "distributed/test_param_and_grad_buffer.py": 2,
    "test_optimizer.py": 2,
}
"""Below tests/unit_tests of the checkout -> ranks."""

_OPTIONS: Final = ("-q", "-p", "megatron_lm_on_cpu", "-p", "no:cacheprovider", "-o", "addopts=")
_ORDER: Final = ("passed", "skipped", "failed")


@dataclass(frozen=True)
class Outcome:
    """How one test ended: the worst over its ranks. `reason`: why it did not pass, its first line."""

    kind: str
    reason: str = ""


def checkout() -> Path | None:
    """Where Megatron-LM's source is, if the environment says so."""
    path = os.environ.get(PATH_VARIABLE)
    return Path(path).resolve() if path else None


def run(source: Path, file: str, num_ranks: int, groups: Sequence[str], timeout: float = 550) -> dict[str, Outcome]:
    """Test -> outcome, of one of `FILES`, with the patches of `groups`. Nothing is written to the checkout.

    Raises RuntimeError with the ranks' output when no test ended within `timeout` seconds, or when the ranks did not
    run the same tests.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-lm-") as directory:
        ended = run_ranks(
            ["-m", "pytest", *_OPTIONS, f"tests/unit_tests/{file}"],
            num_ranks,
            timeout,
            environment={
                "PYTHONPATH": os.pathsep.join(map(str, [source, PLUGIN_FOLDER, REPO_ROOT, *_python_path()])),
                "PYTHONDONTWRITEBYTECODE": "1",
                "MEGATRON_LM_GROUPS": ",".join(groups),
                "MEGATRON_LM_OUTCOMES": directory,
            },
            directory=source,
        )
        by_rank = [_read(Path(directory, f"rank{rank}.jsonl")) for rank in range(num_ranks)]
    if ended.status is None or not by_rank[0] or any(found.keys() != by_rank[0].keys() for found in by_rank):
        raise RuntimeError(f"{file} on {num_ranks} ranks ended with {ended.status}:\n{ended.output[-20000:]}")
    return {test: _worst([found[test] for found in by_rank]) for test in by_rank[0]}


def _python_path() -> list[str]:
    """Where Python is told to look already."""
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _read(path: Path) -> dict[str, Outcome]:
    """The worst of each test's phases."""
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        outcome = Outcome(entry["outcome"], entry["reason"])
        test = entry["test"].removeprefix("tests/unit_tests/")
        found[test] = _worst([found.get(test, outcome), outcome])
    return found


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: _ORDER.index(outcome.kind))


def passed(outcomes: Mapping[str, Outcome]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome.kind == "passed"}


def reasons(outcomes: Mapping[str, Outcome]) -> Counter[str]:
    """Why tests did not pass -> how many."""
    return Counter(f"{found.kind}: {found.reason}" for found in outcomes.values() if found.kind != "passed")
