"""Sums of weights and Megatron-Bridge's adapters, compared with its own merge, bit by bit."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.harness.values import Values
from tests.hybrid_engine.models.test_megatron_bridge import INSTALL, MODELS, sizes_of, write_numbers
from tests.zoo.families import tiny_config, write_config

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason=INSTALL),
]

LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
CANONICAL = [
    "linear_q",
    "linear_k",
    "linear_v",
    "linear_proj",
    "linear_fc1_up",
    "linear_fc1_gate",
    "linear_fc2",
]
PROJECTIONS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@dataclass(frozen=True)
class BridgeCase:
    """A model with adapters, on two ranks.

    Attributes:
        model: key of MODELS.
        layout: of the ranks.
        changes: further values of Megatron's configuration.
        method: of Megatron-Bridge.
        settings: its arguments.
        changed: modules of a checkpoint that adapters change.
        num_sums: weights of a rank with one adapter each.
    """

    model: str
    layout: str
    num_sums: int
    method: str = "LoRA"
    settings: Values = field(default_factory=lambda: {"target_modules": LAYERS})
    changes: Values = field(default_factory=dict)
    changed: tuple[str, ...] = tuple(PROJECTIONS)


EACH = {"target_modules": LAYERS, "share_expert_adapters": False}
SEQUENTIAL = {"moe_grouped_gemm": False}
WITH_ROUTER = {
    "settings": {"target_modules": [*LAYERS, "router"]},
    "changed": (PROJECTIONS[0], "gate", *PROJECTIONS[1:]),
}
CASES = {
    "column and row parallel": BridgeCase("Qwen3", "tp2", 16),
    "canonical": BridgeCase("Qwen3", "tp2", 8, "CanonicalLoRA", {"target_modules": CANONICAL}),
    "one adapter for all experts": BridgeCase("Qwen3-MoE", "ep2", 24, **WITH_ROUTER),
    "one adapter for each expert": BridgeCase("Qwen3-MoE", "ep2", 24, settings=EACH),
}
# Megatron-Bridge's export of the parts of experts does not undo their split over ranks as their
# modules compute, so that only its LoRAMerge is compared there.
ONLY_MERGED = {
    "experts over tensor parallel ranks": BridgeCase(
        "Qwen3-MoE", "tp2 etp2", 24, settings={"target_modules": LAYERS[:3]}
    ),
    "each expert over tensor parallel ranks": BridgeCase(
        "Qwen3-MoE", "tp2 etp2", 24, settings={**EACH, "target_modules": LAYERS[:3]}
    ),
    "modules of experts, tensor parallel": BridgeCase(
        "Qwen3-MoE", "tp2 etp2", 24, settings={"target_modules": LAYERS[:3]}, changes=SEQUENTIAL
    ),
    "modules of experts": BridgeCase("Qwen3-MoE", "ep2", 24, changes=SEQUENTIAL),
}
PARTIAL = "its adapter applies B to a part of A x: ranks sum the layer's outputs outside of it"
REFUSED = {
    "DoRA": (BridgeCase("Qwen3", "tp2", 0, "DoRA"), 16, "a switch does not merge its DoRALinear"),
    "shared outer": (
        BridgeCase(
            "Qwen3-MoE",
            "ep2",
            0,
            settings={"target_modules": LAYERS, "experts_shared_outer_loras": True},
        ),
        8,
        "its adapter is a SharedOuterGroupedExpertAdapter",
    ),
    "columns of experts": (BridgeCase("Qwen3-MoE", "tp2 etp2", 0), 4, PARTIAL),
    "columns of each expert": (BridgeCase("Qwen3-MoE", "tp2 etp2", 0, settings=EACH), 4, PARTIAL),
    "router, by sequence": (
        BridgeCase(
            "Qwen3-MoE",
            "tp2 etp1",
            0,
            settings={"target_modules": ["router"]},
            changes={"sequence_parallel": True},
        ),
        4,
        "its adapter mixes tokens: the ranks that share A x have different ones "
        "(sequence_parallel)",
    ),
    "columns of modules of experts": (
        BridgeCase("Qwen3-MoE", "tp2 etp2", 0, changes=SEQUENTIAL),
        16,
        PARTIAL,
    ),
}


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Values]]:
    """Comparisons of every case, by rank; see `bridge_lora_ranks.SumComparison`."""
    path = tmp_path_factory.mktemp("bridge")
    for name in ("Qwen3", "Qwen3-MoE"):
        write_numbers(path / name, MODELS[name])
    cases = {**CASES, **ONLY_MERGED, **{name: case for name, (case, _, _) in REFUSED.items()}}
    jobs = {
        name: (
            str(path / case.model),
            {**sizes_of(case.layout), **case.changes},
            case.method,
            case.settings,
        )
        for name, case in cases.items()
    }
    job, out = path / "cases.json", path / "out.json"
    job.write_text(json.dumps(jobs))
    ended = run_ranks(
        ["-m", "tests.hybrid_engine.models.bridge_lora_ranks", str(job), str(out)], 2, 500
    )
    assert ended.status == 0, ended.output
    return json.loads(out.read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*CASES, *ONLY_MERGED])
def test_sums_are_those_of_megatron_bridge(comparisons: Values, name: str) -> None:
    case = {**CASES, **ONLY_MERGED}[name]
    for compared in comparisons[name]:
        assert compared["refusals"] == []
        assert (compared["num_sums"], compared["different_sums"]) == (case.num_sums, [])
        if name in CASES:
            assert compared["different"] == {}
            assert compared["changed"] == sorted(case.changed)
        else:
            assert all(".mlp.experts." in tensor for tensor in compared["different"])
        # The weight and two matrices for each adapter.
        assert all(count >= 3 for count in compared["origins"])
        assert compared["num_equal"] > 30
        assert compared["is_changed"] == [True, True]
        assert compared["not_reset"] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_by_name(comparisons: Values, name: str) -> None:
    _, num_refusals, problem = REFUSED[name]
    for compared in comparisons[name]:
        assert [problem] * num_refusals == [refusal for _, refusal in compared["refusals"]]
        assert all(
            key.startswith("model_chunks[0]: decoder.layers.") for key, _ in compared["refusals"]
        )


@pytest.mark.timeout(600)
def test_adapters_of_an_attached_model_reach_vllm(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ended = run_ranks(
        ["-m", "tests.hybrid_engine.models.attached_bridge_lora", "trained", str(out)], 2, 500
    )
    assert ended.status == 0, ended.output
    for adapted in json.loads(out.read_text()):
        assert adapted["losses"] == sorted(adapted["losses"], reverse=True)
        assert adapted["changed"] == []
        assert max(adapted["gaps"]) < 1e-4 < 0.1 < min(adapted["base_gaps"])
        assert adapted["num_layers"] == 16
        assert {name.split(".")[-2] for name in adapted["summed"]} == set(PROJECTIONS)
        assert adapted["skipped"][0] == 0 < adapted["skipped"][1]  # the base, which is frozen
        assert adapted["skipped"][1] + adapted["read"][1] == adapted["read"][0]
        assert adapted["refused"] == "adapters-changed"


@pytest.mark.timeout(600)
def test_a_model_computes_with_sums_as_with_adapters_on_experts(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", tiny_config("qwen3_moe"))
    out = tmp_path / "out.json"
    module = "tests.hybrid_engine.models.attached_bridge_lora"
    ended = run_ranks(["-m", module, "merged", str(out), str(model)], 2, 500)
    assert ended.status == 0, ended.output
    for gaps in json.loads(out.read_text()):
        assert len(gaps) == 6  # layouts and methods
        for name, (from_sums, from_base) in gaps.items():
            assert from_sums < 1e-5 < 0.1 < from_base, name
