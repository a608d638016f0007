"""What users do to models and optimizers: records find every element, and training is bitwise as without switches."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.fsdp import odd_models
from tests.hybrid_engine.backends.fsdp.odd_models import FOUR_RANKS, TWO_RANKS

CASES = {2: list(TWO_RANKS), 4: list(FOUR_RANKS)}


@pytest.fixture(scope="module")
def runs(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, list[str]]]]:
    """Number of ranks -> by rank, case -> what is wrong."""
    directory = str(tmp_path_factory.mktemp("odd"))
    return functools.cache(lambda num_ranks: engines.launch(odd_models.run, num_ranks, directory, CASES))


@pytest.mark.parametrize(("num_ranks", "name"), [(number, name) for number, names in CASES.items() for name in names])
def test_odd_models_are_read_and_trained_as_without_switches(
    runs: Callable[[int], list[dict[str, list[str]]]], num_ranks: int, name: str
) -> None:
    assert [found[name] for found in runs(num_ranks)] == [[]] * num_ranks
