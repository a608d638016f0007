"""The critic as Megatron builds it, and the rules of `critic_config`.

The critic has the actor's parallel sizes, for Megatron has one set of process groups, and one schedule for pipelines.
So it is an `ActorConfig` too, made from the actor's, and must keep the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.config.keys import ActorConfig, CriticConfig, HybridConfig
from hybrid_engine.config.override_rules import MEGATRON_TRAINS
from hybrid_engine.config.rules import Constraint, Finding, JobContext, TrainingContext, constraint
from hybrid_engine.config.training_rules import ANY_TRAINER
from hybrid_engine.errors import Violation
from hybrid_engine.layouts.stages import MTP, chunks_of, parse_layout, split_violations
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable
from hybrid_engine.models.value_table import value_table

_OF_STAGES = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "noop_layers",
    "hybrid_layer_pattern",
)
"""Keys of the actor that say how its own layers are split."""


@dataclass(frozen=True)
class CriticContext(TrainingContext):
    """The critic, as if it was an actor: its configuration, and the table of a value model.

    Attributes:
        config: `critic_config`.
        hf_config: config.json of its model.
        job: the actor's side, which keeps all its rules.
    """

    config: CriticConfig
    hf_config: Mapping[str, Any]
    job: JobContext

    @classmethod
    def of(
        cls, config: CriticConfig, policy: ModelTable, hf_config: Mapping[str, Any], job: JobContext
    ) -> CriticContext:
        """The critic beside a job's actor; `policy`: the table of the critic's model."""
        table = value_table(policy)
        changes: dict[str, object] = {"optimizer": config.optimizer, "lora": None, "frozen_parameters": ()}
        for key in ("params_dtype", "micro_batch_size", "seed"):
            if (value := getattr(config, key)) is not None:
                changes[key] = value
        if config.model is not None:
            changes |= {key: ActorConfig.model_fields[key].default for key in _OF_STAGES} | _own_stages(config, job)
        elif job.actor.pipeline_model_parallel_layout is not None:
            stages = parse_layout(job.actor.pipeline_model_parallel_layout)
            changes["pipeline_model_parallel_layout"] = "|".join(stage.replace(MTP, "") for stage in stages)
        if not table.dims.num_experts:
            changes |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
        return cls(job.actor.model_copy(update=changes), table, job.world_size, config, hf_config, job)


def _own_stages(config: CriticConfig, job: TrainingContext) -> dict[str, object]:
    if config.pipeline_model_parallel_layout is not None:
        return {"pipeline_model_parallel_layout": config.pipeline_model_parallel_layout}
    num_chunks = _num_chunks(job)
    return {"virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None}


def _num_chunks(context: TrainingContext) -> int:
    """Model chunks of every stage."""
    dims = context.table.dims
    chunks = chunks_of(context.train_sizes, dims.num_layers, dims.num_mtp_layers)
    return len(chunks) // context.train_sizes.pipeline


WITH_FSDP: list[Constraint[CriticContext]] = []
"""Where FSDP2 trains the actor."""
CRITIC: list[Constraint[CriticContext]] = []
"""Where Megatron does: beside the rules of `actor_config`."""


@constraint(WITH_FSDP, "critic_config", "Megatron trains a critic, and its actor too.")
def _trained_by_megatron(context: CriticContext) -> Iterator[Finding]:
    if context.job.actor.fsdp is not None:
        yield "FSDP2 trains the actor, and has no value models", "Leave out critic_config, or actor_config.fsdp"


@constraint(CRITIC, "critic_config.pipeline_model_parallel_layout", "A layout of stages is that of a model of its own.")
def _layout_of_own_model(context: CriticContext) -> Iterator[Finding]:
    if context.config.pipeline_model_parallel_layout is not None and context.config.model is None:
        yield "without critic_config.model the stages are the actor's", "Leave it out, or set critic_config.model"


@constraint(
    CRITIC,
    "critic_config.pipeline_model_parallel_layout",
    "The critic has as many model chunks on each stage as the actor: Megatron's schedule is one for both.",
)
def _as_many_chunks(context: CriticContext) -> Iterator[Finding]:
    sizes, dims = context.train_sizes, context.table.dims
    if sizes.pipeline == 1 or any(split_violations(sizes, dims.num_layers, 0)):
        return
    own, actors = _num_chunks(context), _num_chunks(context.job)
    if own != actors:
        yield f"{own} chunks on each stage, the actor has {actors}", "Give the critic as many stages"


def critic_violations(context: CriticContext) -> list[Violation]:
    """What makes a critic impossible beside a job that is possible; keys are the critic's own where it has them."""
    if context.job.actor.fsdp is not None:
        return [found for rule in WITH_FSDP for found in rule.find(context)]
    as_actor = (found for rule in (*ANY_TRAINER, *MEGATRON_TRAINS) for found in rule.find(context))
    found = [replace(one, key=_key_of(one.key)) for one in as_actor]
    return found + [found for rule in CRITIC for found in rule.find(context)]


def critic_of(config: HybridConfig, world_size: int) -> CriticContext:
    """The critic of a configuration that has one and was checked."""
    assert config.critic_config is not None, "no critic is configured"
    own = config.critic_config.model
    policy, hf_config = read_model(config.model) if own is None else read_model(own, "critic_config.model")
    return CriticContext.of(config.critic_config, policy, hf_config, JobContext.of(config, world_size))


def _key_of(key: str) -> str:
    """The critic's for one of the actor, or of the model."""
    if key == "model":
        return "critic_config.model"
    section, _, name = key.partition(".")
    has_own = section == "actor_config" and name.partition(".")[0] in CriticConfig.model_fields
    return f"critic_config.{name}" if has_own else f"{key} (of the critic)"
