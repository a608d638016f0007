"""Case of `verify`: a small model with the layouts of both sides, as a checked configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, load_config
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
    sizes_of,
)
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models import table_for
from hybrid_engine.tools.verify.small_models import (
    Divisors,
    config_of,
    prepare_model,
    reduced_config,
)

SEQ_LENGTH = 32
"""Tokens of a training sequence."""
_MIN_LAYERS = 4

_ACTOR_DEFAULTS: dict[str, Any] = {
    "params_dtype": "float32",
    "micro_batch_size": 1,
    "seq_length": SEQ_LENGTH,
    "optimizer": {"lr": 1e-2},
}
_GENERATE_DEFAULTS: dict[str, Any] = {
    "max_model_len": 2 * SEQ_LENGTH,
    "max_num_seqs": 16,
    "kv_cache_mb": 64,
    "bucket_mb": 1,
    "timeout_seconds": 120,
}

_NOT_OF_LAYOUTS = {
    "micro_batch_size",
    "seq_length",
    "optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
}
"""Keys of `actor_config` for the batch and its memory."""
_OF_LAYOUTS = {
    *(size.key for size in sizes_of(InferenceParallelism)),
    "infer_rank_order",
    "compress_reshard",
    "compression_dtype",
    "dtype",
    "lora_delivery",
    "transport",
    "release_weights",
    "enforce_eager",
    "vllm",
    "allow_version",
}
"""Keys of `generate_config` for location and form of the weights in vLLM, and for its kernels."""


@dataclass(frozen=True)
class Case:
    """Case of `verify`.

    Attributes:
        name: name for reports.
        model: directory with the small model's config.json.
        actor, generate: keys of `actor_config` and `generate_config` that differ from the defaults
            in this module.
        head_size: elements of an attention head of the published model; None if the small model
            keeps their form.
    """

    name: str
    model: str
    actor: Mapping[str, Any] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)
    head_size: int | None = None

    def config(self, world_size: int) -> HybridConfig:
        """Return the configuration, checked for weights alone. Raises ConfigError."""
        values = {
            "model": self.model,
            "random_weights": True,
            "actor_config": {**_ACTOR_DEFAULTS, **self.actor},
            "generate_config": {**_GENERATE_DEFAULTS, **self.generate},
        }
        return load_config(values, world_size, weights_only=True)


def values_to_verify(config: HybridConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of a job's `actor_config` and `generate_config` that a case adopts.

    These decide layouts, dtypes and values of weights.
    """
    actor = config.actor_config.model_dump(
        mode="json",
        exclude_unset=True,
        exclude=_NOT_OF_LAYOUTS,
    )
    generate = config.generate_config.model_dump(
        mode="json",
        exclude_unset=True,
        include=_OF_LAYOUTS,
    )
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
    """Return the case for a published model in these layouts, and write its small model.

    Args:
        name: name for reports.
        model: directory of the published model.
        directory: receives the small model's config.json.
        world_size: number of ranks.
        actor, generate: keys of `actor_config` and `generate_config` that differ from the defaults
            in this module.
        num_layers: layers of the small model; None: the fewest that the layouts allow, at least 4.

    Raises:
        UnknownModelError: if the architecture has no table.
        ConfigError: if the model takes images and has no processor.
    """
    section = ActorConfig.model_validate(actor)
    inference = GenerateConfig.model_validate(generate).sizes(world_size)
    training: TrainParallelism | ShardedParallelism
    if section.fsdp is None:
        training = section.sizes(world_size)
        divisors = Divisors(
            tensor=(training.tensor, inference.tensor),
            expert=(training.expert, inference.expert),
            expert_tensor=(training.expert_cut,),
        )
    else:
        training = section.fsdp.sizes(world_size)
        divisors = Divisors((inference.tensor,), (inference.expert,))
    if num_layers is None:
        num_layers = _fewest_layers(config_of(model), training, inference, divisors)
    small = prepare_model(model, directory, num_layers, divisors)
    table = table_for(config_of(model))
    if isinstance(training, TrainParallelism):
        # Megatron needs sequence parallelism to train experts with TP.
        sequence_parallel = training.tensor > 1 and bool(table.dims.num_experts)
        actor = {"sequence_parallel": sequence_parallel, "make_vocab_size_divisible_by": 8, **actor}
    is_latent = table.transformer.get("multi_latent_attention")
    head_size = None if is_latent else table.dims.head_dim
    return Case(name, str(small), actor, generate, head_size)


def _fewest_layers(
    config: HfConfig,
    training: TrainParallelism | ShardedParallelism,
    inference: InferenceParallelism,
    divisors: Divisors,
) -> int:
    """Return the fewest layers that both layouts allow with a layer on every stage.

    If none does, returns the first candidate; the check of the configuration then has the reason.
    """
    num_published = table_for(config).dims.num_layers
    num_chunks = 1
    sides: list[TrainParallelism | InferenceParallelism] = [inference]
    if isinstance(training, TrainParallelism):
        num_chunks = training.pipeline * (training.virtual_pipeline or 1)
        sides.insert(0, training)
    first = min(max(_MIN_LAYERS, num_chunks, inference.pipeline), num_published)
    for num_layers in range(first, num_published + 1):
        table = table_for(reduced_config(config, num_layers, divisors))
        if not any(violations(side, table) for side in sides):
            return num_layers
    return first
