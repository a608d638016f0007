"""Rules of `actor_config.overrides`, fields of megatron-core's own configuration."""

from __future__ import annotations

import enum
import json
import re
from functools import cache
from importlib.util import find_spec
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

import pydantic

from hybrid_engine.config.keys import ActorConfig, Dtype, OptimizerConfig
from hybrid_engine.config.rules import Constraint, TrainingContext
from hybrid_engine.errors import Violation, Violations, nearest, shortened

if TYPE_CHECKING:
    from megatron_patches.refused_fields import DeclaredFields

CLASSES: Final = {
    "transformer": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
}
"""Key of `actor_config.overrides` -> megatron-core's class."""

_KEYS: Final = {
    **dict.fromkeys(("bf16", "fp16", "pipeline_dtype"), "actor_config.params_dtype"),
    "is_hybrid_model": "actor_config.hybrid_layer_pattern",
    "min_lr": "actor_config.optimizer.schedule.min_lr",
}
"""Megatron field -> configuration key of another name that decides it."""

_SET_HERE: Final = {
    "optimizer": "Adam is the only optimizer that is built, offloaded and saved here",
    "batch_p2p_comm": "it follows from the pipeline's schedule",
    "overlap_p2p_comm": "it follows from the pipeline's schedule",
    "calculate_per_token_loss": "TrainEngine takes the mean that a loss function returns",
    "num_distributed_optimizer_instances": "process groups are made for one",
    "overlap_moe_expert_parallel_comm": "TrainEngine runs a micro batch as a whole",
    "overlap_param_gather_with_optimizer_step": "TrainEngine builds one optimizer for all chunks",
    "tp_comm_overlap": (
        "Megatron-LM's initialize_megatron makes its buffers and does not run here"
    ),
    "defer_embedding_wgrad_compute": "TrainEngine computes logits in chunks of tokens",
    "qk_clip": "TrainEngine takes no steps after those of the optimizer",
}
"""Megatron field that TrainEngine relies on -> reason why it cannot be overridden."""


@cache
def _declared_fields() -> DeclaredFields | None:
    """Return the fields of the installed megatron-core; None without it or without torch."""
    if find_spec("torch") is None:
        return None
    from megatron_patches.refused_fields import declared_fields

    return declared_fields() or None


def _overrides(context: TrainingContext) -> Violations:
    for part in CLASSES:
        for name, value in getattr(context.actor.overrides, part).items():
            declared = _declared_fields()
            if declared is None:
                return  # without megatron-core nothing can be trained on this machine
            violation = _override_violation(part, name, value, declared)
            if violation is not None:
                yield violation


def _override_violation(
    part: str,
    name: str,
    value: pydantic.JsonValue,
    declared: DeclaredFields,
) -> Violation | None:
    """Return the reason why megatron-core's field `name` cannot be set to `value`, or None."""
    from megatron_patches.refused_fields import FUNCTION_FIELDS, READ_OFF_THE_MODEL, refusal

    key = f"actor_config.overrides.{part}.{name}"
    section = CLASSES[part]
    field = declared.get((section, name))
    if field is None:
        close = nearest(name, [known for owner, known in declared if owner == section])
        return Violation(
            key,
            f"{section} of the installed megatron-core has no such field",
            f"Did you mean {close}?" if close else "Leave it out",
            code="unknown-field",
        )
    if name in _SET_HERE:
        return Violation(key, _SET_HERE[name], "Leave it out", code="set-by-train-engine")
    own_key = _own_key(part, name)
    if own_key:
        return Violation(
            key, "a configuration key decides it", f"Use {own_key}", code="has-own-key"
        )
    if part == "transformer" and name in (*FUNCTION_FIELDS, *READ_OFF_THE_MODEL):
        # An override would apply to the live model only, not to vLLM, `plan` and the other rules.
        return Violation(
            key,
            "it follows from the model's config.json, which vLLM also reads, and from other keys",
            "Leave it out, or change these",
            code="follows-from-model",
        )
    problem = type_problem(value, field.type, field.default)
    if problem:
        is_quoted = isinstance(value, str) and re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", value)
        return Violation(
            key,
            f"{shortened(value)}: {problem}",
            "YAML reads 1e-5 and quoted numbers as text; write 1.0e-5"
            if is_quoted
            else "Correct the value",
            code="wrong-value",
        )
    refused = refusal(section, name, value)
    if refused:
        return Violation(key, refused.problem, refused.remedy, code="breaks-switch")
    return None


def _own_key(part: str, field: str) -> str | None:
    """Return the configuration key that decides a field of megatron-core, or None."""
    if part == "optimizer" and field in OptimizerConfig.model_fields:
        return f"actor_config.optimizer.{field}"
    if field in ActorConfig.model_fields:
        return f"actor_config.{field}"
    return _KEYS.get(field)


def type_problem(value: pydantic.JsonValue, annotation: Any, default: object) -> str | None:
    """Return why `value` is invalid for a field of this type and default; None if it is valid.

    A configuration file gives dtypes and members of an enum by name.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    options = list(get_args(annotation)) if is_union else [annotation]
    if default is None:
        options.append(None)  # some fields default to None without `| None` in the annotation
    kinds = []
    for option in options:
        names = _names_of(option)
        kinds.append(Literal[tuple(names)] if names else option)
    config = pydantic.ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    expected: Any = Union[tuple(kinds)]  # noqa: UP007  # of a list
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(expected, config=config)
    try:
        # Strict validation of JSON accepts a list for a tuple; that of Python objects does not.
        adapter.validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError as error:
        messages = [item["msg"] for item in error.errors(include_url=False)]
        return "; ".join(dict.fromkeys(messages))
    return None


def _names_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the values of a dtype or an enum in a file; () for other types."""
    if isinstance(kind, enum.EnumType):
        return tuple(kind.__members__)
    # By name, because torch may be missing on a machine that only reads configurations.
    qualified = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    return get_args(Dtype) if qualified == "torch.dtype" else ()


OVERRIDES: list[Constraint[TrainingContext]] = [
    Constraint(
        "actor_config.overrides",
        "overrides are fields of the installed megatron-core's configuration classes, "
        "with values of their types, that are compatible with a switch and that neither the model, "
        "the layout nor another key decides.",
        _overrides,
    ),
    Constraint(
        "actor_config.overrides",
        "With expert_model_parallel_size > 1, moe_token_dispatcher_type is not allgather, which "
        "needs equal token counts: each rank cuts its padding.",
        lambda context: (
            context.train_sizes.expert > 1
            and context.actor.overrides.transformer.get("moe_token_dispatcher_type") == "allgather"
        ),
        code="unequal-token-counts",
        computing="here",
    ),
]
"""Rules of overrides, which are part of those for training with Megatron."""
