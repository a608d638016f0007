"""Sizes that the search of pairs tries, and their costs; see search.py for the terms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_engine.config import ActorConfig, GenerateConfig
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
    sizes_of,
)
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.layouts.stages import UNEVEN
from hybrid_engine.models.table import ModelTable

TRAIN_KEYS = {size.name: size.key for size in sizes_of(TrainParallelism)}
"""Attribute of `TrainParallelism` -> key of `actor_config`."""
INFER_KEYS = {size.name: size.key for size in sizes_of(InferenceParallelism)}
"""Attribute of `InferenceParallelism` -> key of `generate_config`."""


def divisors(number: int) -> list[int]:
    """Return all divisors of `number` in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def uneven_ends(num_layers: int, pipeline: int) -> dict[str, int]:
    """Return the layers of the first and last stage if `pipeline` does not divide the layers.

    They have fewer layers than the other stages, and as equal numbers as possible. Empty if
    `pipeline` divides the layers, or if no such ends exist.
    """
    left = num_layers - -(-num_layers // pipeline) * (pipeline - 2)
    if num_layers % pipeline == 0 or left < 2:
        return {}
    return {UNEVEN[0]: left - left // 2, UNEVEN[1]: left // 2}


def train_keys(
    actor: ActorConfig, table: ModelTable, world_size: int, ranks_per_host: int
) -> Iterator[dict[str, Any]]:
    """Yield keys of `actor_config` for all searched sizes that satisfy the size rules.

    Keys that are set in the configuration and sizes with the default value are left out.
    """
    dims = table.dims
    is_set = actor.model_fields_set
    if actor.fsdp is not None:
        is_open = not {"replicas", "sharding_strategy"} & actor.fsdp.model_fields_set
        for replicas in divisors(world_size) if is_open else [1]:
            hybrid = {"replicas": replicas, "sharding_strategy": "HYBRID_SHARD"}
            yield {"fsdp": actor.fsdp.model_copy(update=hybrid)} if replicas > 1 else {}
        return

    def options(name: str, searched: Sequence[int | None]) -> Sequence[Any]:
        return [getattr(actor, TRAIN_KEYS[name])] if TRAIN_KEYS[name] in is_set else searched

    num_positions = dims.num_layers + len(actor.noop_layers)
    split_keys = {TRAIN_KEYS[name] for name in (*UNEVEN, "pipeline_layout", "hybrid_layer_pattern")}
    has_split = bool(split_keys & is_set)
    for tensor, pipeline, expert in itertools.product(
        options("tensor", divisors(min(ranks_per_host, world_size))),
        options("pipeline", [size for size in divisors(world_size) if size <= num_positions]),
        options("expert", divisors(dims.num_experts) if dims.num_experts else [1]),
    ):
        splits_experts = tensor > 1 and expert > 1
        for expert_tensor in options("expert_tensor", [None, 1] if splits_experts else [None]):
            sizes = {
                "tensor": tensor,
                "pipeline": pipeline,
                "expert": expert,
                "expert_tensor": expert_tensor,
            }
            if not has_split:
                sizes |= uneven_ends(num_positions, pipeline)
            keys = {TRAIN_KEYS[name]: size for name, size in sizes.items()}
            if "sequence_parallel" not in is_set:
                keys["sequence_parallel"] = tensor > 1 and actor.seq_length % tensor == 0
            changed = actor.model_copy(update=keys)
            if not violations(changed.sizes(world_size, cuts_whole_projections=True), table):
                yield {key: size for key, size in keys.items() if size != getattr(actor, key)}


def infer_keys(
    generate: GenerateConfig, table: ModelTable, world_size: int, ranks_per_host: int
) -> Iterator[dict[str, Any]]:
    """Yield keys of `generate_config` for all searched sizes; see `train_keys`."""

    def options(name: str, searched: Sequence[int]) -> Sequence[int]:
        key = INFER_KEYS[name]
        return [getattr(generate, key)] if key in generate.model_fields_set else searched

    whole = divisors(world_size)
    replicas = generate.infer_data_parallel_size
    for tensor, pipeline, expert in itertools.product(
        options("tensor", divisors(min(ranks_per_host, world_size))),
        options("pipeline", whole),
        options("expert", whole if table.dims.num_experts else [1]),
    ):
        keys = {
            INFER_KEYS["tensor"]: tensor,
            INFER_KEYS["pipeline"]: pipeline,
            INFER_KEYS["expert"]: expert,
        }
        sizes = generate.model_copy(update=keys).sizes(world_size)
        if replicas in (None, world_size / (tensor * pipeline)) and not violations(sizes, table):
            yield {key: size for key, size in keys.items() if size != getattr(generate, key)}


def train_cost(sizes: TrainParallelism | ShardedParallelism, ranks_per_host: int) -> float:
    """Return the doublings of `train`; see the module's docstring."""
    if isinstance(sizes, ShardedParallelism):
        return math.log2(sizes.num_shards)
    expert_ranks = sizes.expert * sizes.expert_cut if sizes.expert > 1 else 1
    hosts_of_experts = max(1, expert_ranks / ranks_per_host)
    return math.log2(sizes.tensor * sizes.pipeline * sizes.context) + math.log2(hosts_of_experts)


def infer_cost(sizes: InferenceParallelism) -> float:
    """Return the doublings of `infer`; see the module's docstring."""
    return math.log2(sizes.ranks_per_instance * sizes.pipeline)


def split_alike(train: TrainParallelism | ShardedParallelism, infer: InferenceParallelism) -> bool:
    """Return whether both sides split the model alike, except for padding and uneven stages."""
    if isinstance(train, ShardedParallelism):
        return False
    # vLLM keeps experts whole with EP, and splits them like all other layers without it.
    experts = (infer.expert, 1) if infer.expert > 1 else (1, infer.tensor)
    train_split = (train.tensor, train.pipeline, train.expert, train.expert_cut)
    return train_split == (infer.tensor, infer.pipeline, *experts)
