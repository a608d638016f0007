"""A case of `verify`: a small model with both sides' layouts, as a checked configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism, named
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.verification.small_model import Divisors, reduced_config

SEQ_LENGTH = 32
"""Tokens of a training sequence."""
_FEWEST_LAYERS = 4

_ACTOR_DEFAULTS: dict[str, Any] = {
    "params_dtype": "float32",
    "micro_batch_size": 1,
    "seq_length": SEQ_LENGTH,
    "optimizer": {"lr": 1e-2},
}
_GENERATE_DEFAULTS: dict[str, Any] = {
    "max_model_len": 2 * SEQ_LENGTH,
    "max_num_seqs": 16,
    "bucket_mb": 1,
    "timeout_seconds": 120,
}


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: for reports.
        model: directory with the small model's config.json.
        actor, generate: keys of `actor_config` and `generate_config` that differ from the defaults here.
        head_size: elements of an attention head of the published model; None where the small one keeps its form.
    """

    name: str
    model: str
    actor: Mapping[str, Any] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)
    head_size: int | None = None

    def config(self, world_size: int) -> HybridConfig:
        """Return the checked configuration; the model need not be one that can train. Raises ConfigError."""
        values = {
            "model": self.model,
            "random_weights": True,
            "actor_config": {**_ACTOR_DEFAULTS, **self.actor},
            "generate_config": {**_GENERATE_DEFAULTS, **self.generate},
        }
        return load_config(values, world_size, weights_only=True)


def case_of(
    name: str,
    model: Path,
    directory: Path,
    training: TrainParallelism | ShardedParallelism,
    inference: InferenceParallelism,
    num_layers: int | None,
    rank_order: str,
    dtype: str,
) -> Case:
    """Return the case for a published model in these layouts; its small model is written below `directory`.

    `num_layers`: of the small model; None: as few as the layouts can have, at least 4. Raises UnknownModelError without
    a table.
    """
    divisors = _divisors(training, inference)
    if num_layers is None:
        num_layers = _fewest_layers(_config_of(model), training, inference, divisors)
    small = prepare_model(model, directory, num_layers, divisors)
    table = table_for(_config_of(small))
    actor = _of_fsdp(training) if isinstance(training, ShardedParallelism) else _of_megatron(training, table)
    generate = {**named(inference, "key"), "infer_rank_order": rank_order}
    own = table_for(_config_of(model))
    head_size = None if own.transformer.get("multi_latent_attention") else own.dims.head_dim
    return Case(name, str(small), {**actor, "params_dtype": dtype}, generate, head_size)


def _divisors(training: TrainParallelism | ShardedParallelism, inference: InferenceParallelism) -> Divisors:
    if isinstance(training, ShardedParallelism):
        return Divisors((inference.tensor,), (inference.expert,))
    tensor, expert = (training.tensor, inference.tensor), (training.expert, inference.expert)
    return Divisors(tensor, expert, (training.expert_cut,))


def _fewest_layers(
    config: Mapping[str, Any],
    training: TrainParallelism | ShardedParallelism,
    inference: InferenceParallelism,
    divisors: Divisors,
) -> int:
    """The smallest number of layers that both layouts can have, a layer on every stage; else that to begin with."""
    own = table_for(config).dims.num_layers
    chunks = 1 if isinstance(training, ShardedParallelism) else training.pipeline * (training.virtual_pipeline or 1)
    first = min(max(_FEWEST_LAYERS, chunks, inference.pipeline), own)
    sides = [side for side in (training, inference) if not isinstance(side, ShardedParallelism)]
    for num_layers in range(first, own + 1):
        table = table_for(reduced_config(config, num_layers, divisors))
        if not any(violations(side, table) for side in sides):
            return num_layers
    return first


def _of_megatron(sizes: TrainParallelism, table: ModelTable) -> dict[str, Any]:
    """Keys of `actor_config`."""
    actor = named(sizes, "key")
    actor["make_vocab_size_divisible_by"] = min(actor["make_vocab_size_divisible_by"], 8)
    # Megatron requires it for training with experts and tensor parallelism.
    actor["sequence_parallel"] = sizes.tensor > 1 and bool(table.dims.num_experts)
    return actor


def _of_fsdp(sizes: ShardedParallelism) -> dict[str, Any]:
    """Keys of `actor_config`."""
    strategy = "FULL_SHARD" if sizes.replicas == 1 else "HYBRID_SHARD"
    return {"fsdp": {"sharding_strategy": strategy, "replicas": sizes.replicas}}


def prepare_model(model: Path, directory: Path, num_layers: int, divisors: Divisors) -> Path:
    """Write the reduced config of `model` to `directory` and return it. Raises UnknownModelError without a table."""
    config = reduced_config(_config_of(model), num_layers, divisors)
    table_for(config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def _config_of(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config
