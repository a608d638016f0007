"""What ranks did, launched once for all the tests that look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.launch import Ranks, remembered
from tests.hybrid_engine.backends.vllm.scenarios import cycles, replicas, serving

DECODED = ("gemma2", "deepseek_v2", "deepseek_v3")
"""Families whose attention vLLM computes with other kernels than the rest; all are in the matrix."""

Outcomes = Callable[[int], dict[str, list[Any]]]
"""Number of ranks -> by name of a scenario, what each rank brought back."""


@pytest.fixture(scope="session")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Everything that runs on one, two and four ranks; each number is launched when it is first asked for."""
    directory = str(tmp_path_factory.mktemp("vllm"))
    calls: dict[int, dict[str, Any]] = {
        1: {
            "samplings": (serving.samplings, ()),
            "memory": (serving.memory, (directory,)),
            "cycles": (cycles.run, (directory, 1)),
        },
        2: {
            # first, for vLLM changes the classes of models that it takes from transformers
            "gaps": (serving.gaps_to_transformers, (directory, 2, DECODED)),
            "cycles": (cycles.run, (directory, 2)),
            "replicas": (replicas.run, (directory,)),
            "quantised": (serving.quantised, (directory, 2)),
        },
        4: {"orders": (replicas.orders, (directory, [None, (0, 2, 1, 3)]))},
    }
    return remembered(lambda num_ranks: engines.launch_in_turn(num_ranks, calls[num_ranks], timeout=600))
