"""What may be set of Megatron's own configuration, in a configuration file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, override_rules
from hybrid_engine.config.constraints import broken_rules
from hybrid_engine.config.override_types import type_problem
from hybrid_engine.config.rules import JobContext, TrainingContext
from hybrid_engine.models import table_for
from tests.zoo.families import tiny_config

if find_spec("megatron") is None:
    pytest.skip("megatron-core's fields are read from its sources", allow_module_level=True)

from megatron_patches.review import sources
from megatron_patches.review.verdicts import review_of, reviewed_versions

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


@pytest.fixture
def _with_a_new_field(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the next megatron-core may have one."""
    installed = sources.installed_sources()
    assert installed is not None
    fields = installed.fields()
    fields.append(sources.DeclaredField("TransformerConfig", "weights_elsewhere", "bool", False, "", ""))
    monkeypatch.setattr(sources.CoreSources, "fields", lambda self: fields)
    override_rules._core.cache_clear()
    yield
    override_rules._core.cache_clear()


@pytest.mark.usefixtures("_with_a_new_field")
def test_what_nobody_has_reviewed_must_be_allowed() -> None:
    new = {"transformer": {"weights_elsewhere": True}}
    assert "was not reviewed" in problems(new, GenerateConfig())["transformer.weights_elsewhere"]
    assert problems(new, GenerateConfig(allow_unreviewed=["weights_elsewhere"])) == {}
    assert problems({"transformer": {"weights_elsewhere": False}}, GenerateConfig()) == {}


@pytest.mark.parametrize("version", reviewed_versions())
def test_every_field_that_is_read_off_the_live_model_is_decided_elsewhere(version: str) -> None:
    """But for those that are known to leave planning alone: a plan that knows nothing of them would be wrong."""
    review = review_of(version)
    core = override_rules._Core(review, version, {}, None)
    context = TrainingContext(ActorConfig(), TABLE, 1)
    left = {
        field
        for part, section in override_rules.CLASSES.items()
        for field, found in review.sections[section].items()
        if found.verdict == "handled"
        and override_rules._decided_elsewhere(override_rules.Override(part, field, None), context, core) is None
    }
    assert left <= {"align_param_gather", "bucket_size", "num_buckets", "pad_buckets_for_high_nccl_busbw"}


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
        ("int", 2.0, True),
        ("float", 2, False),
        ("float", float("inf"), True),
        ("Optional[float]", None, False),
        ("Union[str, List[str]]", ["a", 1], True),
        ("Optional[Union[int, List[int]]]", [1, 2], False),
        ("Tuple[str, ...]", ["a"], False),
        ("Optional[Tuple[int, int]]", [1], True),
        ("list[int] | None", None, False),
        ("Literal['a', 'b']", "c", True),
        ("Optional[Literal[2, 3]]", 3, False),
        ("Optional[Dict[str, int]]", {"a": "b"}, True),
        ("torch.dtype", "float32", False),
        ("Backend", "flash", False),
        ("Backend", "none", True),
        ("RecipeConfig", {}, True),
        ("Callable[[int], int]", "f", True),
    ],
)
def test_values_are_compared_with_annotations(annotation: str, value: Any, is_wrong: bool) -> None:
    members = {"Backend": ("flash", "auto")}
    problem = type_problem(value, annotation, "a default", lambda name: members.get(name, ()))
    assert (problem is not None) == is_wrong, problem
