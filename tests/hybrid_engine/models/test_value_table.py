"""What a value model has of its architecture's tensors, and what not."""

from __future__ import annotations

import pytest

from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.models.value_table import HEAD, value_table
from tests.zoo.families import FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_one_row_and_nothing_else_changes(family: str) -> None:
    table = table_for(tiny_config(family))
    value = value_table(table)
    assert value.shapes[HEAD] == (1, table.dims.hidden_size)
    served = {name for name in table.shapes if table.is_served(name)}
    assert value.shapes.keys() - {HEAD} == served - {"lm_head.weight"}
    assert value.head == "value"
    assert value.extras.logit_softcap is None
    matched = value.match("output_layer.weight")
    assert matched is not None
    assert list(matched.packing.tensors()) == [HEAD]
    embedding = value.match("embedding.word_embeddings.weight")
    assert embedding == table.match("embedding.word_embeddings.weight")


def test_prediction_layers_are_left_out() -> None:
    table = table_for(tiny_config("deepseek_v3", num_nextn_predict_layers=1))
    value = value_table(table)
    assert value.dims.num_mtp_layers == 0
    assert {name for name in table.shapes if not table.is_served(name)} <= value.left_out
    assert set(table.copies) <= value.left_out


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_on_the_last_stage_alone(tied: bool) -> None:
    table = value_table(table_for(tiny_config("qwen3", tie_word_embeddings=tied)))
    side = training_side(table, TrainParallelism(4, tensor=2, pipeline=2, make_vocab_size_divisible_by=8), "float32")
    (head,) = side.holdings.owners[HEAD]
    assert head.ranks.tolist() == [2, 3]
    (first, second) = side.holdings.owners["model.embed_tokens.weight"]
    assert sorted([*first.ranks.tolist(), *second.ranks.tolist()]) == [0, 1]
