"""Rules of `actor_config` where FSDP2 trains."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_engine.config.keys import ActorConfig, FsdpConfig
from hybrid_engine.config.rules import Constraint, Finding, TrainingContext, constraint
from hybrid_engine.config.values import Section
from hybrid_engine.errors import Violation, shortened
from hybrid_engine.layouts.parallelism import TrainParallelism, sizes_of

MEGATRON_KEYS = (
    *(size.key for size in sizes_of(TrainParallelism)),
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "lora",
    "frozen_parameters",
    "overrides",
)
"""Of `actor_config`: what only Megatron does."""


def _megatron_keys(context: TrainingContext) -> Iterator[Violation]:
    for key in MEGATRON_KEYS:
        value = getattr(context.actor, key)
        if value != ActorConfig.model_fields[key].default:
            shown = value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value
            problem = f"{shortened(shown)}, but this key is Megatron's, and with actor_config.fsdp FSDP2 trains"
            yield Violation(f"actor_config.{key}", problem, "Leave one of them out")


FSDP: list[Constraint[TrainingContext]] = [
    Constraint("actor_config.fsdp", "Beside fsdp, keys that only Megatron has are left out.", _megatron_keys)
]


def replica_findings(fsdp: FsdpConfig, world_size: int) -> Iterator[Finding]:
    """What is wrong with the number of replicas."""
    if world_size % fsdp.replicas:
        yield f"{fsdp.replicas} do not divide {world_size} ranks", "Use a divisor"
    if (fsdp.replicas > 1) != (fsdp.sharding_strategy == "HYBRID_SHARD"):
        problem = f"{fsdp.replicas} with sharding_strategy {fsdp.sharding_strategy}"
        yield problem, "Use HYBRID_SHARD and 2 or more, or neither"


@constraint(
    FSDP,
    "actor_config.fsdp.replicas",
    "replicas divides the number of ranks, and is more than 1 with HYBRID_SHARD and only then.",
)
def _replicas(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.fsdp is not None:
        yield from replica_findings(context.actor.fsdp, context.world_size)


@constraint(
    FSDP,
    "actor_config.params_dtype",
    "With fsdp, params_dtype is float32: the optimizer steps on the parameters themselves.",
    computing="here",
)
def _params_dtype(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.params_dtype != "float32":
        problem = f"{context.actor.params_dtype} would round small updates away: FSDP2 keeps no other copy"
        yield problem, "Set float32; fsdp.mixed_precision is what layers compute in, compress_reshard what is sent"


@constraint(
    FSDP,
    "actor_config.fsdp.mixed_precision",
    "mixed_precision is not fp16: losses are not scaled.",
    computing="here",
)
def _mixed_precision(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.fsdp is not None and context.actor.fsdp.mixed_precision == "fp16":
        yield "fp16: gradients would underflow, for losses are not scaled", "Use bf16"
