"""The colocated vLLM, for real: bitwise what vLLM loads itself, and well-behaved in a process that is not its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hybrid_engine import vllm_ranks
from tests.launch import launch

pytest.importorskip("vllm")


@pytest.mark.parametrize("num_tp", [1, 2])
def test_every_model_is_bitwise_a_native_load(tmp_path: Path, num_tp: int) -> None:
    by_rank = launch(vllm_ranks.model_matrix, num_tp, str(tmp_path), num_tp)
    for rank, results in enumerate(by_rank):
        assert list(results) == list(vllm_ranks.MATRIX)
        for name, result in results.items():
            where = f"{name}, rank {rank}"
            assert result["differences"] == [], where
            assert result["ready"] and result["staged"] == (), where
            # Only other ranks' experts are never read.
            assert bool(result["unread"]) == ("whole experts" in name and num_tp > 1), where
    # 130 words are padded to 192 rows of 64: 62 rows at TP=1; at TP=2 rank 0 has 96 words, rank 1 34 and 62 rows.
    padding = {"model.embed_tokens.weight", "lm_head.weight"}
    last = [(130 * 64, 192 * 64)] if num_tp == 1 else [(34 * 64, 96 * 64)]
    assert by_rank[-1]["llama"]["padding"] == dict.fromkeys(padding, last)
    assert by_rank[-1]["llama tied"]["padding"] == {"model.embed_tokens.weight": last}
    assert by_rank[0]["llama vocabulary without padding"]["padding"] == {}
    if num_tp == 2:
        assert by_rank[0]["llama"]["padding"] == {}


@pytest.mark.parametrize("num_tp", [1, 2])
def test_switches_release_and_a_process_left_as_it_was(tmp_path: Path, num_tp: int) -> None:
    results = launch(vllm_ranks.cycles, num_tp, str(tmp_path), num_tp)
    for result in results:
        assert result["differences"] == []
        assert result["answers"] == result["native"]
        assert result["answers after release"] == result["answers"]
        assert result["sample"] == result["sample again"] == results[0]["sample"]
        assert len({tuple(tokens) for tokens in result["sample"][0]}) == 2, "both completions of a prompt are the same"
        assert result["empty"] == []
        resident, released = result["memory"]
        assert resident["weights"] == resident["weights_total"] > 0 and released["weights"] == 0
        assert result["random state kept"] and result["process as before"]
        assert result["left in shm"] == []
        never, prompts, gone, uncommitted, partly, shut = result["errors"]
        assert "hold no committed weights" in never and "hold no committed weights" in partly
        assert all(f"prompts[{index}]" in prompts for index in range(3))
        assert "released" in gone and "before they were allocated" in uncommitted and "shut down" in shut


def test_replicas_are_independent_and_no_rank_waits_for_a_failed_one(tmp_path: Path) -> None:
    first, second = launch(vllm_ranks.replicas, 2, str(tmp_path))
    for result in (first, second):
        kinds = {name: kind for name, (kind, _) in result["errors"].items()}
        assert kinds["world"] == "ConfigError" and "3 x 1 x 1 = 3, but there are 2" in result["errors"]["world"][1]
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
    assert first["seeded"] == second["seeded"]


def _check_answers(result: dict[str, Any]) -> None:
    stopped = result["stopped"]
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == len(stopped.logprobs) == 1
    assert all(len(tokens) == 6 for tokens in result["sample"])


def test_log_probabilities_are_those_of_transformers_and_staged_tensors_arrive(tmp_path: Path) -> None:
    (result,) = launch(vllm_ranks.transformers_oracle, 1, str(tmp_path))
    assert result.pop("staged") == 0
    assert set(result) == {"QWEN3", "QWEN2"}
    assert max(result.values()) < 2e-4, result  # float32; log-probabilities are around -5


def test_released_weights_leave_memory_and_switches_do_not_pile_up(tmp_path: Path) -> None:
    (result,) = launch(vllm_ranks.memory, 1, str(tmp_path))
    for released, committed in zip(result["released"], result["committed"], strict=True):
        assert committed - released > 0.9 * result["weights"], result
    # On CPU vLLM keeps embedding and head twice; beyond that a module or two may linger in the allocator.
    assert max(result["committed"]) - min(result["released"]) < 1.5 * result["weights"], result
    assert result["committed"][-1] - result["committed"][0] < 0.2 * result["weights"], result
