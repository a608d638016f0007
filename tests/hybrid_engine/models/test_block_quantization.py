"""Names, shapes and regions of weights in fp8 blocks, and the quantization_config that describes them."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from hybrid_engine.models.block_quantization import (
    BlockQuantization,
    Blocks,
    block_config,
    blocks_in,
    require_matrices,
    scale_name,
)
from hybrid_engine.records.regions import Region
from tests.harness.errors import has_violation
from tests.zoo.block_fp8 import PUBLISHED
from tests.zoo.families import tiny_config

BLOCKS = Blocks(4, 8)


@pytest.mark.parametrize(
    ("offsets", "lengths", "touched"),
    [
        ((0, 0), (4, 8), ((0, 0), (1, 1))),
        ((0, 0), (5, 8), ((0, 0), (2, 1))),
        ((3, 7), (1, 1), ((0, 0), (1, 1))),
        ((3, 7), (2, 2), ((0, 0), (2, 2))),
        ((4, 0), (6, 10), ((1, 0), (2, 2))),
    ],
)
def test_scales_of_a_region_are_those_of_its_elements(offsets: Any, lengths: Any, touched: Any) -> None:
    region = Region("w.weight", offsets, lengths)
    scales = BLOCKS.touched(region)
    assert (scales.offsets, scales.lengths) == touched
    assert scales.tensor == "w.weight_scale_inv"
    elements = {
        (row // 4, column // 8)
        for row in range(region.offsets[0], region.ends[0])
        for column in range(region.offsets[1], region.ends[1])
    }
    assert len(elements) == scales.numel
    covered = BLOCKS.weights_of(scales, "w.weight", (10, 10))
    assert covered.intersect(region) == region
    assert covered.ends == (min(10, scales.ends[0] * 4), min(10, scales.ends[1] * 8))


def test_the_last_blocks_may_be_smaller() -> None:
    assert BLOCKS.grid((8, 8)) == (2, 1)
    assert BLOCKS.grid((9, 17)) == (3, 3)


def test_served_tensors_have_scales_beside_quantised_weights() -> None:
    table = table_for(tiny_config("qwen3"))
    name = "model.layers.1.mlp.down_proj.weight"
    served = BlockQuantization(frozenset({name}), BLOCKS).served(table)
    assert served.shapes.keys() - table.shapes.keys() == {scale_name(name)}
    assert served.shapes[scale_name(name)] == BLOCKS.grid(table.shapes[name])
    assert served.dtypes == {name: "float8_e4m3fn", scale_name(name): "float32"}
    names = list(served.shapes)
    assert names.index(scale_name(name)) == names.index(name) + 1


def test_tensors_without_rows_and_columns_are_named() -> None:
    shapes = {"a.weight": (8, 8), "experts.gate_up_proj": (2, 8, 8)}
    require_matrices(["a.weight"], shapes)
    violated = has_violation("generate_config.quantization", "not-a-matrix", "experts.gate_up_proj", "(2, 8, 8)")
    with pytest.raises(ConfigError, check=violated):
        require_matrices(shapes, shapes)


def test_a_published_config_is_honoured() -> None:
    config = {"quantization_config": {**PUBLISHED, "modules_to_not_convert": ["lm_head"]}}
    assert block_config(config, None) == block_config(config, "fp8") == config["quantization_config"]
    assert blocks_in(config["quantization_config"]) == Blocks(128, 128)


def test_models_without_one_are_quantised_on_request_only() -> None:
    assert block_config({}, None) is None
    chosen = block_config({}, "fp8")
    assert chosen is not None
    assert blocks_in(chosen) == Blocks(128, 128)
    for config in ({}, {"quantization_config": PUBLISHED}):
        assert block_config(config, "none") is None
        assert block_config(config, "fp8_per_channel") is None


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "gptq"},
        {"fmt": "e5m2"},
        {"activation_scheme": "static"},
        {"scale_fmt": "ue8m0"},
        {"weight_block_size": None},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 0]},
    ],
    ids=str,
)
def test_other_weights_are_left_unquantised_or_refused(change: dict[str, Any]) -> None:
    config = {"quantization_config": {**PUBLISHED, **change}}
    assert block_config(config, None) is None
    (key,) = change
    with pytest.raises(ConfigError, check=has_violation("generate_config.quantization", "other-quantization", key)):
        block_config(config, "fp8")
