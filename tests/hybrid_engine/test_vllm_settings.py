"""Settings that cannot be: refused where they are made, with what can be instead; and who takes which place."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_engine.backends.vllm.settings import InferenceSettings, Place
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
