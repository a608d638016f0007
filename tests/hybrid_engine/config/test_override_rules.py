"""Fields of Megatron's own configuration that a configuration file may set."""

from __future__ import annotations

import enum
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, Union

import pytest
import torch

from hybrid_engine.config import ActorConfig, GenerateConfig
from hybrid_engine.config.loading import broken_rules
from hybrid_engine.config.override_rules import type_problem
from hybrid_engine.config.rules import JobContext, TrainingContext
from hybrid_engine.models import table_for
from tests.zoo.families import tiny_config

if find_spec("megatron") is None:
    pytest.skip("megatron-core defines the fields", allow_module_level=True)


class Backend(enum.Enum):
    flash = 1
    auto = 2


TABLE = table_for(tiny_config("qwen3"))


def wrong_keys(overrides: dict[str, Any]) -> set[str]:
    """Return the keys below actor_config.overrides that break a rule, with or without vLLM."""
    actor = ActorConfig(overrides=overrides)
    prefix = "actor_config.overrides."
    alone = TrainingContext(actor, TABLE, 1)
    job = JobContext(actor, TABLE, 1, GenerateConfig())
    keys = [violation.key for violation in broken_rules(alone) if violation.key.startswith(prefix)]
    assert set(keys) == {
        violation.key for violation in broken_rules(job) if violation.key.startswith(prefix)
    }
    return {key.removeprefix(prefix) for key in keys}


SOUND = {
    "transformer": {
        **{"attention_dropout": 0.1, "attention_backend": "unfused", "autocast_dtype": "bfloat16"},
        **{"cpu_offloading": False, "cp_comm_type": ["p2p"], "deallocate_pipeline_outputs": True},
        **{
            "init_method_std": 1,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_dtype": None,
        },
        "transformer_impl": "local",
    },
    "optimizer": {"decoupled_lr": 1.0e-5, "loss_scale": None, "decoupled_weight_decay": False},
    "ddp": {"bucket_size": 40_000_000, "grad_reduce_in_fp32": False, "align_param_gather": True},
}

WRONG = {
    "transformer": {
        **{
            "attention_backend": "flas",
            "attention_dropout": True,
            "autocast_dtype": "bf16",
            "fp8": "hybrid",
        },
        **{
            "hidden_dropout": "1e-1",
            "hiden_dropout": 0.1,
            "init_method": "normal",
            "num_layers": 3,
        },
        **{"moe_grouped_gemm": True, "recompute_granularity": "full", "rotary_interleaved": True},
        "calculate_per_token_loss": True,
    },
    "optimizer": {"min_lr": 0.1, "optimizer": "sgd"},
    "ddp": {"bucket_size": 1.5, "use_distributed_optimizer": False},
}


def test_only_overrides_that_do_not_move_weights_are_accepted() -> None:
    assert wrong_keys(SOUND) == set()
    assert wrong_keys(WRONG) == {
        f"{part}.{field}" for part, fields in WRONG.items() for field in fields
    }


@pytest.mark.parametrize(
    ("annotation", "value", "is_wrong"),
    [
        (int, 2.0, True),
        (float, 2, False),
        (float, float("inf"), True),
        (float | None, None, False),
        (Union[str, list[str]], ["a", 1], True),  # noqa: UP007  # Megatron's spelling
        (int | list[int] | None, [1, 2], False),
        (tuple[str, ...], ["a"], False),
        (tuple[int, int] | None, [1], True),
        (Literal["a", "b"], "c", True),
        (torch.dtype, "float32", False),
        (Backend, "flash", False),
        (Backend, "none", True),
        (torch.Tensor | None, {}, True),
        (Callable[[int], int], "f", True),
    ],
)
def test_values_are_compared_with_annotations(annotation: Any, value: Any, is_wrong: bool) -> None:
    problem = type_problem(value, annotation, "a default")
    assert (problem is not None) == is_wrong, problem


def test_an_int_field_with_default_none_accepts_none() -> None:
    assert type_problem(None, int, None) is None
    assert type_problem(None, int, 3)
