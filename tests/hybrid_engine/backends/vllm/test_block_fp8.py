"""Layers that vLLM quantises in blocks, found by tracing its model without memory: experts too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceSettings, layout_of_position, quantised_at_position
from hybrid_engine.config import GenerateConfig
from hybrid_engine.models import table_for
from hybrid_engine.models.block_quantization import BlockQuantization, block_config, blocks_in, scale_name
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm import support
from tests.zoo import block_fp8
from tests.zoo.families import served_config

pytestmark = pytest.mark.slow  # imports vLLM

SIZES = {
    **{"hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    "head_dim": 32,
}


def trace_experts(directory: str) -> dict[str, Any]:
    """Return the quantised tensors of a model with experts, and the dtypes that vLLM has for its tensors."""
    dist.init_process_group("gloo")
    config = served_config("qwen3_moe", **SIZES)
    table = table_for(config)
    generate = GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16)
    path = support.write_config(Path(directory), config)
    chosen = block_config(config, "fp8")  # config.json has none
    settings = InferenceSettings(path, generate=generate, quantization_config=chosen)
    with (
        closing(Job.join(120)) as job,
        block_fp8.kernel_in_torch(),
        # The kernel of experts needs AMX, and is refused on CPU; but nothing is computed on the meta device.
        mock.patch("torch.cpu._is_amx_tile_supported", return_value=True),
        mock.patch("hybrid_engine.backends.vllm.arguments.check_arguments"),
    ):
        names = quantised_at_position(settings, job, table.shapes, table.dtypes)
        quantization = BlockQuantization(frozenset(names), blocks_in(block_fp8.PUBLISHED))
        served = quantization.served(table)
        layout = layout_of_position(settings, job, served.shapes, served.dtypes)
    dtypes = {shard.region.tensor: layout.buffers[shard.place.buffer].dtype for shard in layout.shards}
    return {"names": names, "dtypes": dtypes, "shapes": dict(served.shapes)}


def test_experts_are_quantised_and_routers_are_not(engines: Ranks, tmp_path: Path) -> None:
    (traced,) = engines.launch(trace_experts, 1, str(tmp_path), timeout=600)
    expected = {name for name in traced["shapes"] if name.endswith("_proj.weight")}
    assert any(".experts.3.down_proj." in name for name in expected)
    assert set(traced["names"]) == expected
    assert traced["dtypes"].keys() == traced["shapes"].keys()
    for name, dtype in traced["dtypes"].items():
        if name in expected:
            assert (dtype, traced["dtypes"][scale_name(name)]) == ("float8_e4m3fn", "float32")
    assert traced["dtypes"]["model.layers.0.mlp.gate.weight"] == "bfloat16"
