"""Two replicas are independent, and no rank waits for one that failed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm.scenarios import replicas
from tests.hybrid_engine.backends.vllm.scenarios.replicas import Ordered, Replica

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Pair(NamedTuple):
    """What the ranks of the two replicas brought back."""

    first: Replica
    second: Replica


@pytest.fixture(scope="module")
def pair(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*engines.launch(replicas.run, 2, str(tmp_path_factory.mktemp("replicas")), timeout=600))


@pytest.fixture(scope="module")
def orders(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[list[Ordered]]:
    """Of four ranks: in order, and with the middle ones exchanged."""
    directory = str(tmp_path_factory.mktemp("orders"))
    return engines.launch(replicas.orders, 4, directory, [None, (0, 2, 1, 3)], timeout=600)


@pytest.mark.parametrize(
    ("attempt", "kind", "message"),
    [
        ("world", "ConfigError", "1 x 1 x 3 = 3, but the job has 2 ranks"),
        ("no_experts", "ConfigError", "Number of experts"),
        ("unknown", "UnknownModelError", "NoSuchModel"),
        ("lacking", "ParameterMismatchError", "layers.1.self_attn.qkv_proj.weight: a vLLM parameter without a source"),
        ("lacking", "ParameterMismatchError", "fill 12288 "),
        ("lacking", "ParameterMismatchError", "of its 16384 elements"),
    ],
)
def test_engines_that_cannot_be_are_refused_on_every_rank(pair: Pair, attempt: str, kind: str, message: str) -> None:
    for result in pair:
        refusal = getattr(result.not_built, attempt)
        assert refusal.kind == kind
        assert message in refusal.message


def test_a_fault_of_one_rank_reaches_the_other(pair: Pair) -> None:
    assert pair.second.not_built.one_rank.kind in ("ModelError", "ParameterMismatchError")
    assert pair.first.not_built.one_rank.kind == "RemoteError"
    assert "rank 1" in pair.first.not_built.one_rank.message


def test_places_count_replicas(pair: Pair) -> None:
    assert [result.place for result in pair] == [(0, 0, 0), (1, 0, 0)]


def test_replicas_may_have_unequal_numbers_of_prompts(pair: Pair) -> None:
    assert [result.num_completed for result in pair] == [[1, 1], [3, 3]]


def test_a_replica_may_have_no_prompts(pair: Pair) -> None:
    assert [result.num_completed_alone for result in pair] == [3, 0]


def test_replicas_draw_differently(pair: Pair) -> None:
    assert pair.first.drawn != pair.second.drawn
    assert all(len(tokens) == 6 for result in pair for tokens in result.drawn)


def test_a_request_with_a_seed_draws_the_same_in_every_replica(pair: Pair) -> None:
    assert pair.first.seeded == pair.second.seeded


def test_a_failure_of_one_replica_ends_the_call_of_all(pair: Pair) -> None:
    assert [result.raised for result in pair] == ["RemoteError", "GenerationError"]


def test_after_a_failure_of_one_replica_all_draw_as_if_there_had_been_none(pair: Pair) -> None:
    assert all(result.draws_as_before for result in pair)


def test_a_stop_token_ends_a_completion_which_keeps_it(pair: Pair) -> None:
    for result in pair:
        assert result.stopped.finish_reason == "stop"
        assert len(result.stopped.token_ids) == len(result.stopped.logprobs) == 1


def test_pipelines_and_experts_take_weights_but_do_not_generate_on_a_cpu(pair: Pair) -> None:
    for result in pair:
        assert all(one.took_weights for one in result.cannot_generate)
        assert all("on CPU loads but cannot generate" in one.refusal.message for one in result.cannot_generate)


def test_an_order_of_ranks_says_who_takes_which_place(orders: list[list[Ordered]]) -> None:
    places = [[(result.dp_rank, result.tp_rank) for result in by_rank] for by_rank in zip(*orders, strict=True)]
    assert places == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (1, 0), (0, 1), (1, 1)]]


def test_answers_do_not_depend_on_the_order_of_ranks(orders: list[list[Ordered]]) -> None:
    assert all(result.answers == orders[0][0].answers for results in orders for result in results)


def test_all_ranks_of_a_replica_complete_the_prompts_of_each(orders: list[list[Ordered]]) -> None:
    """The ranks have none, one, two and three prompts of their own; with global data all have the same three."""
    for rank, results in enumerate(orders):
        for result in results:
            whole = [[one.token_ids] for one in result.answers.completions]
            assert result.local == whole[:rank]
            assert result.over_replicas == whole
