"""What may be set of Megatron's own configuration, in a configuration file."""

from __future__ import annotations

import enum
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, Union

import pytest
import torch

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, override_rules
from hybrid_engine.config.loading import broken_rules
from hybrid_engine.config.override_rules import Override, type_problem
from hybrid_engine.config.rules import JobContext, TrainingContext
from hybrid_engine.models import table_for
from tests.zoo.families import tiny_config

if find_spec("megatron") is None:
    pytest.skip("megatron-core says what its fields are", allow_module_level=True)


class Backend(enum.Enum):
    flash = 1
    auto = 2


TABLE = table_for(tiny_config("qwen3"))


def problems(overrides: dict[str, Any], generate: GenerateConfig | None = None) -> dict[str, str]:
    """Key below actor_config.overrides -> what is wrong and what to do."""
    actor = ActorConfig(overrides=overrides)
    context = TrainingContext(actor, TABLE, 1) if generate is None else JobContext(actor, TABLE, 1, generate)
    prefix = "actor_config.overrides."
    return {
        found.key.removeprefix(prefix): f"{found.problem}. {found.remedy}"
        for found in broken_rules(context)
        if found.key.startswith(prefix)
    }


SOUND = {
    "transformer": {
        "attention_dropout": 0.1,
        "attention_backend": "unfused",
        "autocast_dtype": "bfloat16",
        "cpu_offloading": False,
        "cp_comm_type": ["p2p"],
        "deallocate_pipeline_outputs": True,
        "init_method_std": 1,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_dtype": None,
        "transformer_impl": "local",
    },
    "optimizer": {"decoupled_lr": 1.0e-5, "loss_scale": None, "decoupled_weight_decay": False},
    "ddp": {"bucket_size": 40_000_000, "grad_reduce_in_fp32": False, "align_param_gather": True},
}


def test_what_leaves_weights_where_they_are_may_be_set() -> None:
    assert problems(SOUND) == {}
    assert problems(SOUND, GenerateConfig()) == {}


def test_everything_that_is_wrong_is_said_at_once() -> None:
    found = problems(
        {
            "transformer": {
                "attention_backend": "flas",
                "attention_dropout": True,
                "autocast_dtype": "bf16",
                "fp8": "hybrid",
                "hidden_dropout": "1e-1",
                "hiden_dropout": 0.1,
                "init_method": "normal",
                "num_layers": 3,
                "moe_grouped_gemm": True,
                "recompute_granularity": "full",
                "rotary_interleaved": True,
                "calculate_per_token_loss": True,
            },
            "optimizer": {"min_lr": 0.1, "optimizer": "sgd"},
            "ddp": {"bucket_size": 1.5, "use_distributed_optimizer": False},
        }
    )
    assert {key: part for key, part in EXPECTED.items() if part not in found.get(key, "")} == {}
    assert found.keys() == EXPECTED.keys()


EXPECTED = {
    "transformer.attention_backend": "'flas': Input should be 'flash', 'fused', 'unfused', 'local' or 'auto'",
    "transformer.attention_dropout": "True: Input should be a valid number",
    "transformer.autocast_dtype": "Input should be 'bfloat16', 'float16' or 'float32'",
    "transformer.fp8": "8-bit copies of the weights, which a switch does not offload. Leave it at None",
    "transformer.hidden_dropout": "write 1.0e-5",
    "transformer.hiden_dropout": "Did you mean hidden_dropout",
    "transformer.init_method": "takes Callable, which a configuration file cannot give",
    "transformer.num_layers": "follows from the model",
    "transformer.moe_grouped_gemm": "how weights are laid out",
    "transformer.recompute_granularity": "Use actor_config.recompute_granularity",
    "transformer.rotary_interleaved": "follows from the model",
    "transformer.calculate_per_token_loss": "takes the mean",
    "optimizer.min_lr": "Use actor_config.optimizer.schedule.min_lr",
    "optimizer.optimizer": "Adam is what is built",
    "ddp.bucket_size": "Input should be a valid integer",
    "ddp.use_distributed_optimizer": "Use actor_config.use_distributed_optimizer",
}


def test_keys_that_are_pointed_to_exist() -> None:
    for key in override_rules._KEYS.values():
        section: Any = HybridConfig
        for name in key.split("."):
            options = (section, *getattr(section, "__args__", ()))
            fields = next(option.model_fields for option in options if hasattr(option, "model_fields"))
            assert name in fields, key
            section = fields[name].annotation


@pytest.mark.parametrize(
    ("annotation", "value", "is_wrong"),
    [
        (int, 2.0, True),
        (float, 2, False),
        (float, float("inf"), True),
        (float | None, None, False),
        (Union[str, list[str]], ["a", 1], True),  # noqa: UP007  # as Megatron writes it
        (int | list[int] | None, [1, 2], False),
        (tuple[str, ...], ["a"], False),
        (tuple[int, int] | None, [1], True),
        (list[int] | None, None, False),
        (Literal["a", "b"], "c", True),
        (Literal[2, 3] | None, 3, False),
        (dict[str, int] | None, {"a": "b"}, True),
        (list, [1, "a"], False),
        (torch.dtype, "float32", False),
        (Backend, "flash", False),
        (Backend, "none", True),
        (Override | None, {}, True),
        (Callable[[int], int], "f", True),
    ],
)
def test_values_are_compared_with_annotations(annotation: Any, value: Any, is_wrong: bool) -> None:
    problem = type_problem(value, annotation, "a default")
    assert (problem is not None) == is_wrong, problem


def test_an_int_defaults_to_none_where_its_annotation_forgets_to_say_so() -> None:
    assert [type_problem(None, int, default) is None for default in (None, 3)] == [True, False]
