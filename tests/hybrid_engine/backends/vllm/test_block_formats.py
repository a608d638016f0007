"""Layers that vLLM quantises in blocks, found by tracing its model without memory: experts too."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_engine.backends.vllm import InferenceSettings, layout_of_position, quantised_at_position
from hybrid_engine.config import GenerateConfig
from hybrid_engine.models import table_for
from hybrid_engine.models.block_quantization import BlockQuantization
from hybrid_engine.models.quantization_configs import block_config, format_in
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.test_block_arithmetic import FORMATS
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import job
from tests.zoo import block_formats
from tests.zoo.families import served_config

pytestmark = pytest.mark.slow  # imports vLLM

SIZES = {
    **{
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "head_dim": 32,
}


@on_engines(1, timeout=600)
@pytest.mark.parametrize("method", FORMATS)
def test_experts_are_quantised_and_routers_are_not(tmp_path: Path, method: str) -> None:
    config = served_config("qwen3_moe", **SIZES)
    table = table_for(config)
    generate = GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16)
    path = support.write_config(tmp_path, config)
    chosen = block_config(config, method)  # config.json has none
    settings = InferenceSettings(path, generate=generate, quantization_config=chosen)
    with block_formats.kernels_in_torch(), block_formats.experts_in_torch():
        fused = quantised_at_position(settings, job(), table.shapes, table.dtypes)
        groups = {name: names[0] for names in fused for name in names}
        served = BlockQuantization(groups, format_in(chosen)).served(table)
        layout = layout_of_position(settings, job(), served.shapes, served.dtypes)
    dtypes = {
        shard.region.tensor: layout.buffers[shard.place.buffer].dtype for shard in layout.shards
    }
    in_blocks = {name for names in fused for name in names}
    expert = "model.layers.0.mlp.experts.3"
    assert [f"{expert}.down_proj.weight"] in fused
    assert [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"] in fused
    attention = "model.layers.0.self_attn"
    assert [f"{attention}.{name}_proj.weight" for name in "kqv"] in fused
    assert dtypes.keys() == served.shapes.keys()
    for name in in_blocks:
        for stored, (shape, dtype) in FORMATS[method].tensors_of(name, table.shapes[name]).items():
            assert (dtypes[stored], served.shapes[stored]) == (dtype, shape)
    rest = table.shapes.keys() - in_blocks
    assert all(dtypes[name] == "bfloat16" for name in rest)
    assert not any(name.endswith("_proj.weight") for name in rest)
