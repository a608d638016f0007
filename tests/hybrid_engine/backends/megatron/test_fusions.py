"""Which of Megatron's fused kernels are on, where a GPU and Transformer Engine are said to be there."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig

from hybrid_engine.backends.megatron import fusions, megatron_config
from hybrid_engine.config import ActorConfig
from hybrid_engine.models import table_for
from tests.zoo.families import tiny_config
from tests.zoo.megatron_models import DENSE_FLOAT32

pytestmark = pytest.mark.slow  # imports Megatron

FUSED = ("bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion", "apply_rope_fusion")


def config_of(family: str) -> TransformerConfig:
    actor = ActorConfig(**DENSE_FLOAT32)
    return megatron_config.transformer_config(
        actor, megatron_config.train_sizes(actor, 1), table_for(tiny_config(family))
    )


def on(config: TransformerConfig) -> list[str]:
    return [name for name in (*FUSED, "masked_softmax_fusion", "persist_layer_norm") if getattr(config, name)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Megatron's configuration alone; nothing is built on it. Without apex."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *_: None)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"]),
        ("qwen3_moe", ["bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"]),
        ("gemma2", ["bias_dropout_fusion", "apply_rope_fusion"]),  # GeGLU
        ("glm", ["bias_activation_fusion", "bias_dropout_fusion"]),  # interleaved
        ("deepseek_v3", ["bias_activation_fusion", "bias_dropout_fusion"]),  # latent
    ],
)
def test_with_transformer_engine(gpu: None, monkeypatch: pytest.MonkeyPatch, family: str, expected: list[str]) -> None:
    monkeypatch.setattr(megatron_config, "has_transformer_engine", lambda: True)
    config = config_of(family)
    assert on(config) == expected
    assert config.recompute_granularity is None
    assert layers._grad_accum_fusion_available or not config.gradient_accumulation_fusion  # or no output layer


@pytest.mark.parametrize("has_apex", [False, True])
def test_without_transformer_engine_scores_are_computed_again(
    gpu: None, monkeypatch: pytest.MonkeyPatch, has_apex: bool
) -> None:
    real = importlib.util.find_spec
    named = {"fused_weight_gradient_mlp_cuda": real("torch") if has_apex else None, "transformer_engine": None}
    monkeypatch.setattr(fusions, "find_spec", lambda name: named[name] if name in named else real(name))
    monkeypatch.setattr(megatron_config, "find_spec", lambda name: named[name] if name in named else real(name))
    config = config_of("llama")
    accumulating = ["gradient_accumulation_fusion"] if has_apex else []
    assert on(config) == ["bias_activation_fusion", "bias_dropout_fusion", *accumulating]
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["core_attn"])


def test_on_the_cpu_nothing_is_fused() -> None:
    config = config_of("llama")
    assert on(config) == []
    assert config.recompute_granularity is None
