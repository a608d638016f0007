"""Caches that plans count, compared with those that vLLM's own layers describe; their room."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.config import load_config
from hybrid_engine.layouts.kv_cache import LayerCache, layer_caches, sequence_nbytes
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from hybrid_engine.models.config_json import longest_of
from hybrid_engine.tools.plan.cluster_plan import CacheRoom
from hybrid_engine.tools.plan.traced_side import traced_positions
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo.families import served_config, write_config

ACTOR = {"fsdp": {}, "seq_length": 32, "micro_batch_size": 1, "params_dtype": "bfloat16"}
STATES = {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "bfloat16"}

# Families with written tables, and architectures without: changed keys of config.json.
CHANGES: dict[str, Values] = yaml.safe_load("""
llama: {num_key_value_heads: 1}
gemma2: {}
gemma3: {num_hidden_layers: 7}
qwen2: {use_sliding_window: true, sliding_window: 64, max_window_layers: 0}
mixtral: {sliding_window: 64}
deepseek_v2: {}
GptOssForCausalLM: {}
Olmo3ForCausalLM: {}
Glm4MoeLiteForCausalLM: {}
NemotronHForCausalLM: {}
Qwen3NextForCausalLM: {}
GraniteForCausalLM:
  architectures: [GraniteMoeHybridForCausalLM]
  model_type: granitemoehybrid
  layer_types: [mamba, mamba, attention, mamba]
  mamba_n_heads: 8
  mamba_d_head: 32
  mamba_d_state: 32
  mamba_n_groups: 2
  num_local_experts: 4
  num_experts_per_tok: 2
MistralForCausalLM:
  architectures: [Lfm2ForCausalLM]
  model_type: lfm2
  layer_types: [conv, full_attention, conv, conv]
  conv_L_cache: 3
  conv_dim: 128
  block_dim: 128
  block_ff_dim: 192
""")
SIZES = {"llama": (2, 1), "gemma2": (2, 1), "gemma3": (1, 2), "deepseek_v2": (2, 1)}  # TP, PP
# bfloat16: a key and a value of 2 heads x 32; the last inputs of a convolution, and a state for
# each head.
FULL = LayerCache(2 * 2 * 2 * 32)
WINDOWED = replace(FULL, window=16)
MAMBA_2 = LayerCache(state=2 * (3 * (8 * 32 + 2 * 2 * 32) + 8 * 32 * 32))
DELTA_NET = LayerCache(state=2 * (3 * (2 * 2 * 128 + 4 * 128) + 4 * 128 * 128))
SHORT_CONVOLUTION = LayerCache(state=2 * 2 * 128)
# Without a written table: caches counted by hand.
EXPECTED = {
    "GptOssForCausalLM": {FULL: 2, WINDOWED: 2},
    "Olmo3ForCausalLM": {FULL: 1, WINDOWED: 3},
    "Glm4MoeLiteForCausalLM": {LayerCache(2 * (512 + 64)): 4},
    "NemotronHForCausalLM": {FULL: 1, MAMBA_2: 1},
    "Qwen3NextForCausalLM": {FULL: 1, DELTA_NET: 3},
    "GraniteForCausalLM": {FULL: 1, MAMBA_2: 3},
    "MistralForCausalLM": {FULL: 1, SHORT_CONVOLUTION: 3},
}


@on_engines(1)
def test_plans_count_the_caches_of_vllm(tmp_path: Path) -> None:
    """Caches of each position, and the longest sequence."""
    for name, changes in CHANGES.items():
        tensor, pipeline = SIZES.get(name, (1, 1))
        expected = EXPECTED.get(name)
        values = {
            **(small_config if expected else served_config)(name),
            **changes,
            "torch_dtype": "bfloat16",
        }
        sizes = InferenceParallelism(tensor * pipeline, tensor, pipeline)
        generate = {
            "infer_tensor_parallel_size": tensor,
            "infer_pipeline_parallel_size": pipeline,
            "vllm": STATES,
        }
        model = str(write_config(tmp_path / name, values))
        settings = {"model": model, "actor_config": ACTOR, "generate_config": generate}
        config = load_config(
            settings, sizes.world_size, weights_only=True, own_weights=True, own_loop=True
        )
        table = table_for(values)
        positions = traced_positions(config, table, sizes, 1)
        stages = [expected] if expected else map(Counter, layer_caches(table, sizes, 2))
        counted = [stage for stage in stages for _ in range(tensor)]
        assert [Counter(position.caches) for position in positions] == counted, name
        assert positions[0].max_model_len == longest_of(values), name


@pytest.mark.parametrize(
    ("length", "in_flight"), [(100, 512), (2000, 512), (2000, 16_384), (40_000, 16_384)]
)
def test_a_sequence_takes_the_blocks_that_vllm_requires(length: int, in_flight: int) -> None:
    """vLLM counts whole blocks, and one more if a window does not begin with one."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    torch = pytest.importorskip("torch")
    spec = interface.SlidingWindowSpec(
        16, sliding_window=1024, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    required = spec.max_admission_blocks_per_request(in_flight, length) * spec.page_size_bytes
    counted = sequence_nbytes([replace(FULL, window=1024)], length, in_flight)
    assert 0 <= required - counted <= 2 * spec.page_size_bytes


@given(
    share=st.integers(1, 100),
    step=st.integers(0, 20),
    per_token=st.integers(1, 9),
    longest=st.integers(1, 20),
    more=st.integers(-5, 5),
    cache_size=st.none() | st.integers(1, 90),
    other=st.integers(0, 50),
)
def test_a_vllm_that_cannot_start_never_fits(
    share: int,
    step: int,
    per_token: int,
    longest: int,
    more: int,
    cache_size: int | None,
    other: int,
) -> None:
    """Device of 100 bytes: weights leave `more` than a step and the longest sequence take."""
    needed = longest * per_token
    weights = max(0, share - step - needed - more)
    cache = CacheRoom(
        100, share / 100, weights, step, (LayerCache(per_token),), 7, longest, cache_size, other
    )
    taken = math.ceil(100 * (share / 100))
    size = taken - weights - step
    if cache_size is not None:
        size = cache_size
        taken = weights + step + cache_size
    assert (cache.left >= 0) == (needed <= size and taken + other <= 100)
    if cache.left >= 0 and cache_size is None:
        assert 100 * cache.needed <= share + 1
    if weights + step + needed > taken and cache_size is None:
        assert 100 * cache.needed > share
