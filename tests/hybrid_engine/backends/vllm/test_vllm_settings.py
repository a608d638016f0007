"""Settings that cannot be: refused where they are made, with what can be instead; and who takes which place."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_engine.backends.vllm.engine_settings import InferenceSettings, Place, Sampling
from hybrid_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 is not a positive number"),
        ({"dtype": "fp8"}, "dtype: 'fp8' is unknown"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 4, "expert_parallel_size": 3},
            "expert_parallel_size: 3 is not tensor_parallel_size 2 times a divisor of data_parallel_size 4. "
            "Use one of 1, 2, 4, 8",
        ),
        ({"data_parallel_size": 4, "expert_parallel_size": 3}, "Use one of 1, 2, 4"),
        ({"data_parallel_size": 3, "rank_order": (0, 1)}, r"rank_order: (0, 1) is no order of the 3 ranks"),
        ({"data_parallel_size": 2, "rank_order": (1, 1)}, "Name every rank from 0 to 1 once"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceSettings("model", **sizes)
    assert message in str(caught.value)


def test_positions_count_shards_then_stages_then_replicas() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2}
    places = [InferenceSettings("model", **sizes).place_of(rank) for rank in range(12)]
    assert places == [Place(dp * 6 + pp * 2 + tp, tp, pp, dp) for dp in range(2) for pp in range(3) for tp in range(2)]
    order = (5, 3, 1, 0, 2, 4, 11, 10, 9, 8, 7, 6)
    ordered = InferenceSettings("model", rank_order=order, **sizes)
    assert [ordered.place_of(rank) for rank in order] == places


def test_replicas_share_experts_when_more_ranks_do_than_are_in_one() -> None:
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 4}
    shared = {ep: InferenceSettings("model", expert_parallel_size=ep, **sizes) for ep in (1, 2, 4, 8)}
    assert {ep: settings.replicas_per_instance for ep, settings in shared.items()} == {1: 1, 2: 1, 4: 2, 8: 4}


WRONG_SAMPLING: list[dict[str, Any]] = [
    *({"n": value} for value in (0, -1, "n", 1.5, True, 10**6, None)),
    *({"temperature": value} for value in (-1, float("nan"), float("inf"), "hot", 2.5, None, True)),
    *({"top_p": value} for value in (0, 7, float("nan"), "x", None)),
    *({"top_k": value} for value in (-1, 1.5, 2**40, "x")),
    *({"max_tokens": value} for value in ("abc", -5, 0, 2**40, 1.0, None)),
    *({"seed": value} for value in ("x", -1, 2**70, 1.5, False)),
    *({"stop_token_ids": value} for value in (5, "12", [-1], ["x"], [1.5], None, {1: 2}, [2**40])),
    *({key: value} for key in ("logprobs", "ignore_eos") for value in (1, None, "yes")),
    {"n": 2, "temperature": 0.0},
]


@pytest.mark.parametrize("values", WRONG_SAMPLING, ids=str)
def test_sampling_that_cannot_be_is_refused_where_it_is_made(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**values)
    (finding,) = caught.value.findings
    assert finding.key == f"sampling.{next(iter(values))}" and finding.remedy


def test_everything_wrong_with_sampling_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(n="n", temperature=9, top_p=0, top_k="k", max_tokens=0, seed=-1, logprobs=2, stop_token_ids=5)
    assert len(caught.value.findings) == 8
    assert "sampling.max_tokens: 0 is not possible. Use a whole number from 1 to 2147483647" in str(caught.value)


def test_stop_tokens_may_be_a_list() -> None:
    assert Sampling(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
