"""The part of the matrix that runs with the suite. `make matrix` runs all of it (matrix.py)."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path

import pytest

from hybrid_engine.config import find_violations
from hybrid_engine.layouts.parallelism import ShardedParallelism
from hybrid_engine.tools.verify.comparison import NUM_SWITCHES, Verdict
from tests.harness.launch import Ranks
from tests.hybrid_engine.tools.programs import run_forked
from tests.hybrid_engine.tools.verify import golden
from tests.hybrid_engine.tools.verify.matrix import MATRIX, Combination, run
from tests.zoo.published_configs import PUBLISHED

IN_SUITE = {combination.name: combination for combination in MATRIX if combination.in_suite}


def cuts_of(words: str) -> set[str]:
    """Return the kinds of sizes of a side: "tp2 etp1" -> {"tp", "etp"}."""
    return {re.sub(r"\d+$", "", word) for word in words.split()}


def test_every_cell_is_recorded_once() -> None:
    assert sorted(golden.read()) == sorted(cell.name for cell in MATRIX)


@pytest.mark.parametrize("family", PUBLISHED)
def test_every_family_is_in_the_matrix_and_in_the_suite(family: str) -> None:
    assert family in {cell.family for cell in MATRIX}
    assert family in {cell.family for cell in IN_SUITE.values()}


@pytest.mark.parametrize(
    ("train", "infer"),
    [
        *itertools.product(("tp", "pp", "ep", "fsdp", "replicas"), ("tp", "pp", "ep")),
        *((train, "tp") for train in ("vpp", "cp", "etp")),
    ],
)
def test_every_cut_of_training_meets_every_cut_of_generation(train: str, infer: str) -> None:
    assert any(train in cuts_of(cell.train) and infer in cuts_of(cell.infer) for cell in MATRIX)


@pytest.mark.parametrize("combination", MATRIX, ids=lambda combination: combination.name)
def test_every_cell_is_a_valid_configuration(combination: Combination, tmp_path: Path) -> None:
    """Its sizes match its words. Training refuses context parallelism only, as it cannot split
    sequences.
    """
    config = combination.case(tmp_path).config(combination.num_ranks)
    keys = {violation.key for violation in find_violations(config, combination.num_ranks)}
    assert keys == (
        {"actor_config.context_parallel_size"} if "cp2" in combination.train.split() else set()
    )
    sizes = config.train_sizes(combination.num_ranks)
    if isinstance(sizes, ShardedParallelism):
        short = {"fsdp": sizes.num_shards, "replicas": sizes.replicas}
    else:
        short = {"tp": sizes.tensor, "pp": sizes.pipeline, "cp": sizes.context, "ep": sizes.expert}
    assert {f"{key}{size}" for key, size in short.items() if size > 1} <= set(
        combination.train.split()
    )
    sizes = config.generate_config.sizes(combination.num_ranks)
    short = {"tp": sizes.tensor, "pp": sizes.pipeline, "ep": sizes.expert}
    assert {f"{key}{size}" for key, size in short.items() if size > 1} == set(
        combination.infer.split()
    )


@pytest.fixture(scope="module")
def verdicts(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    directory = tmp_path_factory.mktemp("matrix")
    run_cases = partial(run_forked, engines, golden.main, directory)
    verdicts = run(list(IN_SUITE.values()), directory, run_cases)
    return {cell.name: verdict for cell, verdict in verdicts}


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_SUITE)
def test_switches(verdicts: dict[str, Verdict], name: str) -> None:
    """Weights are bitwise as vLLM's loader sets them, logits match transformers, bytes are minimal.

    The weights change between switches, and the plan is the recorded one.
    """
    verdict = verdicts[name]
    cell = IN_SUITE[name]
    assert golden.faults(verdict, golden.read()) == []
    assert verdict.num_versions == NUM_SWITCHES
    assert verdict.training is not None
    assert (verdict.vllm is None) == bool({"pp", "ep"} & cuts_of(cell.infer))
