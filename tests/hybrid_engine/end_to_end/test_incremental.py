"""Only what changed, with real engines: what is frozen goes to vLLM once, and all is right after every switch."""

from __future__ import annotations

import pytest
import torch

from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.end_to_end import incremental_rounds
from tests.hybrid_engine.end_to_end.incremental_rounds import MEGABYTES, Round
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EMBEDDING_NBYTES = 528 * 128 * 4
FROZEN_NBYTES = {"fsdp": 2 * EMBEDDING_NBYTES, "megatron": EMBEDDING_NBYTES}
"""By trainer: embedding and head, or the embedding alone."""
TRAINERS = tuple(FROZEN_NBYTES)


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("incremental")
    # 528 rows of 128 in float32: 0.27 MB each for embedding and head; the 4 layers have 0.5 MB
    models = [workers.write_model(directory / name, "qwen3", vocab_size=528) for name in TRAINERS]
    return engines.launch_in_turn(
        2,
        {
            "megatron": (incremental_rounds.with_megatron, (models[1], directory)),
            "adapters": (incremental_rounds.with_adapters, (models[1], directory)),
            "fsdp": (incremental_rounds.with_fsdp, (models[0],)),
        },
        timeout=500,
    )


@pytest.fixture(params=TRAINERS)
def by_rank(request: pytest.FixtureRequest, outcomes: Outcomes) -> list[dict[str, Round]]:
    return outcomes[request.param]


@pytest.fixture(params=(*TRAINERS, "adapters"))
def all_by_rank(request: pytest.FixtureRequest, outcomes: Outcomes) -> list[dict[str, Round]]:
    return outcomes[request.param]


def test_vllm_has_the_bits_of_its_own_load_after_every_switch(all_by_rank: list[dict[str, Round]]) -> None:
    assert [(name, each.different) for found in all_by_rank for name, each in found.items() if each.different] == []


def test_what_is_frozen_is_sent_once(by_rank: list[dict[str, Round]]) -> None:
    for found in by_rank:
        first, step, another = found["first"], found["step"], found["another"]
        assert (first.skipped, step.skipped) == (0, another.skipped)
        assert step.read == another.read == first.read - step.skipped


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_skipped_is_what_is_frozen(outcomes: Outcomes, trainer: str) -> None:
    for name in ("step", "another"):
        assert sum(found[name].skipped for found in outcomes[trainer]) == FROZEN_NBYTES[trainer]


def test_the_base_under_adapters_goes_once(outcomes: Outcomes) -> None:
    for found in outcomes["adapters"]:
        first, step, another = found["first"], found["step"], found["another"]
        assert step.skipped == another.skipped == first.read - step.read > 4 * step.read
        assert step.read == another.read > 0


def test_without_a_step_nothing_is_sent(all_by_rank: list[dict[str, Round]]) -> None:
    for found in all_by_rank:
        assert (found["none"].read, found["none"].skipped) == (0, found["first"].read)


def test_what_is_written_is_sent(by_rank: list[dict[str, Round]]) -> None:
    for found in by_rank:
        assert found["forgotten"].skipped == 0
        for name in ("written", "unfrozen"):
            assert found[name].read > 0, name


def test_what_is_loaded_is_sent_if_it_is_something_else(outcomes: Outcomes) -> None:
    assert all(found["loaded"].skipped == 0 for found in outcomes["fsdp"])
    assert all(found["loaded"].read == 0 for found in outcomes["megatron"])  # what was saved just before


def test_the_fewest_bytes_are_received(all_by_rank: list[dict[str, Round]]) -> None:
    assert {name: each.surplus for found in all_by_rank for name, each in found.items() if each.surplus} == {}


def test_no_more_stays_than_the_bound(by_rank: list[dict[str, Round]]) -> None:
    for found in by_rank:
        assert found["first"].kept == 0
        assert 0 < found["none"].kept <= MEGABYTES * 1024**2


def test_vllm_computes_with_what_stayed_as_with_what_is_sent_anew(all_by_rank: list[dict[str, Round]]) -> None:
    for found in all_by_rank:
        for stayed in ("another", "none"):
            for one, other in zip(found[stayed].logprobs, found["forgotten"].logprobs, strict=True):
                assert torch.equal(one, other)
