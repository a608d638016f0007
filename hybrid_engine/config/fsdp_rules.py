"""Where FSDP2 trains: rules of `actor_config`, and the two dictionaries of an engine around a transformers model.

    rollout_config = {"tp_size": 4, "pp_size": 2, "dp_type": "none", "max_model_len": 2048}
    train_config = {"fsdp_config": {"mixed_precision": "amp", "sharding_strategy": "FULL_SHARD"}}

`rollout_config` takes the keys of `generate_config` too, and short ones for the parallel sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic

from hybrid_engine.config.keys import ActorConfig, FsdpConfig, GenerateConfig
from hybrid_engine.config.proposals import violations_of
from hybrid_engine.config.rules import Constraint, Finding, TrainingContext, constraint
from hybrid_engine.config.values import Section
from hybrid_engine.errors import ConfigError, Violation, shortened
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


SHORT_KEYS = {
    "tp_size": "infer_tensor_parallel_size",
    "pp_size": "infer_pipeline_parallel_size",
    "dp_size": "infer_data_parallel_size",
    "ep_size": "infer_expert_parallel_size",
}
"""Of `rollout_config` -> of `generate_config`."""


class TrainConfig(Section):
    """`train_config`."""

    fsdp_config: FsdpConfig = FsdpConfig()
    """See `FsdpConfig`."""


def read_train_config(values: Mapping[str, Any], world_size: int) -> FsdpConfig:
    """Check `train_config`. Raises ConfigError with every violation."""
    try:
        fsdp = TrainConfig.model_validate(values).fsdp_config
    except pydantic.ValidationError as error:
        raise ConfigError(violations_of(error, TrainConfig, "train_config.")) from None
    key = "train_config.fsdp_config.replicas"
    found = [Violation(key, *finding) for finding in replica_findings(fsdp, world_size)]
    if found:
        raise ConfigError(found)
    return fsdp


def generate_values(rollout_config: object) -> dict[str, Any]:
    """`generate_config` from `rollout_config`, and its `model`.

    Raises ConfigError with every unknown key and wrong value, by the names that were given.
    """
    if not isinstance(rollout_config, Mapping):
        problem = f"expected keys and values, found {shortened(rollout_config)}"
        raise ConfigError([Violation("rollout_config", problem, "Pass a dictionary")])
    found = [
        Violation(f"rollout_config.{short}", f"{long} says the same", "Use one of them")
        for short, long in SHORT_KEYS.items()
        if short in rollout_config and long in rollout_config
    ]
    dp_type = rollout_config.get("dp_type", "auto")
    if dp_type not in ("auto", "none"):
        found.append(
            Violation("rollout_config.dp_type", shortened(dp_type), "Use 'auto' (replicas fill the job) or 'none'")
        )
    values = {SHORT_KEYS.get(key, str(key)): value for key, value in rollout_config.items() if key != "dp_type"}
    if not isinstance(values.get("model"), str | os.PathLike | None):
        problem = f"expected a directory, found {shortened(values['model'])}"
        found.append(Violation("rollout_config.model", problem, "Name one, or leave it out"))
    found += _wrong_values(values, rollout_config)
    if found:
        raise ConfigError(found)
    return values | ({"infer_data_parallel_size": 1} if dp_type == "none" else {})


def _wrong_values(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[Violation]:
    """What is wrong with keys of `generate_config`, by their names in `rollout_config`."""
    try:
        GenerateConfig.model_validate({key: value for key, value in values.items() if key != "model"})
    except pydantic.ValidationError as error:
        names = {
            f"rollout_config.{long}": f"rollout_config.{short}" for short, long in SHORT_KEYS.items() if short in given
        }
        found = violations_of(error, GenerateConfig, "rollout_config.")
        return [Violation(names.get(one.key, one.key), one.problem, one.remedy) for one in found]
    return []
