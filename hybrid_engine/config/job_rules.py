"""Rules of a whole job: the critic of the actor, and the memory of all models.

The actor's trainer trains the critic, too, in the actor's parallel sizes: Megatron has one set of
process groups and one pipeline schedule. The critic is represented as the actor of another job,
and keeps the same rules.

FSDP2's memory is computed only for `plan`, in tools/plan/cluster_plan.py, because it needs the
modules that transformers builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybrid_engine.config.keys import ActorConfig, CriticConfig, HybridConfig
from hybrid_engine.config.rules import Constraint, JobContext, TrainingContext, given
from hybrid_engine.config.training_rules import rules_of_trainer
from hybrid_engine.errors import (
    Violation,
    Violations,
    require_none,
    shortened,
)
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.memory import (
    GIB,
    MIB,
    MemoryPlan,
    Phase,
    Stays,
    TrainingMemory,
    fitting_kinds,
    megatron_memory,
    of_kinds,
    plan_memory,
)
from hybrid_engine.layouts.stages import MTP, parse_layout
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models.families import read_model, require_written
from hybrid_engine.models.quantization_configs import block_config
from hybrid_engine.models.table import ModelTable, value_table
from hybrid_engine.planning.planner import largest_bucket
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

_STAGE_KEYS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "noop_layers",
    "hybrid_layer_pattern",
)
"""Keys of the actor that describe the split of its own layers over stages."""


@dataclass(frozen=True)
class CriticContext(TrainingContext):
    """The critic as a training model: its settings as an actor, and the table of a value model.

    Attributes:
        config: `critic_config`.
        alone: configuration of a job in which the critic is the actor.
        job: context of the actor, which satisfies all its rules.
    """

    config: CriticConfig
    alone: HybridConfig
    job: JobContext


def _chunks_per_stage(context: TrainingContext) -> int:
    """Return the number of model chunks on every pipeline stage; 0 for an impossible split."""
    return len(context.chunks) // context.train_sizes.pipeline


def _layout_without_model(context: CriticContext) -> Iterator[str]:
    layout = context.config.pipeline_model_parallel_layout
    if layout is not None and context.config.model is None:
        yield shortened(layout)


def _other_number_of_chunks(context: CriticContext) -> Iterator[str]:
    num_chunks = _chunks_per_stage(context)
    num_actor_chunks = _chunks_per_stage(context.job)
    if context.train_sizes.pipeline > 1 and num_chunks not in (0, num_actor_chunks):
        yield f"{num_chunks} chunks on each stage, but the actor has {num_actor_chunks}"


CRITIC: list[Constraint[CriticContext]] = [
    Constraint(
        "critic_config.pipeline_model_parallel_layout",
        "A layout of stages needs critic_config.model; without it, the stages are the actor's.",
        _layout_without_model,
        code="needs-critic-model",
    ),
    Constraint(
        "critic_config.pipeline_model_parallel_layout",
        "The critic has as many model chunks on each stage as the actor: "
        "Megatron has one schedule for both.",
        _other_number_of_chunks,
        code="chunks-differ",
    ),
]
"""Rules of the critic, in addition to those of `actor_config`."""


def critic_violations(context: CriticContext) -> list[Violation]:
    """Return the violations of a critic in a job whose actor is valid, under the critic's keys."""
    violations = [
        replace(violation, key=_critic_key(violation.key))
        for rule in rules_of_trainer(context)
        for violation in rule.find(context)
    ]
    for rule in CRITIC:
        violations += rule.find(context)
    return violations


