"""Names, shapes and regions of weights in blocks."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from hybrid_engine.models.block_quantization import (
    MXFP8,
    NVFP4,
    BlockQuantization,
    Blocks,
    fp8,
    require_matrices,
)
from hybrid_engine.records.regions import Region
from tests.harness.errors import has_violation
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
def test_scales_of_a_region_are_those_of_its_elements(
    offsets: Any, lengths: Any, touched: Any
) -> None:
    region = Region("w.weight", offsets, lengths)
    scales = fp8(4, 8).scales_of(region)
    assert (scales.offsets, scales.lengths) == touched
    assert scales.tensor == "w.weight_scale_inv"
    elements = {
        (row // 4, column // 8)
        for row in range(region.offsets[0], region.ends[0])
        for column in range(region.offsets[1], region.ends[1])
    }
    assert len(elements) == scales.numel
    covered = BLOCKS.weights_of(BLOCKS.touched(region), (10, 10))
    assert covered.intersect(region) == region
    assert covered.ends == (min(10, scales.ends[0] * 4), min(10, scales.ends[1] * 8))


def test_the_last_blocks_may_be_smaller() -> None:
    assert BLOCKS.grid((8, 8)) == (2, 1)
    assert BLOCKS.grid((9, 17)) == (3, 3)


def test_elements_of_four_bits_are_in_pairs() -> None:
    region = Region("w.weight", (3, 8), (2, 40))
    assert NVFP4.values_of(region) == Region("w.weight_packed", (3, 4), (2, 20))
    assert NVFP4.scales_of(region) == Region("w.weight_scale", (3, 0), (2, 3))
    assert MXFP8.values_of(region) == region


def test_served_tensors_have_scales_beside_quantised_weights() -> None:
    table = table_for(tiny_config("qwen3"))
    name = "model.layers.1.mlp.down_proj.weight"
    rows, columns = table.shapes[name]
    served = BlockQuantization({name: name}, fp8(4, 8)).served(table)
    assert served.shapes.keys() - table.shapes.keys() == {f"{name}_scale_inv"}
    assert served.shapes[f"{name}_scale_inv"] == BLOCKS.grid((rows, columns))
    assert served.dtypes == {name: "float8_e4m3fn", f"{name}_scale_inv": "float32"}
    names = list(served.shapes)
    assert names.index(f"{name}_scale_inv") == names.index(name) + 1
    packed = BlockQuantization({name: name}, NVFP4).served(table)
    new = {
        f"{name}_packed": "uint8",
        f"{name}_scale": "float8_e4m3fn",
        f"{name}_global_scale": "float32",
    }
    assert packed.dtypes == new
    assert packed.shapes.keys() ^ table.shapes.keys() == {name, *new}
    assert packed.shapes[f"{name}_packed"] == (rows, columns // 2)


def test_tensors_without_rows_of_whole_blocks_are_named() -> None:
    shapes = {"a.weight": (8, 8), "experts.gate_up_proj": (2, 8, 8), "b.weight": (3, 48)}
    require_matrices(["a.weight", "b.weight"], shapes, fp8(128, 128))
    violated = has_violation(
        "generate_config.quantization", "not-a-matrix", "experts.gate_up_proj", "(2, 8, 8)"
    )
    with pytest.raises(ConfigError, check=violated):
        require_matrices(shapes, shapes, fp8(128, 128))
    violated = has_violation("generate_config.quantization", "not-a-matrix", "b.weight", "48", "32")
    with pytest.raises(ConfigError, check=violated):
        require_matrices(["b.weight"], shapes, MXFP8)
    require_matrices(["b.weight"], shapes, NVFP4)
