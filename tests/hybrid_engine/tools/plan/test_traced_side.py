"""Plans of models without a name table, whose side of vLLM is traced on the planning machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.config import load_config
from hybrid_engine.errors import PlanError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from hybrid_engine.tools.plan.cluster_plan import plan_job
from hybrid_engine.tools.plan.traced_side import traced_positions, traced_side
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo.families import write_config

ACTOR = {"fsdp": {}, "seq_length": 32, "micro_batch_size": 1, "params_dtype": "float32"}
# No CPU computes any of these.
FOR_A_GPU: tuple[Values, ...] = (
    {"quantization": "fp8_per_tensor"},
    {
        "vllm": {
            "attention_backend": "FLASH_ATTN",
            "enable_sleep_mode": True,
            "kv_cache_dtype": "fp8",
        }
    },
)


def config_of(directory: Path, **generate: Any) -> Any:
    # Heads that vLLM's attention on a CPU refuses, and sequences for which its cache there is too
    # small.
    config = {
        **small_config("MistralForCausalLM"),
        "head_dim": 72,
        "max_position_embeddings": 1 << 16,
    }
    values = {
        "model": str(write_config(directory, config)),
        "actor_config": ACTOR,
        "generate_config": {"max_model_len": 1 << 16, "infer_tensor_parallel_size": 2, **generate},
    }
    return load_config(values, 2, weights_only=True, own_weights=True, own_loop=True)


@on_engines(1)
def test_the_planning_machine_need_not_compute_the_model(tmp_path: Path) -> None:
    elements = [
        plan_job(config_of(tmp_path, **generate), 2).destination.num_elements.tolist()
        for generate in FOR_A_GPU
    ]
    assert elements == [elements[0]] * len(FOR_A_GPU)
    assert min(elements[0]) > 0


@on_engines(1)
def test_shapes_that_do_not_fit_are_reported_together(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    table = table_for(config.hf_config())
    shapes = {**table.shapes, "model.norm.weight": (64, 3), "lm_head.weight": (512, 4, 32)}
    sizes = InferenceParallelism(2, tensor=2)
    with pytest.raises(PlanError) as caught:
        traced_side(traced_positions(config, table, sizes, 1), shapes, sizes)
    assert "model.norm.weight: shape (128,) on one side, (64, 3) on the other" in str(caught.value)
    assert "lm_head" not in str(caught.value)