def critic_of(config: HybridConfig, world_size: int) -> CriticContext:
    """Return the critic of a checked configuration that has `critic_config`.

    Raises:
        ConfigError: if the critic's model cannot be read.
    """
    critic = config.critic_config
    assert critic is not None, "no critic is configured"
    job = JobContext.of(config, world_size)
    if critic.model is None:
        policy, _ = read_model(config.model)
    else:
        policy, _ = read_model(critic.model, "critic_config.model")
        if job.actor.fsdp is None:
            require_written(policy, "critic_config.model")
    table = value_table(policy)
    changes: dict[str, object] = {
        "optimizer": critic.optimizer,
        "lora": None,
        "frozen_parameters": (),
    }
    if job.actor.fsdp is not None:
        # The actor's may be bfloat16 under adapters; a critic trains all of its weights.
        changes["params_dtype"] = "float32"
    for key in ("params_dtype", "micro_batch_size", "seed"):
        value = getattr(critic, key)
        if value is not None:
            changes[key] = value
    if critic.model is not None:
        # The actor's split does not fit another number of layers; only its chunk count is kept.
        for key in _STAGE_KEYS:
            changes[key] = ActorConfig.model_fields[key].default
        if critic.pipeline_model_parallel_layout is not None:
            changes["pipeline_model_parallel_layout"] = critic.pipeline_model_parallel_layout
        else:
            num_chunks = _chunks_per_stage(job)
            if num_chunks > 1:
                changes["virtual_pipeline_model_parallel_size"] = num_chunks
    elif job.actor.pipeline_model_parallel_layout is not None:
        # A value model has no MTP layers, so they leave the actor's layout.
        stages = parse_layout(job.actor.pipeline_model_parallel_layout)
        layout = "|".join(stage.replace(MTP, "") for stage in stages)
        changes["pipeline_model_parallel_layout"] = layout
    if not table.dims.num_experts:
        changes |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    actor = job.actor.model_copy(update=changes)
    changes = {"model": critic.model or config.model, "actor_config": actor}
    alone = config.model_copy(update=changes)
    return CriticContext(actor, table, world_size, critic, alone, job)


def _critic_key(key: str) -> str:
    """Return the key to report for a violation of the critic under the actor's key `key`."""
    if key == "model":
        return "critic_config.model"
    section, _, name = key.partition(".")
    has_key = name.partition(".")[0] in CriticConfig.model_fields
    if section == "actor_config" and has_key:
        return f"critic_config.{name}"
    return f"{key} (of the critic)"


# -- memory ----------------------------------------------------------------------------------------


def memory_plan(
    config: HybridConfig,
    world_size: int,
    num_mtp_layers: int | None = None,
) -> MemoryPlan:
    """Plan the device memory of each phase of a job.

    Frozen parameters count as trained ones.

    Args:
        config: a valid configuration.
        world_size: number of ranks.
        num_mtp_layers: see `load_config`.

    Raises:
        ConfigError: for FSDP2, with adapters, and for experts in one tensor, whose memory is not
            planned.
    """
    job = JobContext.of(config, world_size, num_mtp_layers)
    require_none(_not_planned(config))
    inference = inference_side(job.table, job.infer_sizes, job.served_dtype)
    source, state = megatron_training(job.actor, job.table, job.world_size)
    budget_gib = config.device_budget_gib
    critic = None
    if config.critic_config is not None:
        model = critic_of(config, world_size)
        _, critic = megatron_training(model.actor, model.table, world_size)
    return plan_memory(
        state,
        inference.num_elements * DTYPE_NBYTES[job.served_dtype],
        largest_bucket(source, inference, config.generate_config.bucket_mb * MIB),
        critic,
        stays=what_stays(config, state, critic, (budget_gib or 0) * GIB),
        budget=None if budget_gib is None else int(budget_gib * GIB),
    )


def memory_violations(
    config: HybridConfig,
    world_size: int,
    num_mtp_layers: int | None,
) -> Violations:
    """Yield the phases over the budget of a configuration that satisfies all other rules."""
    budget_gib = config.device_budget_gib
    if budget_gib is None:
        return
    not_planned = list(_not_planned(config))
    if not_planned:
        yield from not_planned
        return
    remedy = "Raise it, spread the models over more ranks, or offload more"
    for phase in memory_plan(config, world_size, num_mtp_layers).over_budget():
        yield _too_large(phase, budget_gib, "device_budget_gib", remedy)


