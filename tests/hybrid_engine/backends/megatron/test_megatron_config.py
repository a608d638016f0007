"""Megatron's configuration objects: what overrides become in them, and what Megatron itself refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from hybrid_engine.backends.megatron.megatron_config import MegatronConfigs, megatron_configs, train_sizes
from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from tests.zoo.families import tiny_config
from tests.zoo.megatron_models import DENSE_FLOAT32

pytestmark = pytest.mark.slow  # imports Megatron


def configs_of(**actor: Any) -> MegatronConfigs:
    config = ActorConfig(**{**DENSE_FLOAT32, **actor})
    return megatron_configs(config, train_sizes(config, 1), table_for(tiny_config("llama")))


def test_overrides_come_last_and_name_dtypes_and_members() -> None:
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


def test_without_overrides_every_field_is_what_it_was() -> None:
    plain, again = (
        {name: value for name, value in vars(configs.transformer).items() if not callable(value)}
        for configs in (configs_of(), configs_of(overrides={"transformer": {"hidden_dropout": 0.0}}))
    )
    assert plain == again


def test_what_megatron_refuses_is_said_of_all_its_configurations_at_once() -> None:
    refused = {
        "transformer": {"cpu_offloading": True, "cpu_offloading_num_layers": 99},
        "ddp": {"reuse_grad_buf_for_mxfp8_param_ag": True},
    }
    with pytest.raises(ConfigError) as caught:
        configs_of(overrides=refused)
    found = {violation.key: violation.problem for violation in caught.value.findings}
    assert found.keys() == {"actor_config.overrides.transformer", "actor_config.overrides.ddp"}
    assert (
        "ValueError: CPU offloading can be done only for layers less than"
        in found["actor_config.overrides.transformer"]
    )


def test_a_field_of_models_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="TransformerConfig has no cache_mla_latents"):
        configs_of(overrides={"transformer": {"cache_mla_latents": True}})


def test_what_only_transformer_engine_recomputes_is_refused_without() -> None:
    with pytest.raises(ConfigError, match="layernorm, mla_up_proj: megatron-core recomputes it with"):
        configs_of(recompute_granularity="selective", recompute_modules=["mlp", "layernorm", "mla_up_proj"])
