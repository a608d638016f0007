"""Megatron-LM's own unit tests have the same outcomes with and without our hooks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import torch

from hybrid_engine.tools.launching import run_ranks

REPO_ROOT: Final = Path(__file__).resolve().parents[2]
PLUGIN_FOLDER: Final = Path(__file__).resolve().parent / "plugin"

FILES: Final[dict[str, int]] = {
    "distributed/test_param_and_grad_buffer.py": 2,
    "distributed/test_distributed_data_parallel.py": 2,
    "distributed/test_finalize_model_grads.py": 2,
    "distributed/test_grad_sync_with_expert_parallel.py": 4,
    "distributed/test_grad_reduce_for_replicated_embedder.py": 4,
    "distributed/test_reduce_scatter_with_fp32_accumulation.py": 4,
    "optimizer/test_optimizer_config.py": 2,
    "resharding/test_model_swap.py": 4,
    "test_optimizer.py": 2,
    "test_optimizer_param_scheduler.py": 2,
}
"""Files below tests/unit_tests of the checkout, with the ranks that most of their tests need."""

_OPTIONS: Final = (
    *("-q", "-p", "megatron_lm_on_cpu", "-p", "no:cacheprovider"),
    *("-o", "addopts=", "--continue-on-collection-errors"),
)
_ORDER: Final = ("passed", "skipped", "failed", "unfinished")


@dataclass(frozen=True)
class Outcome:
    """Worst outcome of a test over its ranks; `reason` is the first line of a failure."""

    kind: str
    reason: str = ""


def run(
    source: Path, files: Sequence[str], num_ranks: int, groups: Sequence[str], timeout: float = 290
) -> dict[str, Outcome]:
    """Run `files` in one launch with the patches of `groups`; return outcomes by test. Does not
    write to the checkout.

    A test that did not end within `timeout` seconds, or before its rank died, is "unfinished".
    Raises RuntimeError with the ranks' output if no test ended, or if ranks have different tests.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-lm-") as directory:
        ended = run_ranks(
            ["-m", "pytest", *_OPTIONS, *(f"tests/unit_tests/{file}" for file in files)],
            num_ranks,
            timeout,
            environment={
                "PYTHONPATH": os.pathsep.join(
                    map(str, [source, PLUGIN_FOLDER, REPO_ROOT, *_python_path()])
                ),
                "PYTHONDONTWRITEBYTECODE": "1",
                "MEGATRON_LM_GROUPS": ",".join(groups),
                "MEGATRON_LM_OUTCOMES": directory,
            },
            directory=source,
        )
        by_rank = [read_outcomes(Path(directory, f"rank{rank}.jsonl")) for rank in range(num_ranks)]
    differ = any(outcomes.keys() != by_rank[0].keys() for outcomes in by_rank)
    if differ or all(outcome.kind == "unfinished" for outcome in by_rank[0].values()):
        raise RuntimeError(
            f"{num_ranks} ranks with {groups} ended with {ended.status}:\n{ended.output[-20000:]}"
        )
    return {test: _worst([outcomes[test] for outcomes in by_rank]) for test in by_rank[0]}


def by_ranks(files: Iterable[str]) -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for file in files:
        groups.setdefault(FILES[file], []).append(file)
    return groups


def of_file(file: str, outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    return {test: outcome for test, outcome in outcomes.items() if test.partition("::")[0] == file}


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the worst phase of each test; the first line, "unfinished", does not count."""
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        outcome = Outcome(entry["outcome"], entry["reason"])
        test = entry["test"].removeprefix("tests/unit_tests/")
        before = outcomes.get(test)
        outcomes[test] = (
            _worst([before, outcome]) if before and before.kind != "unfinished" else outcome
        )
    return outcomes


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: _ORDER.index(outcome.kind))


def passed(outcomes: Mapping[str, Outcome]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome.kind == "passed"}


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="for machines without CUDA; with CUDA run them in Megatron-LM",
    ),
]


@pytest.fixture
def source() -> Path:
    if not (path := os.environ.get("MEGATRON_LM_PATH")):
        pytest.skip("requires a checkout of Megatron-LM in MEGATRON_LM_PATH")
    return Path(path).resolve()


@pytest.mark.parametrize(("num_ranks", "files"), by_ranks(FILES).items())
def test_the_same_tests_pass_with_and_without_hooks(
    source: Path, num_ranks: int, files: list[str]
) -> None:
    without = run(source, files, num_ranks, ["routers", "cpu"])
    with_hooks = run(source, files, num_ranks, ["routers", "cpu", "hooks"])
    for file in files:
        assert passed(of_file(file, without)), f"nothing passed in {file}, so nothing was compared"
        print(
            f"{file}: {len(of_file(file, without))} tests, "
            f"{len(passed(of_file(file, without)))} pass without hooks"
        )
    assert passed(with_hooks) == passed(without)
    assert with_hooks.keys() == without.keys()
