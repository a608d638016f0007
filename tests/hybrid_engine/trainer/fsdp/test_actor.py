"""Models that FSDP2's actor builds from a config.json."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.fsdp.internals import allocate_modules, model_of_modules
from hybrid_engine.backends.fsdp.names import model_of_config
from hybrid_engine.backends.fsdp.sharded_tensors import local_of, mesh_of
from hybrid_engine.config import ActorConfig, FsdpConfig, HybridConfig, load_config
from hybrid_engine.errors import ConfigError
from hybrid_engine.trainer.fsdp.actor import build_sharded_model
from tests.harness.errors import has_violations
from tests.harness.launch import on_ranks
from tests.zoo.families import tiny_config, write_config
from tests.zoo.vision_models import SMALL_VISION

LLAVA = "LlavaForConditionalGeneration"
CPU = torch.device("cpu")

pytestmark = pytest.mark.slow  # imports transformers' models


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    config = {"architectures": [LLAVA], "dtype": "float32", **SMALL_VISION[LLAVA]}
    write_config(tmp_path, config)
    return tmp_path


def test_buffers_of_a_vision_tower_are_initialized(llava: Path) -> None:
    model = model_of_config(llava)
    allocate_modules(model.modules(), model_of_modules(model), CPU)
    position_ids = model.get_submodule("model.vision_tower.embeddings").position_ids
    # 16 patches and a class embedding
    assert torch.equal(position_ids, torch.arange(17)[None])


@pytest.mark.parametrize(
    ("patterns", "codes"),
    [
        (["model.vision.*", "lm_head.*"], ["no-parameter-matches"]),
        (["*"], ["nothing-is-trained"]),
        (["none", "*"], ["no-parameter-matches", "nothing-is-trained"]),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(
    llava: Path, patterns: list[str], codes: list[str]
) -> None:
    expected = has_violations(*(("actor_config.frozen_parameters", code) for code in codes))
    actor = ActorConfig(
        fsdp=FsdpConfig(), params_dtype="float32", frozen_parameters=tuple(patterns)
    )
    config = HybridConfig(model=llava, actor_config=actor)
    with pytest.raises(ConfigError, check=expected):
        # refused before the mesh is used
        build_sharded_model(config, None, CPU)  # type: ignore[arg-type]


@on_ranks(1)
def test_adapters_of_experts_have_initial_values(tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config("qwen3_moe"))
    lora = {"rank": 2}
    config = load_config(
        {"model": str(tmp_path), "actor_config": {"fsdp": {}, "lora": lora}}, 1, own_weights=True
    )
    dist.init_process_group("gloo")
    model = build_sharded_model(config, mesh_of(FsdpConfig(), CPU, 1), CPU)
    values = {name: local_of(tensor) for name, tensor in model.named_parameters()}
    adapters = {name for name in values if "lora_" in name}
    assert any(".experts." in name for name in adapters)
    assert {name for name in adapters if values[name].any()} == {
        name for name in adapters if "lora_A" in name
    }
