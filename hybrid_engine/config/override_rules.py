"""Rules of `actor_config.overrides`: which fields of megatron-core's configuration may be set there, and to what.

    field              of the installed megatron-core, with a value of its type: dtypes and members of enums by name
                       neither a key of ours, nor one that the model, the layout or TrainEngine decides
                       not refused (megatron_patches/review)

What decides where weights lie is no override: `plan`, the other rules and the live model would say different things.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from importlib.util import find_spec
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

import pydantic

from hybrid_engine.config.keys import ActorConfig
from hybrid_engine.config.optimizer_keys import OptimizerConfig
from hybrid_engine.config.rules import Constraint, Finding, TrainingContext
from hybrid_engine.config.training_rules import MEGATRON, RECOMPUTATION
from hybrid_engine.config.values import Dtype
from hybrid_engine.errors import Violation, nearest, shortened

if TYPE_CHECKING:
    from megatron_patches.review.fields import DeclaredFields

CLASSES: Final = {
    "transformer": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
}
"""Key of `overrides` -> megatron-core's class."""

_KEYS: Final = {
    **dict.fromkeys(("bf16", "fp16", "pipeline_dtype"), "actor_config.params_dtype"),
    "is_hybrid_model": "actor_config.hybrid_layer_pattern",
    "min_lr": "actor_config.optimizer.schedule.min_lr",
}
"""Fields that another key of ours decides, by another name."""

_SET_HERE: Final = {
    "optimizer": "Adam is what is built, offloaded and saved here",
    "batch_p2p_comm": "it follows from the pipeline's schedule",
    "overlap_p2p_comm": "it follows from the pipeline's schedule",
    "calculate_per_token_loss": "TrainEngine takes the mean that a loss function returns",
    "num_distributed_optimizer_instances": "process groups are made for one",
    "overlap_moe_expert_parallel_comm": "TrainEngine runs a micro batch as a whole",
    "overlap_param_gather_with_optimizer_step": "TrainEngine builds one optimizer for all chunks",
    "tp_comm_overlap": "its buffers are made by Megatron-LM's initialize_megatron, which does not run here",
    "qk_clip": "TrainEngine takes no steps after those of the optimizer",
}
"""Fields that TrainEngine builds on."""


@dataclass(frozen=True)
class Override:
    """A field that is given a value.

    Attributes:
        part: key of `overrides`, see `CLASSES`.
        field: megatron-core's name.
        value: as the configuration gives it.
    """

    part: str
    field: str
    value: pydantic.JsonValue

    @property
    def key(self) -> str:
        return f"actor_config.overrides.{self.part}.{self.field}"

    def violation(self, problem: str, remedy: str) -> Violation:
        return Violation(self.key, problem, remedy)


@cache
def _declared() -> DeclaredFields | None:
    """Fields of the installed megatron-core; None without one, or without torch: nothing can be trained there."""
    if find_spec("torch") is None:
        return None
    from megatron_patches.review import declared_fields

    return declared_fields() or None


def _given(context: TrainingContext) -> Iterator[tuple[Override, DeclaredFields]]:
    """Every override, with the fields of the megatron-core that it is for."""
    overrides = context.actor.overrides
    given = [Override(part, field, value) for part in CLASSES for field, value in getattr(overrides, part).items()]
    if given and (declared := _declared()) is not None:
        yield from ((override, declared) for override in given)


def _own_key(part: str, field: str) -> str | None:
    """The key of ours that decides a field."""
    if part == "optimizer" and field in OptimizerConfig.model_fields:
        return f"actor_config.optimizer.{field}"
    return f"actor_config.{field}" if field in ActorConfig.model_fields else _KEYS.get(field)


def _decided_elsewhere(override: Override) -> Finding | None:
    """What decides a field instead, and what to do about it; None where an override may."""
    from megatron_patches.review import FUNCTION_FIELDS, READ_OFF_THE_MODEL

    field = override.field
    if field in _SET_HERE:
        return _SET_HERE[field], "Leave it out"
    if key := _own_key(override.part, field):
        return "a key of its own decides it", f"Use {key}"
    if override.part != "transformer":
        return None
    if field in FUNCTION_FIELDS:
        return "it follows from the model, whose config.json vLLM goes by, too", "Leave it out, or change config.json"
    if field in READ_OFF_THE_MODEL:
        return "it decides how weights are laid out, which follows from the model and from other keys", "Leave it out"
    return None


