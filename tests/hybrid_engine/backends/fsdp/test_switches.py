"""FSDP2 -> vLLM: families, layouts and casts, each over several switches with training steps between, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.backends.fsdp import switching
from tests.hybrid_engine.backends.fsdp.switching import Case, Switched

TP2 = {"infer_tensor_parallel_size": 2}
PP2 = {"infer_pipeline_parallel_size": 2}
TP2_EP2 = {**TP2, "infer_expert_parallel_size": 2}
DP2_EP2 = {"infer_data_parallel_size": 2, "infer_expert_parallel_size": 2}
BF16 = {"dtype": "bfloat16"}
CASES = {
    2: [
        Case("llama tied", num_steps=5),
        Case("qwen2 tied", infer=TP2, **BF16),
        Case("gemma2", infer=TP2, shard={"reshard_after_forward": False}),
        Case("gpt2", infer=PP2),
        Case("qwen3_moe", infer=TP2_EP2),
        Case("mixtral", infer=DP2_EP2, **BF16),
        Case("deepseek_v3", infer=TP2),
    ],
    3: [Case("qwen3"), Case("qwen3_moe", **BF16)],  # neither the vocabulary nor the experts split evenly
    4: [
        Case("llama", replicas=2, infer=TP2, num_steps=5),
        Case("qwen3_moe", infer={**TP2, "infer_expert_parallel_size": 4}),
        Case("deepseek_v3", replicas=2, infer={**TP2, **PP2}, **BF16),
        Case("llama", tensor_parallel=True, infer=TP2),
    ],
}
ALL = [pytest.param(num_ranks, case, id=case.name) for num_ranks, cases in CASES.items() for case in cases]
PLANNED = [each for each in ALL if not each.values[1].tensor_parallel]  # the command line knows no meshes of users'

Runs = Callable[[int], Outcomes]
"""Number of ranks -> under "cases", by rank, what became of each."""


@pytest.fixture(scope="module")
def runs(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = str(tmp_path_factory.mktemp("fsdp"))

    @functools.cache
    def launched(num_ranks: int) -> Outcomes:
        return engines.launch_in_turn(num_ranks, {"cases": (switching.run_cases, (directory, CASES[num_ranks]))})

    return launched


@pytest.fixture
def by_rank(runs: Runs, num_ranks: int, case: Case) -> list[Switched]:
    return [switched[case.name] for switched in runs(num_ranks)["cases"]]


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_vllm_has_the_bits_of_its_own_load(by_rank: list[Switched], case: Case) -> None:
    for switched in by_rank:
        assert switched.different == []
        assert switched.num_compared > 5 * case.num_steps


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_the_fewest_bytes_are_sent(by_rank: list[Switched]) -> None:
    assert sum(switched.received for switched in by_rank) == sum(switched.least for switched in by_rank) > 0


@pytest.mark.parametrize(("num_ranks", "case"), PLANNED)
def test_the_plan_of_the_command_line_is_the_one_that_runs(by_rank: list[Switched]) -> None:
    for switched in by_rank:
        assert switched.misplaced == []
        assert switched.received == switched.planned
        if switched.elastic > 0.99:  # FSDP2 pads other parts, which shows in such small models
            assert switched.memory == pytest.approx(switched.planned_memory, rel=0.02)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_training_is_as_without_switches(by_rank: list[Switched], case: Case) -> None:
    for switched in by_rank:
        assert switched.changed == []
        assert len(set(switched.losses)) == case.num_steps


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_everything_leaves_the_device_while_vllm_generates(by_rank: list[Switched], num_ranks: int) -> None:
    for switched in by_rank:
        assert switched.offloaded > 0.99
        assert switched.elastic > 0.99 or num_ranks > 2  # all of these models' tensors split evenly over 2 ranks
