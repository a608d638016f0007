"""Incremental switches with real engines: vLLM is always right, also with weights that stayed.

What is sent is counted in switch/test_incremental.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.end_to_end import incremental_rounds
from tests.hybrid_engine.end_to_end.incremental_rounds import Round
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("incremental")
    # Embedding and head have 528 rows of 128 in float32, 0.27 MB each; the 4 layers have 0.5 MB.
    models = [workers.write_model(directory / name, "qwen3", vocab_size=528) for name in ("fsdp", "megatron")]
    return engines.launch_in_turn(
        2,
        {
            "adapters": (incremental_rounds.with_adapters, (models[1], directory)),
            "fsdp": (incremental_rounds.with_fsdp, (models[0],)),
        },
        timeout=500,
    )


@pytest.fixture
def by_rank(outcomes: Outcomes) -> list[dict[str, Round]]:
    return outcomes["fsdp"]


@pytest.fixture(params=("fsdp", "adapters"))
def all_by_rank(request: pytest.FixtureRequest, outcomes: Outcomes) -> list[dict[str, Round]]:
    return outcomes[request.param]


def test_vllm_weights_equal_its_own_load_after_every_switch(all_by_rank: list[dict[str, Round]]) -> None:
    for rounds in all_by_rank:
        assert {name: result.different for name, result in rounds.items() if result.different} == {}


def test_without_a_step_nothing_is_sent(all_by_rank: list[dict[str, Round]]) -> None:
    for rounds in all_by_rank:
        assert (rounds["none"].read, rounds["none"].skipped) == (0, rounds["first"].read)


def test_loaded_weights_are_sent(by_rank: list[dict[str, Round]]) -> None:
    assert all(rounds["loaded"].skipped == 0 for rounds in by_rank)


def test_kept_weights_compute_the_same_as_sent_ones(all_by_rank: list[dict[str, Round]]) -> None:
    for rounds in all_by_rank:
        for stayed in ("another", "none"):
            for logprobs, expected in zip(rounds[stayed].logprobs, rounds["forgotten"].logprobs, strict=True):
                assert torch.equal(logprobs, expected)
