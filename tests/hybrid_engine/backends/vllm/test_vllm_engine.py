"""The colocated vLLM, for real: bitwise what vLLM loads itself, and well-behaved in a process that is not its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.launch import Ranks, remembered
from tests.hybrid_engine.backends.vllm import vllm_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DECODED = ("gemma2", "deepseek_v2", "deepseek_v3")
"""Families whose attention vLLM computes with other kernels than the rest; all are in the matrix."""


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[Any]]]:
    """Number of ranks -> by name, what everything that runs on so many ranks brought back; launched once."""
    directory = str(tmp_path_factory.mktemp("vllm"))
    calls: dict[int, dict[str, Any]] = {
        1: {
            "samplings": (vllm_ranks.samplings, ()),
            "memory": (vllm_ranks.memory, (directory,)),
            "cycles": (vllm_ranks.cycles, (directory, 1)),
        },
        2: {
            # first, for vLLM changes the classes of models that it takes from transformers
            "oracle": (vllm_ranks.transformers_oracle, (directory, 2, DECODED)),
            "cycles": (vllm_ranks.cycles, (directory, 2)),
            "replicas": (vllm_ranks.replicas, (directory,)),
            "quantised": (vllm_ranks.quantised, (directory, 2)),
        },
        4: {"orders": (vllm_ranks.orders, (directory, [None, (0, 2, 1, 3)]))},
    }
    return remembered(lambda num_ranks: engines.launch_in_turn(num_ranks, calls[num_ranks], timeout=600))


@pytest.mark.parametrize("num_tp", [1, 2])
def test_switches_release_and_a_process_left_as_it_was(outcomes: Callable[[int], Any], num_tp: int) -> None:
    results = outcomes(num_tp)["cycles"]
    for rank, result in enumerate(results):
        assert result["tp_rank"] == num_tp - 1 - rank
        assert result["differences"] == []
        assert result["answers"] == result["native"]
        assert result["answers after release"] == result["answers"]
        assert result["sample"] == result["sample again"] == results[0]["sample"]
        assert len({tuple(tokens) for tokens in result["sample"][0]}) == 2, "both completions of a prompt are the same"
        assert result["empty"] == []
        resident, total, released = result["memory"]
        assert resident == total > 0 and released == 0
        assert result["random state kept"] and result["process as before"]
        assert result["shared with a name"] == [], "it would stay in /dev/shm if all ranks were killed"
        assert result["shared"] == result["shared by computation"]
        never, prompts, gone, uncommitted, partly, shut = result["errors"]
        assert "hold no committed weights" in never and "hold no committed weights" in partly
        assert all(f"prompts[{index}]" in prompts for index in range(3))
        assert "released" in gone and "before they were allocated" in uncommitted and "shut down" in shut


@pytest.mark.parametrize("num_tp", [1, 2])
def test_a_call_that_fails_half_way_leaves_nothing_to_later_ones(outcomes: Callable[[int], Any], num_tp: int) -> None:
    for result in outcomes(num_tp)["cycles"]:
        for place, seen in result["failures"].items():
            assert seen["raised"] == ("KeyboardInterrupt" if place == "Ctrl-C" else "MemoryError"), place
            assert seen["sample"] == result["sample"], f"{place}: another draw than without the failure"
            assert seen["answers"] == result["native"] and seen["long"] == result["long"], place
        left = result["left over"]
        for call in ("generate", "reset_caches", "release"):
            assert "1 unfinished requests (" in left[call] and "abandon_requests()" in left[call]
        assert "2 blocks of the KV cache are in use" in left["blocks"]
        assert "0 results for 3 prompts" in left["none"]


def test_replicas_are_independent_and_no_rank_waits_for_a_failed_one(outcomes: Callable[[int], Any]) -> None:
    first, second = outcomes(2)["replicas"]
    for result in (first, second):
        kinds = {name: kind for name, (kind, _) in result["errors"].items()}
        assert kinds["world"] == "ConfigError" and "world_size: 3, but there are 2" in result["errors"]["world"][1]
        assert kinds["no experts"] == "ConfigError" and "Number of experts" in result["errors"]["no experts"][1]
        assert kinds["unknown"] == "UnknownModelError"
        assert kinds["lacking"] == "ParameterMismatchError"
        message = result["errors"]["lacking"][1]
        assert "model.layers.1.self_attn.qkv_proj.weight: a vLLM parameter without a source" in message
        assert "fill 12288 " in message and "of its 16384 elements" in message
        _check_answers(result)
    assert first["errors"]["one rank"][0] == "RemoteError" and "rank 1" in first["errors"]["one rank"][1]
    assert second["errors"]["one rank"][0] in ("ModelError", "ParameterMismatchError")
    assert (first["place"], second["place"]) == ((0, 0, 0), (1, 0, 0))
    assert first["counts"] == [1, 1] and second["counts"] == [3, 3]
    assert (first["none on rank 1"], second["none on rank 1"]) == (3, 0)
    assert first["sample"] != second["sample"], "replicas drew the same answers"
    assert first["over replicas"] == ("RemoteError", True) and second["over replicas"] == ("ReshardError", True)
    assert first["seeded"] == second["seeded"]
    for taken, message in (*first["refused"], *second["refused"]):
        assert taken and "on CPU loads but cannot generate" in message


def test_replicas_over_interleaved_ranks_answer_as_over_consecutive_ones(outcomes: Callable[[int], Any]) -> None:
    by_rank = outcomes(4)["orders"]
    assert [result[0]["place"] for result in by_rank] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [result[1]["place"] for result in by_rank] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(each["answers"] == by_rank[0][0]["answers"] for result in by_rank for each in result)


def test_quantised_weights_are_those_of_vllms_own_load_and_what_cannot_be_fed_is_refused(
    outcomes: Callable[[int], Any],
) -> None:
    for result in outcomes(2)["quantised"]:
        completions, _ = result["fp8_per_channel"]
        assert [row[0] for row in completions] == result["native"]
        assert result["fp8_per_channel"] == result["fp8_per_channel again"] != result["None"]
        assert result["None"] == result["None again"]
        assert result["fp8_per_channel dtype"] == "torch.float8_e4m3fn" and result["None dtype"] == "torch.bfloat16"
        for name in ("fp8_per_channel", "None"):
            assert result[f"{name} differences"] == [] and result[f"{name} released"] == 0
        errors = result["errors"]
        assert errors["fp8"][0] == errors["no such"][0] == "ConfigError"
        assert "'fp8' on cpu" in errors["fp8"][1] and "Use 'fp8_per_channel', or leave it out" in errors["fp8"][1]
        kind, message = errors["fp8_per_channel"]  # of the model with experts
        assert kind == "ModelError" and "Fp8PtpcOnlineMoEMethod on cpu" in message


def _check_answers(result: dict[str, Any]) -> None:
    stopped = result["stopped"]
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == len(stopped.logprobs) == 1
    assert all(len(tokens) == 6 for tokens in result["sample"])


def test_what_is_computed_while_decoding_is_what_transformers_computes(outcomes: Callable[[int], Any]) -> None:
    """Of prompts the matrix sees the same for all families."""
    for result in outcomes(2)["oracle"]:
        assert set(result) == set(DECODED)
        assert max(result.values()) < 5e-5, result  # float32; log-probabilities are around -5


def test_vllm_takes_whatever_a_sampling_can_be(outcomes: Callable[[int], Any]) -> None:
    assert outcomes(1)["samplings"] == [1153]


def test_released_weights_leave_memory_and_switches_do_not_pile_up(outcomes: Callable[[int], Any]) -> None:
    (result,) = outcomes(1)["memory"]
    for released, committed in zip(result["released"], result["committed"], strict=True):
        assert committed - released > 0.9 * result["weights"], result
    # On CPU vLLM keeps embedding and head twice; beyond that a module or two may linger in the allocator.
    assert max(result["committed"]) - min(result["released"]) < 1.5 * result["weights"], result
    assert result["committed"][-1] - result["committed"][0] < 0.2 * result["weights"], result
