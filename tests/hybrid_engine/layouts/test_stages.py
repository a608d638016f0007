"""Patterns of a HybridModel: their stages, and weights equal to a GPTModel's.

test_training.py compares layers of a GPTModel with megatron-core.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.stages import (
    Chunk,
    checkpoint_layers,
    chunks_of,
    has_experts,
    pattern_violations,
)
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.layout import differences
from tests.hybrid_engine.layouts.cases import held_tensors
from tests.zoo.families import served_config


def table_of(family: str, num_layers: int) -> ModelTable:
    return table_for({**served_config(family), "num_hidden_layers": num_layers})


def hybrid_chunks(pattern: str, pipeline: int) -> list[Chunk]:
    sizes = TrainParallelism(pipeline, pipeline=pipeline, hybrid_layer_pattern=pattern)
    return chunks_of(sizes, len(pattern.replace("|", "")) // 2, num_mtp_layers=0)


@given(
    st.lists(st.tuples(st.sampled_from("*+"), st.sampled_from("-E")), min_size=1, max_size=12),
    st.data(),
)
def test_every_sublayer_is_in_one_chunk(layers: list[tuple[str, str]], data: st.DataObject) -> None:
    symbols = "".join(attention + mlp for attention, mlp in layers)
    pipeline = data.draw(st.integers(1, 4))
    num_segments = pipeline * data.draw(st.integers(1, 2))
    num_ends = num_segments - 1
    ends = sorted(
        data.draw(st.lists(st.integers(0, len(symbols)), min_size=num_ends, max_size=num_ends))
    )
    pattern = "|".join(
        symbols[start:stop] for start, stop in zip([0, *ends], [*ends, len(symbols)], strict=True)
    )
    if len(symbols) % pipeline == 0:  # without separators, stages are equally long
        assert {len(chunk.positions) for chunk in hybrid_chunks(symbols, pipeline)} == {
            len(symbols) // pipeline
        }
    chunks = hybrid_chunks(pattern, pipeline)
    assert [[symbols[position] for position in chunk.positions] for chunk in chunks] == [
        *map(list, pattern.split("|"))
    ]
    assert [layer for chunk in chunks for layer in chunk.attention] == list(range(len(layers)))
    assert [layer for chunk in chunks for layer in chunk.mlp] == list(range(len(layers)))
    assert checkpoint_layers(pattern, len(layers)) == [
        number for number in range(len(layers)) for _ in "am"
    ]
    assert has_experts(pattern)[1::2] == [mlp == "E" for _, mlp in layers]


PATTERN = "hybrid_layer_pattern"
VIRTUAL = "virtual_pipeline"


@pytest.mark.parametrize(
    ("pattern", "pipeline", "virtual", "key"),
    [
        *(
            (pattern, 1, None, PATTERN)
            for pattern in ("M*-", "GDM*-", "*-/*-", "*-x", "**--", "-*", "*-*", "")
        ),
        *((pattern, 1, None, PATTERN) for pattern in ("*-*-*-", "*-*E", "*-+-", "*-|*-")),
        *(("*-*-", 3, None, PATTERN), ("*-|*-", 3, None, PATTERN)),
        *(("*|-|*|-", 2, 4, VIRTUAL), ("*-*-", 2, 2, VIRTUAL)),
    ],
)
def test_invalid_patterns_are_refused(
    pattern: str, pipeline: int, virtual: int | None, key: str
) -> None:
    """The model has two layers without experts."""
    (violation,) = pattern_violations(pattern, pipeline, virtual, [False, False], has_latent=False)
    assert violation.key == key
    assert violation.remedy


@pytest.mark.parametrize("pattern", ["M*-", "*-x", "**--", "*-*"])
def test_unsupported_layers_have_no_checkpoint_number(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(pattern)):
        checkpoint_layers(pattern, 2)
    assert checkpoint_layers(pattern, len(pattern)) == list(range(len(pattern)))


@pytest.mark.parametrize(
    ("family", "pattern", "as_gpt"),
    [
        ("llama", "*-*-*-*-", {}),
        ("llama", "*-*-*-|*-", {"num_layers_in_first_pipeline_stage": 3}),
        ("qwen3_moe", "*E|*E|*E|*E", {"virtual_pipeline": 2}),
    ],
)
def test_stages_of_whole_layers_match_a_gpt_model(
    family: str, pattern: str, as_gpt: dict[str, int]
) -> None:
    table = table_of(family, 4)
    pipeline = 2 if "|" in pattern else 1
    hybrid = training_side(
        table, TrainParallelism(4, pipeline=pipeline, hybrid_layer_pattern=pattern)
    )
    gpt = training_side(table, TrainParallelism(4, pipeline=pipeline, **as_gpt))
    for rank in range(4):
        assert differences(hybrid.layout_of(rank), gpt.layout_of(rank)) == []


def test_a_stage_can_end_within_a_layer() -> None:
    side = training_side(
        table_of("llama", 2), TrainParallelism(2, pipeline=2, hybrid_layer_pattern="*-*|-")
    )
    first, second = (held_tensors(side.layout_of(rank)) for rank in range(2))
    assert {name.split(".")[3] for name in second if name.startswith("model.layers.1.")} == {
        "mlp",
        "post_attention_layernorm",
    }
    assert {name.split(".")[3] for name in first if name.startswith("model.layers.1.")} == {
        "self_attn",
        "input_layernorm",
    }
