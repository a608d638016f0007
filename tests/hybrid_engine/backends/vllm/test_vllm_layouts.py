"""Every family cut over ranks, and those that differ in every other kind of vLLM's layouts: traced, filled, bitwise
vLLM's own load, and as computed without vLLM.

One launch for each number of ranks; see vllm_layouts.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm import vllm_layouts
from tests.hybrid_engine.backends.vllm.vllm_layouts import Case
from tests.zoo.families import SERVED_VARIANTS

WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
STAGED = ("llama", "llama tied", "qwen3", "glm", "glm4", "gemma2", "gpt2", *WITH_EXPERTS)
WHOLE = ("llama", "llama vocabulary without padding", "qwen2 tied", "glm", "gemma3", "gpt2", "deepseek_v3")
FIVE_LAYERS = {"num_hidden_layers": 5}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
SIX_LATENT_HEADS = {**SIX_HEADS, "num_key_value_heads": 6, "moe_intermediate_size": 48}

CASES = {
    2: [
        *(Case(family, dp=2) for family in WHOLE),
        *(Case(family, tp=2) for family in SERVED_VARIANTS),
        *(Case(family, pp=2) for family in STAGED),
        *(Case(family, tp=2, ep=2) for family in WITH_EXPERTS),
        *(Case(family, dp=2, ep=2) for family in WITH_EXPERTS),
        Case("llama tied", pp=2, config=FIVE_LAYERS),
        Case("deepseek_v3", pp=2, config=FIVE_LAYERS),
        Case("deepseek_v3", dp=2, ep=2, config={"n_routed_experts": 6, "n_group": 1}),
        Case("qwen3_moe", tp=2, ep=2, config={"num_experts": 5}),
        Case("gpt2", tp=2, order=(1, 0)),
        Case("llama tied", pp=2, config=FIVE_LAYERS, order=(1, 0)),
        Case("deepseek_v3", dp=2, ep=2, order=(1, 0)),
    ],
    3: [
        Case("llama", tp=3, config=SIX_HEADS),
        Case("qwen3_moe", tp=3, config={**SIX_HEADS, "moe_intermediate_size": 48}),
        Case("deepseek_v3", tp=3, config=SIX_LATENT_HEADS),
        Case("llama tied", pp=3, config=FIVE_LAYERS),
    ],
    4: [
        *(Case(family, tp=4) for family in ("llama", "qwen2 tied", "deepseek_v3", "gpt2")),
        *(Case(family, tp=2, dp=2, ep=4) for family in ("qwen3_moe", "deepseek_v3")),
        Case("qwen3_moe", dp=4, ep=2),
        Case("deepseek_v3", tp=2, pp=2, ep=2),
        Case("gemma2", tp=2, pp=2),
        Case("llama", tp=4, order=(2, 0, 3, 1)),
        Case("qwen3_moe", tp=2, dp=2, ep=4, order=(2, 0, 3, 1)),
        Case("qwen3_moe", dp=4, ep=2, order=(0, 2, 1, 3)),
        Case("gemma2", tp=2, pp=2, order=(1, 3, 0, 2)),
    ],
}


@pytest.fixture(scope="module", params=sorted(CASES))
def runs(
    engines: Ranks, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Case], list[Any]]:
    """Cases, and by rank what each gave."""
    cases = CASES[request.param]
    assert len({case.name for case in cases}) == len(cases)
    return cases, engines.launch(vllm_layouts.run_cases, request.param, str(tmp_path_factory.mktemp("layouts")), cases)


def test_every_parameter_is_bitwise_a_native_load_and_nothing_is_staged(runs: tuple[list[Case], list[Any]]) -> None:
    cases, by_rank = runs
    for case in cases:
        for rank, result in enumerate(result[case.name] for result in by_rank):
            where = f"{case.name}, rank {rank}"
            assert result["differences"] == [] and len(result["digests"]) > 5, where
            assert result["ready"] and result["staged"] == (), where


def test_the_computed_layout_is_the_traced_one(runs: tuple[list[Case], list[Any]]) -> None:
    cases, by_rank = runs
    for case in cases:
        for rank, result in enumerate(result[case.name] for result in by_rank):
            assert result["num_tensors"] > 5
            assert result["computed"] == [], f"{case.name}, rank {rank}"


def test_another_order_gives_each_rank_what_its_position_has_in_sequence(runs: tuple[list[Case], list[Any]]) -> None:
    cases, by_rank = runs
    ordered = [case for case in cases if case.order is not None]
    for case in ordered:
        (sequential,) = [other for other in cases if other.is_reordered(case)]
        for position, rank in enumerate(case.order or ()):
            assert by_rank[rank][case.name]["position"] == position
            assert by_rank[rank][case.name]["digests"] == by_rank[position][sequential.name]["digests"], case.name


def test_what_is_never_read_belongs_to_others_or_to_nobody(runs: tuple[list[Case], list[Any]]) -> None:
    """Over all ranks every tensor of the checkpoint is read, but for the layer that predicts further tokens."""
    cases, by_rank = runs
    for case in cases:
        unread = set.intersection(*(set(result[case.name]["unread"]) for result in by_rank))
        assert all(name.startswith(f"model.layers.{case.model['num_hidden_layers']}.") for name in unread), case.name
        assert bool(unread) == ("deepseek_v3" in case.family), case.name


@pytest.mark.parametrize("runs", [2], indirect=True)
def test_vocabulary_padding_is_declared(runs: tuple[list[Case], list[Any]]) -> None:
    """130 words are padded to 192 rows of 64: 62 rows at TP=1; at TP=2 rank 0 has 96 words, rank 1 34 and 62 rows."""
    _, (first, second) = runs
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    whole, half = [(130 * 64, 192 * 64)], [(34 * 64, 96 * 64)]
    assert first[Case("llama", tp=2).name]["padding"] == {}
    assert second[Case("llama", tp=2).name]["padding"] == {embedding: half, head: half}
    assert second[Case("llama tied", tp=2).name]["padding"] == {embedding: half}
    assert first[Case("llama", dp=2).name]["padding"] == {embedding: whole, head: whole}
    assert first[Case("llama vocabulary without padding", dp=2).name]["padding"] == {}
