"""Models with experts, latent attention, multi-token prediction and uneven pipelines, and how Megatron spreads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from hybrid_engine.config import ActorConfig
from tests.harness.core_versions import INSTALLED
from tests.zoo.families import YARN
from tests.zoo.megatron_models import DENSE_FLOAT32
from tests.zoo.tiny_models import build_hf_model, save_model, token_batch

# name -> (family, what differs from the family's sizes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v2": ("deepseek_v2", {"rope_parameters": YARN}),
    "deepseek_v2, plain queries, groups": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, three experts, yarn": ("deepseek_v3", {"num_experts_per_tok": 3, "rope_parameters": YARN}),
    "deepseek_v3, one mtp layer": ("deepseek_v3", {"mtp_layers": 1}),
    "deepseek_v3, two mtp layers": ("deepseek_v3", {"mtp_layers": 2}),
    "qwen3, three layers": ("qwen3", {"num_hidden_layers": 3}),
    "qwen3, four layers, tied": ("qwen3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Case:
    """A model and how Megatron spreads it; data parallel ranks are what remains."""

    model: str
    actor: dict[str, Any] = field(default_factory=dict)

    @property
    def num_mtp_layers(self) -> int:
        return MODELS[self.model][1].get("mtp_layers", 0)

    def config(self) -> ActorConfig:
        optimizer = {"lr": 3e-3, "weight_decay": WEIGHT_DECAY, "adam_eps": ADAM_EPS}
        return ActorConfig(**{**DENSE_FLOAT32, **self.actor, "optimizer": optimizer})


# With a usual epsilon Adam turns the rounding of tiny gradients into whole steps.
ADAM_EPS = 1e-3
WEIGHT_DECAY = 0.1

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
FIRST1, LAST1 = {"num_layers_in_first_pipeline_stage": 1}, {"num_layers_in_last_pipeline_stage": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PLAIN = {"use_distributed_optimizer": False}

CASES: dict[int, dict[str, Case]] = {
    2: {
        "qwen3_moe ep2": Case("qwen3_moe", EP2),
        "qwen3_moe tp2 etp2": Case("qwen3_moe", TP2),
        "qwen3_moe tp2 ep2 etp1, plain optimizer": Case("qwen3_moe", {**TP2, **EP2, **ETP1, **PLAIN}),
        "qwen3_moe dense layers, ep2, plain optimizer": Case("qwen3_moe, some layers dense", {**EP2, **PLAIN}),
        "qwen2_moe tp2 ep2 etp1": Case("qwen2_moe", {**TP2, **EP2, **ETP1}),
        "mixtral pp2": Case("mixtral", PP2),
        "mixtral ep2, overlap": Case("mixtral", {**EP2, **OVERLAP}),
        "deepseek_v2 tp2": Case("deepseek_v2", TP2),
        "deepseek_v2, plain queries tp2 ep2 etp1": Case("deepseek_v2, plain queries, groups", {**TP2, **EP2, **ETP1}),
        "deepseek_v3 tp2": Case("deepseek_v3", TP2),
        "deepseek_v3 pp2, first 1": Case("deepseek_v3, three experts, yarn", {**PP2, **FIRST1}),
        "deepseek_v3 mtp tp2 ep2 etp1": Case("deepseek_v3, two mtp layers", {**TP2, **EP2, **ETP1}),
        "deepseek_v3 mtp pp2, last 1": Case("deepseek_v3, two mtp layers", {**PP2, **LAST1}),
        "deepseek_v3 mtp pp2, layout": Case(
            "deepseek_v3, two mtp layers", {**PP2, "pipeline_model_parallel_layout": "Ettt|mmL"}
        ),
        "qwen3 pp2, first 1": Case("qwen3, three layers", {**PP2, **FIRST1}),
        "qwen3 pp2, both ends count": Case(
            "qwen3, four layers, tied",
            {
                **PP2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
        "qwen3 pp2 vpp2, layout": Case(
            "qwen3, four layers, tied", {**PP2, "pipeline_model_parallel_layout": "Et|tt|t|L"}
        ),
        "qwen3 pp2 vpp2, ends do nothing": Case(
            "qwen3, four layers, tied", {**PP2, **VPP2, "noop_layers": (0, 4, 6, 7)}
        ),
        "deepseek_v3 pp2, middle does nothing": Case("deepseek_v3", {**PP2, "noop_layers": (1,)}),
    },
    4: {
        "qwen3_moe tp2 ep2 etp2": Case("qwen3_moe", {**TP2, **EP2, **ETP2}),
        "mixtral tp2 pp2 ep2 etp1": Case("mixtral", {**TP2, **PP2, **EP2, **ETP1}),
        "deepseek_v3 mtp pp2 ep2, last 1": Case("deepseek_v3, two mtp layers", {**PP2, **EP2, **LAST1}),
        "deepseek_v3 mtp pp4, mtp by itself": Case(
            "deepseek_v3, two mtp layers",
            {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|tt|mm|L"},
        ),
        "deepseek_v3 tp4 ep2 etp2": Case(
            "deepseek_v3", {**TP2, "tensor_model_parallel_size": 4, **EP2, **ETP2, **OVERLAP}
        ),
        "qwen3 pp4, nothing in the middle": Case(
            "qwen3, three layers",
            {"pipeline_model_parallel_size": 4, "noop_layers": (1, 3, 4), **FIRST1, **LAST1},
        ),
    },
}
if Version("0.19.0") <= INSTALLED:
    CASES[2] |= {
        "qwen3 HybridModel pp2": Case("qwen3, three layers", {**PP2, "hybrid_layer_pattern": "*-*|-*-"}),
        "qwen3 HybridModel pp2 vpp2": Case("qwen3, four layers, tied", {**PP2, "hybrid_layer_pattern": "*-|*|-*-|*-"}),
        "qwen3_moe HybridModel tp2 ep2 etp1": Case("qwen3_moe", {**TP2, **EP2, **ETP1, "hybrid_layer_pattern": "*E*E"}),
        "deepseek_v2 HybridModel tp2": Case("deepseek_v2", {**TP2, "hybrid_layer_pattern": "+-+E+E"}),
    }
"""Number of ranks -> what this megatron-core can run there."""
BATCH, LENGTH = 4, 12


def reference_model(model: str) -> torch.nn.Module:
    """transformers' model."""
    family, changes = MODELS[model]
    return build_hf_model(family, **changes)


def save_models(directory: Path) -> dict[str, Path]:
    """Every model as a checkpoint with the weights of `reference_model`."""
    return {
        name: save_model(directory / str(number), family, **changes)
        for number, (name, (family, changes)) in enumerate(MODELS.items())
    }


def make_batch() -> dict[str, torch.Tensor]:
    return token_batch(3, BATCH, LENGTH)


def close(found: torch.Tensor, expected: torch.Tensor, where: str, atol: float) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0, msg=lambda message: f"{where}: {message}")
