"""Cells of the matrix on the software GPU: every axis of both sides, by reads of mapped memory and
by NCCL.

The plan of a cell must equal the plan recorded on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hybrid_engine.tools.verify.comparison import Verdict
from hybrid_engine.tools.verify.verify import run_cases
from tests.hybrid_engine.tools.verify import golden
from tests.hybrid_engine.tools.verify.matrix import BY_MESSAGES, MATRIX, Combination

pytestmark = [pytest.mark.engines, pytest.mark.slow]

WAYS = ("reads", "NCCL")
SECONDS = 840.0
NAMES = (
    "llama-2: tp2 bf16 -> tp2 on 2",
    "llama-3: tp2 -> pp2 on 2",
    "qwen2.5: pp2 vpp2 -> tp2 on 2",
    "llama-2: tp2 replicated -> dp on 2 (adapters)",
    "qwen3-moe: ep2 -> ep2 on 2",
    "qwen2.5: fsdp2 -> pp2 on 2",
    "llama-3: tp2 pp2 -> tp2 pp2 on 4",
    "qwen2.5: fsdp2 replicas2 -> tp2 pp2 on 4 (compressed)",
)
"""Cells without sequence parallelism, which requires Transformer Engine or apex on a GPU."""
CELLS = {cell.name: cell for cell in MATRIX if cell.name in NAMES}


def keys_of(cell: Combination, way: str) -> Mapping[str, Any]:
    """Return keys for the way. Parameters that FSDP2 splits unevenly always use messages."""
    if way == "NCCL":
        return BY_MESSAGES
    return {"transport": "auto" if cell.train.startswith("fsdp") else "shared_memory"}


Outcomes = Callable[[int], Mapping[tuple[str, str], Verdict]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return a function from a number of ranks to the verdicts by cell and way."""

    @functools.cache
    def outcomes_of(num_ranks: int) -> dict[tuple[str, str], Verdict]:
        cases = {}
        for cell in CELLS.values():
            if cell.num_ranks == num_ranks:
                case = cell.case(tmp_path_factory.mktemp("model"))
                for way in WAYS:
                    cases[cell.name, way] = replace(
                        case, generate={**case.generate, **keys_of(cell, way)}
                    )
        verdicts = run_cases([*cases.values()], num_ranks, SECONDS, module=golden.__name__)
        return dict(zip(cases, verdicts, strict=True))

    return outcomes_of


def test_every_cell_exists() -> None:
    assert len(CELLS) == len(NAMES)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_cell_switches_correctly(outcomes: Outcomes, name: str, way: str) -> None:
    verdict = outcomes(CELLS[name].num_ranks)[name, way]
    print(f"{verdict.seconds:.0f} s, vLLM's log-probabilities {verdict.vllm}")
    faults = golden.faults(verdict, golden.read())
    assert not faults, "\n".join(faults)
