"""Megatron's configuration objects: overrides, refusals and fused kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from hybrid_engine.backends.megatron import megatron_config
from hybrid_engine.backends.megatron.megatron_config import (
    MegatronConfigs,
    megatron_configs,
    train_sizes,
)
from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from tests.harness.errors import has_violation, has_violations
from tests.zoo.families import tiny_config
from tests.zoo.megatron_models import actor_config

pytestmark = pytest.mark.slow  # imports Megatron


def configs_of(family: str = "llama", **actor: Any) -> MegatronConfigs:
    config = actor_config(**actor)
    return megatron_configs(config, train_sizes(config, 1), table_for(tiny_config(family)))


def test_overrides_win_and_convert_dtypes_and_enum_members() -> None:
    transformer = {"attention_dropout": 0.1, "bias_dropout_fusion": True}
    optimizer = {"decoupled_lr": 1e-3}
    ddp = {"grad_reduce_in_fp32": False}
    as_text = {"attention_backend": "unfused", "autocast_dtype": "bfloat16"}
    configs = configs_of(
        overrides={"transformer": {**transformer, **as_text}, "optimizer": optimizer, "ddp": ddp},
    )
    assert vars(configs.transformer).items() >= transformer.items()
    assert vars(configs.optimizer).items() >= optimizer.items()
    assert vars(configs.ddp).items() >= ddp.items()
    assert configs.transformer.attention_backend is AttnBackend.unfused
    assert configs.transformer.autocast_dtype is torch.bfloat16


def test_an_override_by_the_default_changes_no_field() -> None:
    plain, again = (
        {name: value for name, value in vars(configs.transformer).items() if not callable(value)}
        for configs in (
            configs_of(),
            configs_of(overrides={"transformer": {"hidden_dropout": 0.0}}),
        )
    )
    assert plain == again


def test_refusals_by_megatron_are_collected_over_all_configurations() -> None:
    refused = {
        "transformer": {"cpu_offloading": True, "cpu_offloading_num_layers": 99},
        "ddp": {"reuse_grad_buf_for_mxfp8_param_ag": True},
    }
    expected = has_violations(
        ("actor_config.overrides.transformer", "refused-by-megatron"),
        ("actor_config.overrides.ddp", "refused-by-megatron"),
    )
    with pytest.raises(
        ConfigError, match="ValueError: CPU offloading can be done only for layers", check=expected
    ):
        configs_of(overrides=refused)


def test_an_override_of_another_model_kind_is_refused() -> None:
    expected = has_violation(
        "actor_config.overrides.transformer", "refused-by-megatron", "cache_mla_latents"
    )
    with pytest.raises(ConfigError, check=expected):
        configs_of(overrides={"transformer": {"cache_mla_latents": True}})


def test_recomputation_that_needs_transformer_engine_is_refused() -> None:
    expected = has_violation(
        "actor_config.recompute_modules", "needs-transformer-engine", "layernorm, mla_up_proj"
    )
    with pytest.raises(ConfigError, check=expected):
        configs_of(
            recompute_granularity="selective", recompute_modules=["mlp", "layernorm", "mla_up_proj"]
        )


FUSED = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
)


def enabled_fusions(config: TransformerConfig) -> list[str]:
    return [
        name
        for name in (*FUSED, "masked_softmax_fusion", "persist_layer_norm")
        if getattr(config, name)
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Megatron's configuration see a GPU, without apex; nothing is built on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *_: None)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"]),
        ("qwen3_moe", ["bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"]),
        ("gemma2", ["bias_dropout_fusion", "apply_rope_fusion"]),  # GeGLU has no fused activation
        ("glm", ["bias_activation_fusion", "bias_dropout_fusion"]),  # interleaved rotary dimensions
        ("deepseek_v3", ["bias_activation_fusion", "bias_dropout_fusion"]),  # latent attention
    ],
)
def test_fusions_with_transformer_engine(
    gpu: None, monkeypatch: pytest.MonkeyPatch, family: str, expected: list[str]
) -> None:
    monkeypatch.setattr(megatron_config, "has_transformer_engine", lambda: True)
    config = configs_of(family).transformer
    assert enabled_fusions(config) == expected
    assert config.recompute_granularity is None
    # Otherwise Megatron refuses to build the output layer.
    assert layers._grad_accum_fusion_available or not config.gradient_accumulation_fusion


@pytest.mark.parametrize("has_apex", [False, True])
def test_without_transformer_engine_core_attention_is_recomputed(
    gpu: None, monkeypatch: pytest.MonkeyPatch, has_apex: bool
) -> None:
    real = importlib.util.find_spec
    # Any spec shows that the package is installed; None, that it is not.
    specs = {
        "fused_weight_gradient_mlp_cuda": real("torch") if has_apex else None,
        "transformer_engine": None,
    }
    monkeypatch.setattr(
        megatron_config, "find_spec", lambda name: specs[name] if name in specs else real(name)
    )
    config = configs_of().transformer
    accumulating = ["gradient_accumulation_fusion"] if has_apex else []
    assert enabled_fusions(config) == [
        "bias_activation_fusion",
        "bias_dropout_fusion",
        *accumulating,
    ]
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["core_attn"])


def test_nothing_is_fused_on_the_cpu() -> None:
    config = configs_of().transformer
    assert enabled_fusions(config) == []
    assert config.recompute_granularity is None
