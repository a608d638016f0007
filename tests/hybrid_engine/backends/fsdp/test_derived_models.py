"""Models without a name table, switched from FSDP2 to vLLM and compared bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.tools.verify.cases import Case
from hybrid_engine.tools.verify.verify import run_cases
from tests.hybrid_engine.models.small_configs import SMALL, small_config

TENSOR: dict[str, Any] = {"infer_tensor_parallel_size": 2}
EXPERT: dict[str, Any] = {**TENSOR, "infer_expert_parallel_size": 2}
FEW = {
    # All experts in one tensor, attention sinks, biases that only the loader can write.
    "GptOssForCausalLM": TENSOR,
    # One tensor per expert, a float32 router bias, dense first layers.
    "Glm4MoeForCausalLM": EXPERT,
    # Heads of different sizes, embeddings per layer, tied embeddings.
    "Gemma4ForCausalLM": TENSOR,
    # Mamba, where vLLM computes A from its logarithm.
    "NemotronHForCausalLM": TENSOR,
    # Fused projections; vLLM runs transformers' modules.
    "SmolLM3ForCausalLM": TENSOR,
    # Replicas of vLLM.
    "MistralForCausalLM": {},
}
# Models that are not run, with the reason.
EXCLUDED = {
    "Ernie4_5_MoeForCausalLM": "vLLM computes another router than transformers",
    "DeepseekV32ForCausalLM": "vLLM has no sparse attention on a CPU",
    "GlmMoeDsaForCausalLM": "vLLM has no sparse attention on a CPU",
    "MiniMaxM2ForCausalLM": "vLLM's router on a CPU takes softmax alone",
    "Qwen3NextForCausalLM": "vLLM's gated delta nets take bfloat16 alone on a CPU",
    "Qwen3_5ForCausalLM": "vLLM imports torchvision for it",
    "Qwen3_5MoeForCausalLM": "vLLM imports torchvision for it",
}


def verdicts_of(layouts: dict[str, dict[str, Any]], directory: Path) -> dict[str, list[str]]:
    cases = []
    for architecture, infer in layouts.items():
        place = directory / architecture
        place.mkdir()
        (place / "config.json").write_text(json.dumps(small_config(architecture)))
        cases.append(Case(architecture, str(place), {"fsdp": {}}, infer))
    verdicts = run_cases(cases, 2)
    assert all(verdict.num_parameters for verdict in verdicts)
    return {verdict.name: verdict.faults for verdict in verdicts}


@pytest.mark.engines
def test_models_without_a_table_switch_bitwise(tmp_path: Path) -> None:
    assert verdicts_of(FEW, tmp_path) == {name: [] for name in FEW}


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_all_models_without_a_table_switch_bitwise(tmp_path: Path) -> None:
    layouts = dict.fromkeys(SMALL.keys() - EXCLUDED.keys(), TENSOR)
    assert verdicts_of(layouts, tmp_path) == {name: [] for name in layouts}
