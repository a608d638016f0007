"""Rules of `actor_config.overrides`: which fields of megatron-core's configuration may be set there, and to what.

    field              known to the installed megatron-core              config/override_types.py: of its type
                       neither a key of ours, nor one that the model, the layout or TrainEngine decides
                       reviewed (megatron_patches/review), or in generate_config.allow_unreviewed

What decides where weights lie is no override: `plan`, the other rules and the live model would say different things.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import pydantic

from hybrid_engine.config.keys import ActorConfig
from hybrid_engine.config.optimizer_keys import OptimizerConfig
from hybrid_engine.config.override_types import type_problem
from hybrid_engine.config.rules import Constraint, Finding, JobContext, TrainingContext
from hybrid_engine.config.step_rules import RECOMPUTATION
from hybrid_engine.config.training_rules import MEGATRON
from hybrid_engine.errors import Violation, nearest, shortened

if TYPE_CHECKING:
    from megatron_patches.review.sources import CoreSources, DeclaredField
    from megatron_patches.review.verdicts import Review

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

_READ_AS_BUILT: Final = frozenset(
    {"align_param_gather", "bucket_size", "num_buckets", "pad_buckets_for_high_nccl_busbw"}
)
"""Of the fields that a switch reads off the live model, those of which neither a plan nor another rule knows."""


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


@dataclass(frozen=True)
class _Core:
    """What is known of the megatron-core that is installed; without one, of the last that was reviewed.

    Attributes:
        review: what was found about its fields.
        version: its release.
        declared: field by class and name; empty without one.
        sources: None without one.
    """

    review: Review
    version: str
    declared: Mapping[tuple[str, str], DeclaredField]
    sources: CoreSources | None

    def names(self, part: str) -> list[str]:
        """Fields of a class."""
        section = CLASSES[part]
        declared = [field for name, field in self.declared if name == section]
        return declared or list(self.review.sections[section])


@cache
def _core() -> _Core | None:
    """None where there is no torch: nothing can be trained there, and the list of reviewed fields does not load."""
    if find_spec("torch") is None:
        return None
    from megatron_patches.patch import release_of
    from megatron_patches.review.sources import installed_sources
    from megatron_patches.review.verdicts import review_of, reviewed_versions

    sources = installed_sources()
    version = reviewed_versions()[-1] if sources is None else release_of(sources.version)
    fields = [] if sources is None else sources.fields()
    declared = {(field.section, field.name): field for field in fields}
    return _Core(review_of(version), version, declared, sources)


def _given(context: TrainingContext) -> Iterator[tuple[Override, _Core]]:
    """Every override, with the megatron-core that it is for."""
    overrides = context.actor.overrides
    given = [Override(part, field, value) for part in CLASSES for field, value in getattr(overrides, part).items()]
    if given and (core := _core()) is not None:
        yield from ((override, core) for override in given)


def _own_key(part: str, field: str) -> str | None:
    """The key of ours that decides a field."""
    if part == "optimizer" and field in OptimizerConfig.model_fields:
        return f"actor_config.optimizer.{field}"
    return f"actor_config.{field}" if field in ActorConfig.model_fields else _KEYS.get(field)


def _decided_elsewhere(override: Override, context: TrainingContext, core: _Core) -> Finding | None:
    """What decides a field instead, and what to do about it; None where an override may."""
    field = override.field
    if field in _SET_HERE:
        return _SET_HERE[field], "Leave it out"
    if key := _own_key(override.part, field):
        return "a key of its own decides it", f"Use {key}"
    found = core.review.of(CLASSES[override.part], field)
    if found is not None and found.verdict == "function":
        return "it follows from the model, whose config.json vLLM goes by, too", "Leave it out, or change config.json"
    if found is not None and found.verdict == "handled" and field not in _READ_AS_BUILT:
        return "it decides how weights are laid out, which follows from the model and from other keys", "Leave it out"
    return None


def _known(context: TrainingContext) -> Iterator[Violation]:
    """Unknown fields, and values of another type than the field's."""
    for override, core in _given(context):
        names = core.names(override.part)
        if override.field not in names:
            close = nearest(override.field, names)
            problem = f"{CLASSES[override.part]} of megatron-core {core.version} has no such field"
            yield override.violation(problem, f"Did you mean {close}" if close else "Leave it out")
        elif core.sources is not None and _decided_elsewhere(override, context, core) is None:
            declared = core.declared[CLASSES[override.part], override.field]
            wrong = type_problem(override.value, declared.annotation, declared.default, core.sources.members)
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
    for override, core in _given(context):
        is_known = override.field in core.names(override.part)
        if is_known and (found := _decided_elsewhere(override, context, core)):
            yield override.violation(*found)


def _reviewed(context: TrainingContext) -> Iterator[Violation]:
    """What a switch was found not to go with, or was not reviewed for. Who may allow that is known of a whole job."""
    for override, core in _given(context):
        section, field = CLASSES[override.part], override.field
        if field not in core.names(override.part) or _decided_elsewhere(override, context, core):
            continue
        if not isinstance(context, JobContext) and core.review.of(section, field) is None:
            continue
        from megatron_patches.review import Setting, refusals

        allowed = context.generate.allow_unreviewed if isinstance(context, JobContext) else ()
        default = core.declared[section, field].default if core.declared else None
        setting = Setting(section, field, override.value, default)
        for refusal in refusals([setting], [name for name in allowed if name == field], core.version):
            yield override.violation(refusal.problem, refusal.remedy)


def _dispatched(context: TrainingContext) -> Iterator[Violation]:
    field, ep = "moe_token_dispatcher_type", context.train_sizes.expert
    if ep > 1 and context.actor.overrides.transformer.get(field) == "allgather":
        problem = f"allgather with EP {ep}: it takes as many tokens from every rank, but each cuts its own padding"
        yield Override("transformer", field, "allgather").violation(problem, "Use alltoall, which exchanges counts")


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
        "overrides are fields that go with a switch, by megatron_fields.md, or that allow_unreviewed names.",
        _reviewed,
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
