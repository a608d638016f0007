"""A case of `verify`: a small model with both sides' layouts, as a checked configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, load_config
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
    sizes_of,
)
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models import table_for
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

_NOT_OF_LAYOUTS = {
    *("micro_batch_size", "seq_length", "optimizer"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
}
"""Of `actor_config`: the batch and its memory."""
_OF_LAYOUTS = {
    *(size.key for size in sizes_of(InferenceParallelism)),
    *("infer_rank_order", "compress_reshard", "compression_dtype", "dtype", "lora_delivery", "transport"),
    *("release_weights", "enforce_eager", "vllm", "allow_version", "allow_unreviewed"),
}
"""Of `generate_config`: where weights lie in vLLM, and what they and the kernels are."""


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


def values_to_verify(config: HybridConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a case takes over of a job's two sections: what decides layouts, dtypes and values of weights."""
    actor = config.actor_config.model_dump(mode="json", exclude_unset=True, exclude=_NOT_OF_LAYOUTS)
    generate = config.generate_config.model_dump(mode="json", exclude_unset=True, include=_OF_LAYOUTS)
    return {**actor, "params_dtype": config.actor_config.params_dtype}, generate


def case_of(
    name: str,
    model: Path,
    directory: Path,
    world_size: int,
    actor: Mapping[str, Any],
    generate: Mapping[str, Any],
    num_layers: int | None = None,
) -> Case:
    """Return the case for a published model in these layouts; its small model is written below `directory`.

    Args:
        name: for reports.
        model: directory of the published model.
        world_size: number of ranks.
        actor, generate: keys of `actor_config` and `generate_config` that differ from the defaults here.
        num_layers: of the small model; None: as few as the layouts can have, at least 4.

    Raises UnknownModelError without a table.
    """
    section = ActorConfig.model_validate(actor)
    training = section.sizes(world_size) if section.fsdp is None else section.fsdp.sizes(world_size)
    inference = GenerateConfig.model_validate(generate).sizes(world_size)
    divisors = _divisors(training, inference)
    if num_layers is None:
        num_layers = _fewest_layers(_config_of(model), training, inference, divisors)
    small = prepare_model(model, directory, num_layers, divisors)
    own = table_for(_config_of(model))
    if isinstance(training, TrainParallelism):  # Megatron needs the first for training experts under TP
        sequence_parallel = training.tensor > 1 and bool(own.dims.num_experts)
        actor = {"sequence_parallel": sequence_parallel, "make_vocab_size_divisible_by": 8, **actor}
    head_size = None if own.transformer.get("multi_latent_attention") else own.dims.head_dim
    return Case(name, str(small), actor, generate, head_size)


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
