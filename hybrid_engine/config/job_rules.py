"""Rules of a whole job: the critic beside the actor, and the memory of all models.

The critic has the actor's parallel sizes, for Megatron has one set of process groups, and one schedule for pipelines.
So it is an `ActorConfig` too, made from the actor's, and must keep the same rules.

FSDP2's memory is computed for `plan` alone, in advisor/cluster_plan.py: it takes the modules that transformers builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.config.keys import ActorConfig, CriticConfig, HybridConfig
from hybrid_engine.config.rules import Constraint, Finding, JobContext, TrainingContext, constraint
from hybrid_engine.config.training_rules import MEGATRON, TRAINING
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.memory import GIB, MIB, MemoryPlan, Stays, TrainingMemory, megatron_memory, plan_memory
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.parameters import StoredElements
from hybrid_engine.layouts.stages import MTP, chunks_of, parse_layout, split_violations
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable, value_table
from hybrid_engine.planning.planner import largest_bucket
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

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


def _num_chunks(context: TrainingContext) -> int:
    """Model chunks of every stage."""
    dims = context.table.dims
    chunks = chunks_of(context.train_sizes, dims.num_layers, dims.num_mtp_layers)
    return len(chunks) // context.train_sizes.pipeline


WITH_FSDP: list[Constraint[CriticContext]] = []
"""Rules where FSDP2 trains the actor."""
CRITIC: list[Constraint[CriticContext]] = []
"""Rules where Megatron does, in addition to those of `actor_config`."""


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
    """Find what makes a critic impossible in a valid job; keys are the critic's own where it has them."""
    if context.job.actor.fsdp is not None:
        return [found for rule in WITH_FSDP for found in rule.find(context)]
    as_actor = (found for rule in (*TRAINING, *MEGATRON) for found in rule.find(context))
    found = [replace(one, key=_key_of(one.key)) for one in as_actor]
    return found + [found for rule in CRITIC for found in rule.find(context)]


def critic_of(config: HybridConfig, world_size: int) -> CriticContext:
    """The critic of a configuration that has one and was checked."""
    critic, job = config.critic_config, JobContext.of(config, world_size)
    assert critic is not None, "no critic is configured"
    if critic.model is None:
        policy, hf_config = read_model(config.model)
    else:
        policy, hf_config = read_model(critic.model, "critic_config.model")
    table = value_table(policy)
    changes: dict[str, object] = {"optimizer": critic.optimizer, "lora": None, "frozen_parameters": ()}
    for key in ("params_dtype", "micro_batch_size", "seed"):
        if (value := getattr(critic, key)) is not None:
            changes[key] = value
    if critic.model is not None:
        changes |= {key: ActorConfig.model_fields[key].default for key in _OF_STAGES}
        if critic.pipeline_model_parallel_layout is not None:
            changes["pipeline_model_parallel_layout"] = critic.pipeline_model_parallel_layout
        elif (num_chunks := _num_chunks(job)) > 1:
            changes["virtual_pipeline_model_parallel_size"] = num_chunks
    elif job.actor.pipeline_model_parallel_layout is not None:
        stages = parse_layout(job.actor.pipeline_model_parallel_layout)
        changes["pipeline_model_parallel_layout"] = "|".join(stage.replace(MTP, "") for stage in stages)
    if not table.dims.num_experts:
        changes |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    return CriticContext(job.actor.model_copy(update=changes), table, world_size, critic, hf_config, job)


