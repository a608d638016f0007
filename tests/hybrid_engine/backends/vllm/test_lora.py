"""LoRA from memory on a real vLLM: what it computes is what transformers computes with it merged.

Cut over two ranks; whole ones are in the matrix.
"""

from __future__ import annotations

import pytest

from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm.scenarios import lora
from tests.hybrid_engine.backends.vllm.scenarios.lora import Loras

ATOL = 5e-5  # float32; log-probabilities are around -5


@pytest.fixture(scope="module")
def by_rank(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Loras]:
    return engines.launch(lora.run, 2, str(tmp_path_factory.mktemp("lora")), 2)


@pytest.mark.parametrize(
    "moment",
    [
        "base",
        "policy",
        "judge",
        "policy again",
        "new version",
        "without one",
        "switched base",
        "after a release",
    ],
)
def test_it_computes_what_merged_weights_do(by_rank: list[Loras], moment: str) -> None:
    assert all(result.gaps[moment] < ATOL for result in by_rank)


def test_it_changes_something(by_rank: list[Loras]) -> None:
    assert all(result.far_from_base > 0.1 for result in by_rank)


def test_weights_below_it_are_bitwise_those_of_a_native_load(by_rank: list[Loras]) -> None:
    assert all(result.differences == [] for result in by_rank)


def test_vllms_own_state_is_written_anew_when_its_memory_is_back(by_rank: list[Loras]) -> None:
    assert [result.num_resets for result in by_rank] == [1] * len(by_rank)


def test_nothing_of_the_engine_outlives_its_shutdown(by_rank: list[Loras]) -> None:
    assert [result.left for result in by_rank] == [[]] * len(by_rank)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ("off", "StateError", "vLLM was built without LoRA: set max_loras"),
        ("removed", "StateError", "no LoRA 'judge'; there are: policy"),
        ("removed_twice", "StateError", "no LoRA 'judge'"),
        ("empty", "ConfigError", "it has no tensors"),
        ("lonely", "ConfigError", "down_proj.lora_B.weight is missing"),
        ("misnamed", "ConfigError", "not a base_model.model."),
        ("size", "ConfigError", "is not of rank 4"),
        ("rank", "ConfigError", "64 is more than max_lora_rank 8"),
        ("module", "ConfigError", "down_proj is not in target_modules q_proj"),
        ("experts", "ConfigError", "do not run on CPU"),
        ("gpt2", "ConfigError", "GPT2LMHeadModel takes no LoRA"),
    ],
)
def test_what_cannot_be_is_refused(by_rank: list[Loras], call: str, kind: str, message: str) -> None:
    for result in by_rank:
        refusal = getattr(result.refused, call)
        assert refusal.kind == kind
        assert message in refusal.message
