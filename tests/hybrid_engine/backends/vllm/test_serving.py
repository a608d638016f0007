"""What a real vLLM serves: quantised weights, memory over switches, the numbers of transformers."""

from __future__ import annotations

import pytest

from tests.harness.launch import Call, Outcomes, Ranks
from tests.hybrid_engine.backends.vllm.scenarios import serving
from tests.hybrid_engine.backends.vllm.scenarios.serving import Memory, Quantised

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


DECODED = ("gemma2", "deepseek_v2", "deepseek_v3")
"""Families whose attention vLLM computes with other kernels than the rest; all are in the matrix."""


@pytest.fixture(scope="module")
def alone(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """On one rank."""
    directory = str(tmp_path_factory.mktemp("alone"))
    calls: dict[str, Call] = {"samplings": (serving.samplings, ()), "memory": (serving.memory, (directory,))}
    return engines.launch_in_turn(1, calls, timeout=600)


@pytest.fixture(scope="module")
def together(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """On two. Gaps first, for vLLM changes the classes of models that it takes from transformers."""
    directory = str(tmp_path_factory.mktemp("together"))
    calls: dict[str, Call] = {
        "gaps": (serving.gaps_to_transformers, (directory, 2, DECODED)),
        "quantised": (serving.quantised, (directory, 2)),
    }
    return engines.launch_in_turn(2, calls, timeout=600)


@pytest.fixture
def quantised(together: Outcomes) -> list[Quantised]:
    """By rank."""
    return together["quantised"]


@pytest.fixture
def memory(alone: Outcomes) -> Memory:
    return alone["memory"][0]


def test_quantised_answers_are_those_of_vllms_own_quantisation(quantised: list[Quantised]) -> None:
    assert all(result.fp8.answers.completions == result.native for result in quantised)


def test_quantised_answers_differ_from_plain_ones(quantised: list[Quantised]) -> None:
    assert all(result.fp8.answers != result.plain.answers for result in quantised)


def test_answers_are_the_same_after_a_release_and_another_switch(quantised: list[Quantised]) -> None:
    assert all(served.answers == served.answers_again for each in quantised for served in (each.fp8, each.plain))


def test_weights_are_held_in_their_own_dtype(quantised: list[Quantised]) -> None:
    assert all(result.fp8.dtype == "torch.float8_e4m3fn" for result in quantised)
    assert all(result.plain.dtype == "torch.bfloat16" for result in quantised)


def test_before_quantisation_weights_are_bitwise_those_of_a_native_load(quantised: list[Quantised]) -> None:
    assert all(served.differences == [] for each in quantised for served in (each.fp8, each.plain))


def test_quantised_weights_are_released_whole(quantised: list[Quantised]) -> None:
    assert all(served.released_nbytes == 0 for each in quantised for served in (each.fp8, each.plain))


@pytest.mark.parametrize(
    ("attempt", "kind", "message"),
    [
        ("not_fed", "ConfigError", "'fp8' on cpu"),
        ("not_fed", "ConfigError", "Use 'fp8_per_channel', or leave it out"),
        ("unknown", "ConfigError", "'no such' on cpu"),
        ("experts", "ConfigError", "no kernels for such experts"),
    ],
)
def test_what_cannot_be_fed_is_refused(quantised: list[Quantised], attempt: str, kind: str, message: str) -> None:
    for result in quantised:
        refusal = getattr(result, attempt)
        assert refusal.kind == kind
        assert message in refusal.message


@pytest.mark.parametrize("family", DECODED)
def test_what_is_computed_while_decoding_is_what_transformers_computes(together: Outcomes, family: str) -> None:
    """Of prompts the matrix sees the same for all families."""
    for gaps in together["gaps"]:
        assert gaps[family] < 5e-5  # float32; log-probabilities are around -5


def test_vllm_takes_whatever_a_sampling_can_be(alone: Outcomes) -> None:
    assert alone["samplings"] == [1163]


def test_released_weights_leave_memory(memory: Memory) -> None:
    for released, committed in zip(memory.released, memory.committed, strict=True):
        assert committed - released > 0.9 * memory.weights, memory


def test_a_switch_takes_little_more_memory_than_the_weights(memory: Memory) -> None:
    """On CPU vLLM keeps embedding and head twice; beyond that a module or two may linger in the allocator."""
    assert max(memory.committed) - min(memory.released) < 1.5 * memory.weights, memory


def test_memory_does_not_pile_up_over_switches(memory: Memory) -> None:
    assert memory.committed[-1] - memory.committed[0] < 0.2 * memory.weights, memory


def test_nan_is_no_answer(memory: Memory) -> None:
    assert [each.kind for each in memory.nan] == ["GenerationError"] * 2
    assert "vLLM computed NaN" in memory.nan[0].message


def test_torchs_settings_stay_those_of_training(memory: Memory) -> None:
    before, built, answered = memory.settings
    assert before == built == answered
    assert (before.matmul_precision, before.num_threads) == ("high", 2)