def _too_large(phase: Phase, room_gib: float, key: str, remedy: str) -> Violation:
    return Violation(
        key,
        f"{room_gib:.4g} GiB on a device, but the phase {phase.name} takes "
        f"{phase.total.max() / GIB:.4g} GiB on rank {phase.largest_rank}",
        remedy,
        code="over-budget",
    )


def require_room(config: HybridConfig, world_size: int, device_nbytes: int) -> None:
    """Raise ConfigError for the phases whose state alone exceeds a device of `device_nbytes`.

    Does nothing for jobs whose memory is not planned, or that may take less than is planned.
    """
    may_take_less = (
        config.actor_config.frozen_parameters
        or config.generate_config.servers
        or config.critic_config is not None
    )
    if may_take_less or [*_not_planned(config)]:
        return
    remedy = "Use more ranks, larger parallel sizes, or offload more"
    require_none(
        _too_large(phase, device_nbytes / GIB, "actor_config", remedy)
        for phase in memory_plan(config, world_size).phases.values()
        # A reference exists with a KL term only.
        if phase.name != "reference" and phase.total.max() > device_nbytes
    )


def _not_planned(config: HybridConfig) -> Violations:
    """Yield the reasons why memory cannot be planned."""
    table, _ = read_model(config.model)
    is_packed = table.refined_shapes != table.shapes
    quantised = block_config(config.hf_config(), config.generate_config.quantization)
    reasons = {
        "only for Megatron, but FSDP2 trains": config.actor_config.fsdp,
        "without actor_config.lora": config.actor_config.lora,
        "without weights that are quantised before they are sent": quantised,
        "for models that store the experts of a layer one by one": is_packed,
    }
    for reason in given(reasons):
        yield Violation(
            "device_budget_gib",
            f"memory is planned here {reason}",
            "Leave device_budget_gib out, and run `hybrid-engine plan`",
            code="not-planned",
        )


def megatron_training(
    actor: ActorConfig,
    table: ModelTable,
    world_size: int,
) -> tuple[SideLayout, TrainingMemory]:
    """Return layout and memory of Megatron's ranks with the layer spec of Transformer Engine.

    Without Transformer Engine (on CPU), down projections of latent attention are split, so ranks
    take less memory than returned.
    """
    sizes = actor.sizes(world_size)
    side = training_side(table, sizes, actor.params_dtype)
    state = megatron_memory(
        side,
        sizes,
        actor.params_dtype,
        is_distributed=actor.use_distributed_optimizer,
        float32_grads=actor.overrides.ddp.get("grad_reduce_in_fp32") is not False,
    )
    return side, state


def what_stays(
    config: HybridConfig,
    state: TrainingMemory,
    critic: TrainingMemory | None,
    device_nbytes: float,
) -> Stays:
    """Return the state that the configuration keeps on the device in every phase.

    Args:
        config: configuration of the job.
        state: training state of the actor.
        critic: that of the critic, if there is one.
        device_nbytes: memory of a device, of which vLLM has its share.
    """
    generate = config.generate_config
    kinds = {kind for kind, choice in generate.offloads.items() if not choice}
    automatic = {
        kind: int(of_kinds(state, {kind}).max())
        for kind, choice in generate.offloads.items()
        if choice == "auto"
    }
    room = device_nbytes * (1 - generate.share_of_device) - of_kinds(state, kinds).max()
    critic_stays = config.critic_config is not None and not config.critic_config.offload
    if critic is not None and critic_stays:
        room -= critic.total.max()
    fitting = fitting_kinds(automatic, room)
    inference_nbytes: int | None = 0
    if not generate.release_weights:
        inference_nbytes = None  # all weights stay
    elif generate.incremental != "off":
        inference_nbytes = generate.incremental_mb * MIB
    return Stays(
        kinds=frozenset(kinds),
        fitting=fitting,
        inference_nbytes=inference_nbytes,
        critic=critic_stays,
    )
