"""Every family cut over ranks, and those that differ in every other kind of vLLM's layouts: traced, filled, bitwise
vLLM's own load, and as computed without vLLM.

One launch for each number of ranks, one call for each layout; see scenarios/layouts.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.backends.vllm.scenarios import layouts
from tests.hybrid_engine.backends.vllm.scenarios.layouts import Case, Outcome
from tests.zoo.families import SERVED_VARIANTS

WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
STAGED = ("llama", "llama tied", "qwen3", "glm", "glm4", "gemma2", "gpt2", *WITH_EXPERTS)
WHOLE = ("llama", "llama vocabulary without padding", "qwen2 tied", "glm", "gemma3", "gpt2", "deepseek_v3")
FIVE_LAYERS = {"num_hidden_layers": 5}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
SIX_LATENT_HEADS = {**SIX_HEADS, "num_key_value_heads": 6, "moe_intermediate_size": 48}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WHOLE_VOCABULARY, HALF = (130, 192), (34, 96)

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


assert all(len({case.name for case in cases}) == len(cases) for cases in CASES.values())

ALL = [pytest.param(num_ranks, case, id=case.name) for num_ranks, cases in CASES.items() for case in cases]
ORDERED = [param for param in ALL if param.values[1].order is not None]

Runs = Callable[[int, Case], list[Outcome]]
"""Number of ranks and case -> by rank, its outcomes."""


@pytest.fixture(scope="module")
def runs(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = str(tmp_path_factory.mktemp("layouts"))

    @functools.cache
    def launched(num_ranks: int) -> Outcomes:
        """By layout."""
        by_layout: dict[str, list[Case]] = {}
        for case in CASES[num_ranks]:
            by_layout.setdefault(case.layout, []).append(case)
        calls = {layout: (layouts.run_cases, (directory, cases)) for layout, cases in by_layout.items()}
        return engines.launch_in_turn(num_ranks, calls)

    return lambda num_ranks, case: [found[case.name] for found in launched(num_ranks)[case.layout]]


@pytest.fixture
def by_rank(runs: Runs, num_ranks: int, case: Case) -> list[Outcome]:
    """The outcomes of one case."""
    return runs(num_ranks, case)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_every_parameter_is_bitwise_a_native_load(by_rank: list[Outcome]) -> None:
    assert all(outcome.differences == [] and len(outcome.digests) > 5 for outcome in by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_every_tensor_is_traced_and_every_group_committed(by_rank: list[Outcome]) -> None:
    assert all(outcome.staged == () and outcome.is_ready for outcome in by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_the_computed_layout_is_the_traced_one(by_rank: list[Outcome]) -> None:
    assert all(outcome.misplaced == [] and outcome.num_tensors > 5 for outcome in by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), [param for param in ALL if param.values[1].is_in_place])
def test_what_is_derived_in_place_is_that_of_a_native_load(by_rank: list[Outcome], case: Case) -> None:
    """In every tensor that the model computes with, wherever vLLM keeps it."""
    for outcome in by_rank:
        assert outcome.renewed is not None
        assert outcome.renewed.moved == outcome.renewed.differences == []
        assert bool(outcome.renewed.derived) == (case.family in WITH_EXPERTS)


@pytest.mark.parametrize(("num_ranks", "case"), ORDERED)
def test_another_order_gives_each_rank_what_its_position_has_in_sequence(
    runs: Runs, by_rank: list[Outcome], num_ranks: int, case: Case
) -> None:
    (sequential,) = [other for other in CASES[num_ranks] if other.is_reordered(case)]
    in_sequence = runs(num_ranks, sequential)
    assert [by_rank[rank].position for rank in case.order or ()] == list(range(num_ranks))
    assert all(outcome.digests == in_sequence[outcome.position].digests for outcome in by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_what_is_never_read_belongs_to_others_or_to_nobody(by_rank: list[Outcome], case: Case) -> None:
    """Over all ranks every tensor of the checkpoint is read, but for the layer that predicts further tokens."""
    unread = frozenset.intersection(*(outcome.unread for outcome in by_rank))
    assert all(name.startswith(f"model.layers.{case.model['num_hidden_layers']}.") for name in unread)
    assert bool(unread) == ("deepseek_v3" in case.family)


@pytest.mark.parametrize(
    ("case", "rank", "rows"),
    [
        (Case("llama", tp=2), 0, {}),
        (Case("llama", tp=2), 1, {EMBEDDING: HALF, HEAD: HALF}),
        (Case("llama tied", tp=2), 1, {EMBEDDING: HALF}),
        (Case("llama", dp=2), 0, {EMBEDDING: WHOLE_VOCABULARY, HEAD: WHOLE_VOCABULARY}),
        (Case("llama vocabulary without padding", dp=2), 0, {}),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_vocabulary_padding_is_declared(runs: Runs, case: Case, rank: int, rows: dict[str, tuple[int, int]]) -> None:
    """130 words are padded to 192 rows of 64: 62 rows at TP=1; at TP=2 rank 0 has 96 words, rank 1 34 and 62 rows."""
    expected = {name: [(first * 64, last * 64)] for name, (first, last) in rows.items()}
    assert runs(2, case)[rank].padding == expected
