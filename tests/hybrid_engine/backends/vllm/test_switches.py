"""Switches on a real vLLM, alone and over two ranks: bitwise what vLLM loads itself, in a process not its own."""

from __future__ import annotations

import pytest

from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm.scenarios import cycles
from tests.hybrid_engine.backends.vllm.scenarios.cycles import Cycles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLACES = ("adding", "step", "forward", "sampling", "bookkeeping", "Ctrl-C")


@pytest.fixture(scope="module", params=[1, 2])
def by_rank(engines: Ranks, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Cycles]:
    """What each rank of one, and of two, brought back."""
    return engines.launch(cycles.run, request.param, str(tmp_path_factory.mktemp("cycles")), request.param, timeout=600)


def test_weights_are_bitwise_those_of_a_native_load(by_rank: list[Cycles]) -> None:
    assert all(result.differences == [] for result in by_rank)


def test_answers_are_those_of_a_natively_loaded_engine(by_rank: list[Cycles]) -> None:
    assert all(result.answers == result.native for result in by_rank)


def test_answers_are_the_same_after_a_release_and_another_switch(by_rank: list[Cycles]) -> None:
    assert all(result.answers_again == result.native for result in by_rank)


def test_ranks_take_the_shards_that_the_order_gives_them(by_rank: list[Cycles]) -> None:
    assert [result.tp_rank for result in by_rank] == list(reversed(range(len(by_rank))))


def test_one_seed_draws_the_same_again_and_on_every_rank(by_rank: list[Cycles]) -> None:
    assert all(result.drawn == result.drawn_again == by_rank[0].drawn for result in by_rank)


def test_completions_of_one_prompt_differ(by_rank: list[Cycles]) -> None:
    assert len(set(by_rank[0].drawn[0])) == 2


def test_no_prompts_have_no_completions(by_rank: list[Cycles]) -> None:
    assert all(result.empty == [] for result in by_rank)


def test_all_weights_are_in_memory_after_a_switch_and_none_after_a_release(by_rank: list[Cycles]) -> None:
    for result in by_rank:
        assert result.memory.resident == result.memory.total > 0
        assert result.memory.released == 0


def test_ranks_do_not_wait_for_each_other_in_commits(by_rank: list[Cycles]) -> None:
    """None of vLLM's processing on CPU communicates; see test_collective_processing.py."""
    assert not any(result.is_collective for result in by_rank)


def test_training_draws_as_if_there_were_no_vllm(by_rank: list[Cycles]) -> None:
    assert all(result.random_state_kept for result in by_rank)


def test_the_process_is_left_as_it_was(by_rank: list[Cycles]) -> None:
    assert all(result.process_as_before for result in by_rank)


def test_shared_memory_has_no_name(by_rank: list[Cycles]) -> None:
    """It would stay in /dev/shm if all ranks were killed."""
    assert all(result.shared.named == [] for result in by_rank)


def test_shared_memory_is_as_large_as_was_computed(by_rank: list[Cycles]) -> None:
    assert all(result.shared.nbytes == result.shared.computed for result in by_rank)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ("never_filled", "StateError", "hold no committed weights"),
        ("partly_filled", "StateError", "hold no committed weights"),
        ("released", "StateError", "are released"),
        ("not_allocated", "StateError", "before they were allocated"),
        ("shut_down", "StateError", "was shut down"),
        ("other_thread", "StateError", "another thread is generating"),
        *(("prompts", "ArgumentError", f"prompts[{index}]") for index in range(3)),
    ],
)
def test_a_call_that_cannot_be_answered_says_why(by_rank: list[Cycles], call: str, kind: str, message: str) -> None:
    for result in by_rank:
        refusal = getattr(result.refused, call)
        assert refusal.kind == kind
        assert message in refusal.message


@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_fails_half_way_raises_its_error(by_rank: list[Cycles], place: str) -> None:
    expected = "KeyboardInterrupt" if place == "Ctrl-C" else "MemoryError"
    assert [result.failed[place].raised for result in by_rank] == [expected] * len(by_rank)


@pytest.mark.parametrize("place", PLACES)
def test_after_a_failure_the_same_call_draws_what_it_would_have_drawn(by_rank: list[Cycles], place: str) -> None:
    assert all(result.failed[place].drawn == result.drawn for result in by_rank)


@pytest.mark.parametrize("place", PLACES)
def test_after_a_failure_nothing_is_taken_from_blocks_that_were_to_be_computed(
    by_rank: list[Cycles], place: str
) -> None:
    assert all(result.failed[place].long == result.long for result in by_rank)


@pytest.mark.parametrize("place", PLACES)
def test_after_a_failure_answers_are_the_native_ones(by_rank: list[Cycles], place: str) -> None:
    assert all(result.failed[place].answers == result.native for result in by_rank)


@pytest.mark.parametrize("call", ["generate", "reset_caches", "release"])
def test_nothing_goes_on_while_a_foreign_request_is_left(by_rank: list[Cycles], call: str) -> None:
    for result in by_rank:
        message = getattr(result.left_over, call).message
        assert "1 unfinished requests (" in message
        assert "abandon_requests()" in message


def test_caches_that_vllm_does_not_reset_are_an_error(by_rank: list[Cycles]) -> None:
    assert all("2 blocks of the KV cache are in use" in result.left_over.blocks.message for result in by_rank)


def test_missing_results_are_an_error(by_rank: list[Cycles]) -> None:
    assert all("0 results for 3 prompts" in result.left_over.no_results.message for result in by_rank)
