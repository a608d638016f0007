"""Megatron models without a name table, attached to vLLM on two ranks."""

from __future__ import annotations

from typing import Any

from tests.harness.launch import Ranks


def attach_and_switch() -> list[dict[str, Any]]:
    from tests.hybrid_engine.end_to_end.derived_megatron import switched

    return switched()


def attach_what_does_not_fit() -> dict[str, Any]:
    from tests.hybrid_engine.end_to_end.derived_megatron import refused

    return refused()


def test_vllm_generates_what_transformers_does_with_megatrons_weights(engines: Ranks) -> None:
    for results in engines.launch(attach_and_switch, 2):
        for result in results:
            assert result["vllm"] == result["transformers"], result
            received, least = result["bytes"]
            assert received == least, result
            assert result["is read again"], result
            assert len({*result["vllm"][0], *result["vllm"][1]}) > 2, "too uniform to compare"


def test_other_computations_and_sizes_are_refused(engines: Ranks) -> None:
    for results in engines.launch(attach_what_does_not_fit, 2):
        assert "rotary frequencies is 16 for the trainer and 8 for vLLM" in results["other rotation"]
        assert "vLLM does not compute what the trainer computes" in results["other experts"]
        assert results["other sizes"] == [("TransformerConfig.num_query_groups", "computes-otherwise")]
        assert results["unchecked"] == [("generate_config.check_compute", "needs-check")]
