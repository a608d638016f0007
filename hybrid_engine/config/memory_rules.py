"""The memory plan of a configuration, and whether it keeps within `device_budget_gib`."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_engine.config.critic_rules import critic_of
from hybrid_engine.config.keys import ActorConfig, HybridConfig
from hybrid_engine.config.rules import JobContext, TrainingContext
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.memory_peaks import TrainingMemory, megatron_memory
from hybrid_engine.layouts.memory_plan import GIB, MemoryPlan, Stays, plan_memory
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

_MIB = 1024**2


def memory_plan(config: HybridConfig, world_size: int) -> MemoryPlan:
    """What each phase of a job keeps on the devices.

    Frozen parameters count as trained ones. Raises ConfigError where no plan is made: for FSDP2, and with adapters.
    """
    generate, job = config.generate_config, JobContext.of(config, world_size)
    if found := list(_not_planned(config)):
        raise ConfigError(found)
    inference = inference_side(job.table, job.infer_sizes, job.wire_dtype)
    return plan_memory(
        _training_memory(job),
        inference.num_elements * DTYPE_NBYTES[job.wire_dtype],
        generate.bucket_mb * _MIB,
        critic_memory(config, world_size),
        stays=what_stays(config),
        budget=None if config.device_budget_gib is None else int(config.device_budget_gib * GIB),
    )


def watches_memory(config: HybridConfig) -> bool:
    """Whether memory is to be planned and measured in this job: there is a critic, or a budget."""
    is_asked = config.critic_config is not None or config.device_budget_gib is not None
    return is_asked and not any(_not_planned(config))


def memory_violations(config: HybridConfig, world_size: int) -> Iterator[Violation]:
    """What does not keep within the budget, of a configuration that keeps all other rules."""
    if config.device_budget_gib is None:
        return
    if found := list(_not_planned(config)):
        yield from found
        return
    for phase in memory_plan(config, world_size).over_budget():
        rank, needed = phase.largest_rank, phase.total.max() / GIB
        problem = f"{config.device_budget_gib:g}, but the phase {phase.name} takes {needed:.3g} GiB on rank {rank}"
        yield Violation("device_budget_gib", problem, "Raise it, spread the models over more ranks, or offload more")


def _not_planned(config: HybridConfig) -> Iterator[Violation]:
    actor, remedy = config.actor_config, "Leave device_budget_gib out"
    if actor.fsdp is not None:
        yield Violation("device_budget_gib", "memory is planned where Megatron trains, and FSDP2 does", remedy)
    if actor.lora is not None:
        yield Violation("device_budget_gib", "memory is not planned with actor_config.lora", remedy)


def _training_memory(context: TrainingContext) -> TrainingMemory:
    sizes = context.train_sizes
    return megatron_state(context.actor, training_side(context.table, sizes, context.actor.params_dtype), sizes)


def megatron_state(actor: ActorConfig, side: SideLayout, sizes: TrainParallelism) -> TrainingMemory:
    """What Megatron's ranks keep of a model that lies as `side` says."""
    return megatron_memory(
        side,
        sizes,
        actor.params_dtype,
        is_distributed=actor.use_distributed_optimizer,
        float32_grads=actor.overrides.ddp.get("grad_reduce_in_fp32") is not False,
    )


def critic_memory(config: HybridConfig, world_size: int) -> TrainingMemory | None:
    """What the critic's ranks keep; None where there is no critic."""
    return None if config.critic_config is None else _training_memory(critic_of(config, world_size))


def what_stays(config: HybridConfig) -> Stays:
    """What the configuration leaves on the device in every phase."""
    generate, critic = config.generate_config, config.critic_config
    offloads = {
        "param": generate.offload_train_param,
        "grad": generate.offload_train_grad,
        "optimizer": generate.offload_train_optimizer,
    }
    inference: int | None = 0
    if not generate.release_weights:
        inference = None
    elif generate.incremental == "auto":
        inference = generate.incremental_mb * _MIB
    return Stays(
        kinds=frozenset(kind for kind, leaves in offloads.items() if not leaves),
        inference_nbytes=inference,
        critic=critic is not None and not critic.offload,
        prefetches=generate.prefetch == "auto",
    )
