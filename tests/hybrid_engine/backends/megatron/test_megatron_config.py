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
from hybrid_engine.backends.megatron.megatron_config import MegatronConfigs, megatron_configs, train_sizes
from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from tests.harness.errors import has_violations
from tests.zoo.families import tiny_config
from tests.zoo.megatron_models import actor_config

pytestmark = pytest.mark.slow  # imports Megatron


def configs_of(**actor: Any) -> MegatronConfigs:
    config = actor_config(**actor)
    return megatron_configs(config, train_sizes(config, 1), table_for(tiny_config("llama")))


def test_overrides_win_and_convert_dtypes_and_enum_members() -> None:
    configs = configs_of(
        overrides={
            "transformer": {
                "attention_backend": "unfused",
                "attention_dropout": 0.1,
                "autocast_dtype": "bfloat16",
                "bias_dropout_fusion": True,
            },
            "optimizer": {"decoupled_lr": 1e-3},
            "ddp": {"grad_reduce_in_fp32": False},
        }
    )
    assert configs.transformer.attention_backend is AttnBackend.unfused
    assert configs.transformer.attention_dropout == 0.1
    assert configs.transformer.autocast_dtype is torch.bfloat16
    assert configs.transformer.bias_dropout_fusion is True
    assert configs.optimizer.decoupled_lr == 1e-3
    assert configs.ddp.grad_reduce_in_fp32 is False


def test_an_override_by_the_default_changes_no_field() -> None:
    plain, again = (
        {name: value for name, value in vars(configs.transformer).items() if not callable(value)}
        for configs in (configs_of(), configs_of(overrides={"transformer": {"hidden_dropout": 0.0}}))
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
    with pytest.raises(ConfigError, check=expected) as caught:
        configs_of(overrides=refused)
    # Megatron's own sentence.
    assert "ValueError: CPU offloading can be done only for layers less than" in str(caught.value)


def test_an_override_of_another_model_kind_is_refused() -> None:
    expected = has_violations(("actor_config.overrides.transformer", "refused-by-megatron"))
    with pytest.raises(ConfigError, match="cache_mla_latents", check=expected):
        configs_of(overrides={"transformer": {"cache_mla_latents": True}})


def test_recomputation_that_needs_transformer_engine_is_refused() -> None:
    expected = has_violations(("actor_config.recompute_modules", "needs-transformer-engine"))
    with pytest.raises(ConfigError, match="layernorm, mla_up_proj", check=expected):
        configs_of(recompute_granularity="selective", recompute_modules=["mlp", "layernorm", "mla_up_proj"])


FUSED = ("bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion", "apply_rope_fusion")


def config_of(family: str) -> TransformerConfig:
    actor = actor_config()
    return megatron_config.transformer_config(
        actor, megatron_config.train_sizes(actor, 1), table_for(tiny_config(family))
    )


def enabled_fusions(config: TransformerConfig) -> list[str]:
    return [name for name in (*FUSED, "masked_softmax_fusion", "persist_layer_norm") if getattr(config, name)]


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
    config = config_of(family)
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
    specs = {"fused_weight_gradient_mlp_cuda": real("torch") if has_apex else None, "transformer_engine": None}
    monkeypatch.setattr(megatron_config, "find_spec", lambda name: specs[name] if name in specs else real(name))
    config = config_of("llama")
    accumulating = ["gradient_accumulation_fusion"] if has_apex else []
    assert enabled_fusions(config) == ["bias_activation_fusion", "bias_dropout_fusion", *accumulating]
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["core_attn"])


def test_nothing_is_fused_on_the_cpu() -> None:
    config = config_of("llama")
    assert enabled_fusions(config) == []
    assert config.recompute_granularity is None
