"""Layouts by conventional names, compared with Megatron-Bridge's own import and export, bit by bit.

Megatron-Bridge is in no lock: its wheel asks for Python 3.12 and Transformer Engine. See INSTALL.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo.families import TRAIN_KEYS, tiny_config, write_config

INSTALL = (
    "pip install --no-deps --ignore-requires-python --target DIR "
    "megatron-core==0.19.2 megatron-bridge==0.6.2 "
    "omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.2, and "
    f"PYTHONPATH=DIR:{REPO_ROOT}/tests/harness/typing_override"
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason=INSTALL),
]

NUM_RANKS = 4
DENSE = ("", "tp4", "tp2 pp2 vpp2")
EXPERTS = ("", "tp4 etp4", "tp2 ep2 etp2", "tp2 pp2 vpp2 ep2 etp1")
# megatron-core refuses biases of experts with ETP.
EXPERTS_WITH_BIASES = ("", "tp4 ep4 etp1", "tp2 pp2 vpp2 ep2 etp1")


@dataclass(frozen=True)
class Model:
    """A model, and training layouts of four ranks; the other ranks are data parallel."""

    config: Values
    layouts: tuple[str, ...]
    # Multi-token prediction is in no class of transformers.
    changes: Values = field(
        default_factory=lambda: {"num_nextn_predict_layers": 0, "num_key_value_heads": 4}
    )


def four_layers(family: str) -> Values:
    return tiny_config(family, num_hidden_layers=4)


MODELS = {
    "Mistral": Model(small_config("MistralForCausalLM"), DENSE),
    "Llama": Model(four_layers("llama"), DENSE),
    "Qwen2": Model(four_layers("qwen2"), DENSE),
    "Qwen3": Model(four_layers("qwen3"), DENSE),
    "Qwen3-MoE": Model(four_layers("qwen3_moe"), EXPERTS),
    "GLM-4.5": Model(small_config("Glm4MoeForCausalLM"), EXPERTS),
    "GLM-4.7-Flash": Model(small_config("Glm4MoeLiteForCausalLM"), EXPERTS),
    "gpt-oss": Model(small_config("GptOssForCausalLM"), EXPERTS_WITH_BIASES),
    "DeepSeek-V2": Model(four_layers("deepseek_v2"), EXPERTS),
    "DeepSeek-V3": Model(four_layers("deepseek_v3"), EXPERTS),
}


def write_numbers(directory: Path, model: Model) -> TensorDict:
    """Write a checkpoint in which every element has another value."""
    config = {**model.config, **model.changes}
    write_config(directory, config)
    tensors = {}
    start = 1
    for name, shape in table_for(config).shapes.items():
        numel = math.prod(shape)
        tensors[name] = torch.arange(start, start + numel, dtype=torch.float32).reshape(shape)
        start += numel
    assert start <= 2**24, "float32 is not exact"
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def sizes_of(layout: str) -> dict[str, int]:
    words = [(word.rstrip("0123456789"), word) for word in layout.split()]
    return {TRAIN_KEYS[name]: int(word.removeprefix(name)) for name, word in words}


@pytest.mark.timeout(1800)
def test_megatron_bridge_imports_and_exports_the_same_elements(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    checkpoints = {name: write_numbers(tmp_path / name, model) for name, model in MODELS.items()}
    cases = {
        f"{name}: {layout}": (str(tmp_path / name), sizes_of(layout))
        for name, model in MODELS.items()
        for layout in model.layouts
    }
    job, out = tmp_path / "cases.json", tmp_path / "out.json"
    job.write_text(json.dumps(cases))
    module = "tests.hybrid_engine.models.bridge_ranks"
    ended = run_ranks(["-m", module, str(job), str(out)], NUM_RANKS, 1700)
    assert ended.status == 0, ended.output
    by_case = json.loads(out.read_text())
    assert by_case.keys() == cases.keys()
    for case, ranks in by_case.items():
        name = case.partition(":")[0]
        for comparison in ranks:
            assert comparison["imported_differently"] == [], case
            assert comparison["exported_differently"] == [], case
            assert sorted(comparison["exported"]) == sorted(checkpoints[name]), case
        num_parameters = sum(comparison["num_imported"] for comparison in ranks)
        assert num_parameters > NUM_RANKS * 10, case
        record_property(case, num_parameters)
        print(f"{case or name}: {num_parameters} parameters of {NUM_RANKS} ranks, 0 different")
