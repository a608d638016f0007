"""Incremental switches with real engines: frozen weights are sent once, and vLLM is always
right."""

from __future__ import annotations

import pytest
import torch

from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.end_to_end import incremental_rounds
from tests.hybrid_engine.end_to_end.incremental_rounds import MEGABYTES, Round
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EMBEDDING_NBYTES = 528 * 128 * 4
FROZEN_NBYTES = 2 * EMBEDDING_NBYTES
"""Bytes of embedding and head."""


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


def test_frozen_weights_are_sent_once(by_rank: list[dict[str, Round]]) -> None:
    for rounds in by_rank:
        first = rounds["first"]
        step = rounds["step"]
        another = rounds["another"]
        assert (first.skipped, step.skipped) == (0, another.skipped)
        assert step.read == another.read == first.read - step.skipped


def test_only_frozen_weights_are_skipped(by_rank: list[dict[str, Round]]) -> None:
    for name in ("step", "another"):
        assert sum(rounds[name].skipped for rounds in by_rank) == FROZEN_NBYTES


def test_the_base_of_adapters_is_sent_once(outcomes: Outcomes) -> None:
    for rounds in outcomes["adapters"]:
        first = rounds["first"]
        step = rounds["step"]
        another = rounds["another"]
        assert step.skipped == another.skipped == first.read - step.read > 4 * step.read
        assert step.read == another.read > 0


def test_without_a_step_nothing_is_sent(all_by_rank: list[dict[str, Round]]) -> None:
    for rounds in all_by_rank:
        assert (rounds["none"].read, rounds["none"].skipped) == (0, rounds["first"].read)


def test_written_weights_are_sent(by_rank: list[dict[str, Round]]) -> None:
    for rounds in by_rank:
        assert rounds["forgotten"].skipped == 0
        for name in ("written", "unfrozen"):
            assert rounds[name].read > 0, name


def test_loaded_weights_are_sent(by_rank: list[dict[str, Round]]) -> None:
    assert all(rounds["loaded"].skipped == 0 for rounds in by_rank)


def test_received_bytes_are_minimal(all_by_rank: list[dict[str, Round]]) -> None:
    for rounds in all_by_rank:
        assert {name: result.surplus for name, result in rounds.items() if result.surplus} == {}


def test_kept_bytes_are_bounded(by_rank: list[dict[str, Round]]) -> None:
    for rounds in by_rank:
        assert rounds["first"].kept == 0
        assert 0 < rounds["none"].kept <= MEGABYTES * 1024**2


def test_kept_weights_compute_the_same_as_sent_ones(all_by_rank: list[dict[str, Round]]) -> None:
    for rounds in all_by_rank:
        for stayed in ("another", "none"):
            for logprobs, expected in zip(rounds[stayed].logprobs, rounds["forgotten"].logprobs, strict=True):
                assert torch.equal(logprobs, expected)
