"""The spread of the matrix that runs with the suite; `make matrix` runs the whole (matrix.py)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hybrid_engine.config import find_violations
from hybrid_engine.verification.verdict import NUM_SWITCHES, Verdict
from tests.hybrid_engine.verification.matrix import MATRIX, Combination, run
from tests.zoo import published_configs

IN_SUITE = {combination.name: combination for combination in MATRIX if combination.in_suite}


def test_the_matrix_is_wide() -> None:
    assert len(MATRIX) >= 60
    names = Counter(combination.name for combination in MATRIX)
    assert max(names.values()) == 1
    assert {combination.family for combination in MATRIX} == set(published_configs.PUBLISHED)
    assert {combination.family for combination in IN_SUITE.values()} == set(published_configs.PUBLISHED)


@pytest.mark.parametrize("combination", MATRIX, ids=lambda combination: combination.name)
def test_every_cell_is_a_sound_configuration(combination: Combination, tmp_path: Path) -> None:
    """And is what its words say; training computes but where it would have to split sequences."""
    config = combination.case(tmp_path).config(combination.num_ranks)
    keys = {violation.key for violation in find_violations(config, combination.num_ranks)}
    assert keys == ({"actor_config.context_parallel_size"} if "cp2" in combination.train.split() else set())
    sizes = config.actor_config.sizes(combination.num_ranks)
    short = {"tp": sizes.tensor, "pp": sizes.pipeline, "cp": sizes.context, "ep": sizes.expert}
    assert {f"{key}{size}" for key, size in short.items() if size > 1} <= set(combination.train.split())
    sizes = config.generate_config.sizes(combination.num_ranks)
    short = {"tp": sizes.tensor, "pp": sizes.pipeline, "ep": sizes.expert}
    assert {f"{key}{size}" for key, size in short.items() if size > 1} == set(combination.infer.split())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    return {cell.name: verdict for cell, verdict in run(list(IN_SUITE.values()), tmp_path_factory.mktemp("matrix"))}


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_SUITE)
def test_switches(verdicts: dict[str, Verdict], name: str) -> None:
    """Bitwise what vLLM loads, logits as transformers computes them, the fewest bytes, over changing weights."""
    verdict, cell = verdicts[name], IN_SUITE[name]
    assert verdict.faults == []
    assert verdict.num_versions == NUM_SWITCHES
    assert verdict.megatron is not None
    assert (verdict.vllm is None) == any(word in cell.infer for word in ("pp", "ep"))
