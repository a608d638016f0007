"""A case of `verify`: a small model with both sides' layouts, as a checked configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism, named
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.verification.small_model import reduced_config

SEQ_LENGTH = 32
"""Tokens of a training sequence."""

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
    """

    name: str
    model: str
    actor: Mapping[str, Any] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)

    def config(self, world_size: int) -> HybridConfig:
        """Return the checked configuration; the model need not be one that can train. Raises ConfigError."""
        values = {
            "model": self.model,
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
    num_layers: int,
    rank_order: str,
    dtype: str,
) -> Case:
    """Return the case for a published model in these layouts; its small model is written below `directory`."""
    tp_sizes = (inference.tensor,) if isinstance(training, ShardedParallelism) else (training.tensor, inference.tensor)
    small = prepare_model(model, directory, num_layers, tp_sizes)
    table = table_for(json.loads(_config_text(small)))
    actor = _of_fsdp(training) if isinstance(training, ShardedParallelism) else _of_megatron(training, table)
    generate = {**named(inference, "key"), "infer_rank_order": rank_order}
    return Case(name, str(small), {**actor, "params_dtype": dtype}, generate)


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


def _config_text(model: Path) -> str:
    return (model / "config.json").read_text()


def prepare_model(model: Path, directory: Path, num_layers: int, tp_sizes: Sequence[int]) -> Path:
    """Write the reduced config of `model` to `directory` and return it. Raises UnknownModelError without a table."""
    config = reduced_config(json.loads(_config_text(model)), num_layers, tp_sizes)
    table_for(config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