def _key_of(key: str) -> str:
    """The critic's for one of the actor, or of the model."""
    if key == "model":
        return "critic_config.model"
    section, _, name = key.partition(".")
    has_own = section == "actor_config" and name.partition(".")[0] in CriticConfig.model_fields
    return f"critic_config.{name}" if has_own else f"{key} (of the critic)"


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_plan(config: HybridConfig, world_size: int, num_mtp_layers: int | None = None) -> MemoryPlan:
    """Plan the device memory of each phase of a job. `num_mtp_layers`: see `load_config`.

    Frozen parameters count as trained ones. Raises ConfigError where no plan is made: for FSDP2, and with adapters.
    """
    generate, job = config.generate_config, JobContext.of(config, world_size, num_mtp_layers)
    if found := list(_not_planned(config)):
        raise ConfigError(found)
    inference = inference_side(job.table, job.infer_sizes, job.served_dtype)
    source, state = megatron_training(job.actor, job.table, job.world_size)
    return plan_memory(
        state,
        inference.num_elements * DTYPE_NBYTES[job.served_dtype],
        largest_bucket(source, inference, generate.bucket_mb * MIB),
        critic_memory(config, world_size),
        stays=what_stays(config),
        budget=None if config.device_budget_gib is None else int(config.device_budget_gib * GIB),
    )


def watches_memory(config: HybridConfig) -> bool:
    """Whether memory is to be planned and measured in this job: there is a critic, or a budget."""
    is_asked = config.critic_config is not None or config.device_budget_gib is not None
    return is_asked and not any(_not_planned(config))


def memory_violations(config: HybridConfig, world_size: int, num_mtp_layers: int | None = None) -> Iterator[Violation]:
    """Find phases over the budget in a configuration that keeps all other rules."""
    if config.device_budget_gib is None:
        return
    if found := list(_not_planned(config)):
        yield from found
        return
    for phase in memory_plan(config, world_size, num_mtp_layers).over_budget():
        rank, needed = phase.largest_rank, phase.total.max() / GIB
        problem = f"{config.device_budget_gib:g}, but the phase {phase.name} takes {needed:.3g} GiB on rank {rank}"
        yield Violation("device_budget_gib", problem, "Raise it, spread the models over more ranks, or offload more")


def _not_planned(config: HybridConfig) -> Iterator[Violation]:
    actor, remedy = config.actor_config, "Leave device_budget_gib out"
    if actor.fsdp is not None:
        yield Violation("device_budget_gib", "memory is planned where Megatron trains, but FSDP2 does", remedy)
    if actor.lora is not None:
        yield Violation("device_budget_gib", "memory is not planned with actor_config.lora", remedy)


def megatron_training(actor: ActorConfig, table: ModelTable, world_size: int) -> tuple[SideLayout, TrainingMemory]:
    """Return the layout and the memory of Megatron's ranks, by the layer spec of Transformer Engine.

    On a machine without it (a CPU) down projections of latent attention are cut, and take less than is said here.
    """
    sizes = actor.sizes(world_size)
    side = training_side(table, sizes, actor.params_dtype)
    return side, megatron_state(actor, side, sizes)


def megatron_state(actor: ActorConfig, source: SideLayout | StoredElements, sizes: TrainParallelism) -> TrainingMemory:
    """Return the memory of Megatron's ranks, or of its stages, which store so much of a model."""
    return megatron_memory(
        source,
        sizes,
        actor.params_dtype,
        is_distributed=actor.use_distributed_optimizer,
        float32_grads=actor.overrides.ddp.get("grad_reduce_in_fp32") is not False,
    )


def critic_memory(config: HybridConfig, world_size: int) -> TrainingMemory | None:
    """Return the memory of the critic's ranks; None without a critic."""
    if config.critic_config is None:
        return None
    critic = critic_of(config, world_size)
    return megatron_training(critic.actor, critic.table, world_size)[1]


def what_stays(config: HybridConfig) -> Stays:
    """Return the state that the configuration keeps on the device in every phase."""
    generate, critic = config.generate_config, config.critic_config
    offloads = {
        "param": generate.offload_train_param,
        "grad": generate.offload_train_grad,
        "optimizer": generate.offload_train_optimizer,
    }
    inference: int | None = 0
    if not generate.release_weights:
        inference = None
    elif generate.incremental != "off":
        inference = generate.incremental_mb * MIB
    return Stays(
        kinds=frozenset(kind for kind, leaves in offloads.items() if not leaves),
        inference_nbytes=inference,
        critic=critic is not None and not critic.offload,
        prefetches=generate.prefetch == "auto",
    )
