"""Parallel sizes and their names in each framework."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Annotated, Any, get_type_hints

import pytest

from hybrid_engine.config import ActorConfig, GenerateConfig
from hybrid_engine.config.keys import MAY_CHANGE, Count, Positions, Section, StageLayout
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    Parallelism,
    TrainParallelism,
    named,
    sizes_of,
)
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.megatron_script.script_settings import actor_values
from hybrid_engine.models import table_for
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS

SIDES = [TrainParallelism, InferenceParallelism]


KEY_TYPES: dict[Any, Any] = {
    int: Count,
    int | None: Count | None,
    bool: bool,
    str | None: StageLayout | None,
    tuple[int, ...]: Positions,
}


@pytest.mark.parametrize(
    ("side", "section"), [(TrainParallelism, ActorConfig), (InferenceParallelism, GenerateConfig)]
)
def test_every_size_is_a_key_with_equal_type_and_default(
    side: type[Parallelism], section: type[Section]
) -> None:
    hints = get_type_hints(section, include_extras=True)
    fields = get_type_hints(side)
    for size in sizes_of(side):
        key = section.model_fields[size.key]
        expected = KEY_TYPES[fields[size.name]]
        # Sizes of training may change in a run.
        assert hints[size.key] in (expected, Annotated[expected, MAY_CHANGE]), size.key
        assert key.default == size.default, size.key
        assert (key.description or "").endswith("."), size.key


def test_configurations_and_sizes_convert_into_each_other() -> None:
    train = TrainParallelism(
        16, 2, 4, 2, num_layers_in_first_pipeline_stage=3, noop_layers=(1, 5), expert_tensor=1
    )
    assert ActorConfig(**named(train, "key")).sizes(16) == train
    infer = InferenceParallelism(16, tensor=2, expert=4, rank_order=tuple(range(15, -1, -1)))
    assert (
        replace(GenerateConfig(**named(infer, "key")).sizes(16), rank_order=infer.rank_order)
        == infer
    )


def test_sizes_have_megatrons_names() -> None:
    sizes = TrainParallelism(
        8, tensor=2, pipeline=4, context=2, num_layers_in_first_pipeline_stage=3
    )
    assert named(sizes, "script")["decoder_first_pipeline_num_layers"] == 3
    assert named(sizes, "model")["num_layers_in_first_pipeline_stage"] == 3
    assert named(sizes, "groups")["context_parallel_size"] == 2
    assert "context_parallel_size" not in named(sizes, "model")
    args = Namespace(**named(sizes, "script"), num_experts=4, params_dtype="torch.bfloat16")
    assert ActorConfig(**actor_values(args)).sizes(8) == sizes


@pytest.mark.parametrize("side", SIDES)
def test_all_counts_below_one_are_reported(side: type[Parallelism]) -> None:
    counts = [
        size.name for size in sizes_of(side) if get_type_hints(side)[size.name] in (int, int | None)
    ]
    reported = violations(side(0, **dict.fromkeys(counts, 0)), table_for(DENSE))
    assert [violation.key for violation in reported] == ["world_size", *counts]


GROUPED = {**DENSE, "num_attention_heads": 24, "num_key_value_heads": 6}
ODD_EXPERTS = {**EXPERTS, "moe_intermediate_size": 33}
DIVIDES = "Choose sizes whose product divides it"


@pytest.mark.parametrize(
    (
        "model",
        "sizes",
        "expected",
    ),  # violations by key and remedy; sizes below are the nearest valid ones
    [
        (DENSE, InferenceParallelism(5, pipeline=5), [("pipeline", "Use fewer stages")]),
        (DENSE, InferenceParallelism(4, pipeline=4), []),
        (ODD_EXPERTS, InferenceParallelism(2, tensor=2), [("tensor", "Use a divisor of 33")]),
        (ODD_EXPERTS, InferenceParallelism(2, tensor=2, expert=2), []),
        (
            GROUPED,
            InferenceParallelism(4, tensor=4),
            [("tensor", "Choose a size that is one or the other")],
        ),
        (GROUPED, InferenceParallelism(12, tensor=12), []),
        (GROUPED, InferenceParallelism(5, tensor=5), [("tensor", "Use a divisor of 24")]),
        (GROUPED, TrainParallelism(5, tensor=5), [("tensor", "Use a divisor of 24")]),
        (DENSE, TrainParallelism(1, noop_layers=(5,)), [("noop_layers", "Use smaller numbers")]),
        (DENSE, TrainParallelism(1, noop_layers=(4,)), []),
        (DENSE, TrainParallelism(2, expert_tensor=2), [("expert_tensor", "Use 1")]),
        (DENSE, TrainParallelism(2), []),
        (
            EXPERTS,
            TrainParallelism(3, tensor=2),
            [("tensor", DIVIDES), ("expert", "ETP is TP unless it is given: try ETP 1")],
        ),
        (EXPERTS, TrainParallelism(3, expert=2), [("expert", DIVIDES)]),
    ],
)
def test_sizes_are_refused_up_to_the_nearest_valid_ones(
    model: dict[str, Any], sizes: Parallelism, expected: list[tuple[str, str]]
) -> None:
    assert [
        (violation.key, violation.remedy) for violation in violations(sizes, table_for(model))
    ] == expected