def _known(context: TrainingContext) -> Iterator[Violation]:
    """Unknown fields, and values of another type than the field's."""
    for override, declared in _given(context):
        section = CLASSES[override.part]
        field = declared.get((section, override.field))
        if field is None:
            close = nearest(override.field, [name for owner, name in declared if owner == section])
            problem = f"{section} of the installed megatron-core has no such field"
            yield override.violation(problem, f"Did you mean {close}" if close else "Leave it out")
        elif _decided_elsewhere(override) is None:
            wrong = type_problem(override.value, field.type, field.default)
            if wrong is not None:
                yield override.violation(f"{shortened(override.value)}: {wrong}", _remedy(override.value))


def _remedy(value: pydantic.JsonValue) -> str:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return "Correct the value"
        return "YAML takes 1e-5 and quoted numbers for text; write 1.0e-5"
    return "Correct the value"


def _left_alone(context: TrainingContext) -> Iterator[Violation]:
    for override, declared in _given(context):
        is_known = (CLASSES[override.part], override.field) in declared
        if is_known and (found := _decided_elsewhere(override)):
            yield override.violation(*found)


def _accepted(context: TrainingContext) -> Iterator[Violation]:
    for override, declared in _given(context):
        section = CLASSES[override.part]
        if (section, override.field) not in declared or _decided_elsewhere(override):
            continue
        from megatron_patches.review import refusal

        if found := refusal(section, override.field, override.value):
            yield override.violation(found.problem, found.remedy)


def _dispatched(context: TrainingContext) -> Iterator[Violation]:
    field, ep = "moe_token_dispatcher_type", context.train_sizes.expert
    if ep > 1 and context.actor.overrides.transformer.get(field) == "allgather":
        problem = f"allgather with EP {ep}: it takes as many tokens from every rank, but each cuts its own padding"
        yield Override("transformer", field, "allgather").violation(problem, "Use alltoall, which exchanges counts")


_PLAIN: Final[dict[Any, Any]] = {
    **{kind: kind for kind in (bool, int, float, str, NoneType, ...)},
    list: list[pydantic.JsonValue],
    dict: dict[str, pydantic.JsonValue],
}


class _NotAValueError(Exception):
    """No configuration file can hold an object of this type."""


def type_problem(value: pydantic.JsonValue, annotation: Any, default: object) -> str | None:
    """What is wrong with `value` for a field of this type and default; None if nothing is."""
    try:
        expected = _json_type(annotation)
    except _NotAValueError as error:
        return f"the field takes {error}, which a configuration file cannot give"
    if default is None:  # also where the annotation forgets to say so
        expected |= None
    adapter = pydantic.TypeAdapter(expected, config=pydantic.ConfigDict(allow_inf_nan=False))
    try:
        adapter.validate_json(json.dumps(value), strict=True)  # JSON: a list may stand for a tuple
    except pydantic.ValidationError as error:
        return "; ".join(dict.fromkeys(found["msg"] for found in error.errors(include_url=False)))
    return None


def _json_type(kind: Any) -> Any:
    """The type of what a file gives for a field of this one."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return kind
    if origin in (Union, UnionType):
        return reduce(or_, map(_json_type, inner))
    if origin in (list, tuple, dict):
        return origin[tuple(map(_json_type, inner))]
    if isinstance(kind, enum.EnumType):
        return Literal[tuple(kind.__members__)]
    if f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}" == "torch.dtype":
        return Dtype
    if kind in _PLAIN:
        return _PLAIN[kind]
    raise _NotAValueError(getattr(kind, "__name__", str(kind)))


OVERRIDES: list[Constraint[TrainingContext]] = [
    Constraint(
        "actor_config.overrides",
        "overrides are fields of the installed megatron-core's configuration classes, with values of their types.",
        _known,
    ),
    Constraint(
        "actor_config.overrides",
        "overrides leave alone what the model, the layout or another key decides.",
        _left_alone,
    ),
    Constraint(
        "actor_config.overrides",
        "overrides are fields that go with a switch, by megatron_fields.md.",
        _accepted,
    ),
    Constraint(
        "actor_config.overrides",
        "With EP > 1, moe_token_dispatcher_type is not allgather.",
        _dispatched,
        computing="here",
    ),
]
MEGATRON_TRAINS = (*MEGATRON, *RECOMPUTATION, *OVERRIDES)
"""All rules of `actor_config` that are Megatron's."""
