"""Case of `verify`: a small model with the layouts of both sides, as a checked configuration.

The small model is the published model's config.json with reduced sizes. Properties that decide the
form of a layout are kept: architecture, biases, tied embeddings, a small ratio of query to
key/value heads, kinds of layers, experts and their groups. Other sizes shrink as far as the layouts
can still divide them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, load_config
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
    sizes_of,
)
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models import table_for

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

HEAD_DIM = 32
"""Elements per attention head: the minimum of vLLM's CPU attention."""

VOCABULARY = 515
"""Tokens of the vocabulary, not a multiple of any padding of either engine.

It is larger if TP does not divide the padded vocabulary."""

_PADDED_VOCABULARY = 576
"""`VOCABULARY` as vLLM pads it, to a multiple of 64."""

_SIZES = {
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
"""Key that only scales the model -> largest value."""

_WIDTHS = {
    "intermediate_size": 192,
    "n_inner": 192,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}
"""Key that tensor parallel sizes divide -> smallest value; rounded up to one that they divide."""
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
_NUM_EXPERTS = 8

_LAYER_KEYS = ("num_hidden_layers", "n_layer")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Divisors:
    """Parallel sizes of both layouts.

    Sizes that they divide in the model stay divisible when reduced.
    """

    tensor: Sequence[int] = ()
    expert: Sequence[int] = ()
    expert_tensor: Sequence[int] = ()


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
        ConfigError: if the model has parts beside its text model.
    """
    remedy = "Set generate_config.verify to full in the job, which compares every weight"
    require_text_alone(_config_of(model), "model", remedy)
    section = ActorConfig.model_validate(actor)
    training: TrainParallelism | ShardedParallelism
    if section.fsdp is None:
        training = section.sizes(world_size)
    else:
        training = section.fsdp.sizes(world_size)
    inference = GenerateConfig.model_validate(generate).sizes(world_size)
    divisors = _divisors(training, inference)
    if num_layers is None:
        num_layers = _fewest_layers(_config_of(model), training, inference, divisors)
    small = prepare_model(model, directory, num_layers, divisors)
    table = table_for(_config_of(model))
    if isinstance(training, TrainParallelism):
        # Megatron needs sequence parallelism to train experts with TP.
        sequence_parallel = training.tensor > 1 and bool(table.dims.num_experts)
        actor = {"sequence_parallel": sequence_parallel, "make_vocab_size_divisible_by": 8, **actor}
    is_latent = table.transformer.get("multi_latent_attention")
    head_size = None if is_latent else table.dims.head_dim
    return Case(name, str(small), actor, generate, head_size)


def require_text_alone(config: Mapping[str, Any], key: str, remedy: str) -> None:
    """Raise ConfigError for a model whose text model is a part, as beside a vision tower.

    Args:
        config: contents of config.json.
        key: configuration key or argument of the model, for the error.
        remedy: for the error.
    """
    if not isinstance(config.get("text_config"), Mapping):
        return
    sections = " and ".join(name for name, value in config.items() if isinstance(value, Mapping))
    problem = f"its config.json has {sections}, and its copies here would lack a processor"
    raise ConfigError([Violation(key, problem, remedy, code="text-models-only")])


def _divisors(
    training: TrainParallelism | ShardedParallelism, inference: InferenceParallelism
) -> Divisors:
    if isinstance(training, ShardedParallelism):
        return Divisors((inference.tensor,), (inference.expert,))
    return Divisors(
        tensor=(training.tensor, inference.tensor),
        expert=(training.expert, inference.expert),
        expert_tensor=(training.expert_cut,),
    )


def _fewest_layers(
    config: Mapping[str, Any],
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
    first = min(max(_FEWEST_LAYERS, num_chunks, inference.pipeline), num_published)
    for num_layers in range(first, num_published + 1):
        table = table_for(reduced_config(config, num_layers, divisors))
        if not any(violations(side, table) for side in sides):
            return num_layers
    return first


def prepare_model(model: Path, directory: Path, num_layers: int, divisors: Divisors) -> Path:
    """Write the reduced config of `model` to `directory` and return `directory`.

    Raises:
        UnknownModelError: if the architecture has no table.
    """
    config = reduced_config(_config_of(model), num_layers, divisors)
    table_for(config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def _config_of(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


# -- the small model -------------------------------------------------------------------------------


def reduced_config(
    config: Mapping[str, Any], num_layers: int, divisors: Divisors = Divisors()
) -> dict[str, Any]:
    """Return a config with reduced sizes.

    Args:
        config: contents of config.json.
        num_layers: decoder layers to keep, at most the model's.
        divisors: parallel sizes of the layouts.
    """
    small = dict(config)
    for key, largest in _SIZES.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], largest)
    for key, width in _WIDTHS.items():
        if isinstance(small.get(key), int):
            tensor_sizes = (*divisors.tensor, *divisors.expert_tensor)
            small[key] = _reduced(small[key], width, 32, tensor_sizes)
    for key in _EXPERT_KEYS:
        if isinstance(small.get(key), int):
            fewest = max(_NUM_EXPERTS, *divisors.expert, 0)
            num_groups = small.get("n_group") or 1
            small[key] = _reduced(small[key], fewest, num_groups, divisors.expert)
    for key in _LAYER_KEYS:
        if key in small:
            small[key] = min(small[key], num_layers)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            small[key] = value[:num_layers]  # one entry per layer
    dense = small.get("mlp_only_layers")
    if isinstance(dense, list):
        small["mlp_only_layers"] = [layer for layer in dense if layer < num_layers]
    unit = math.lcm(64, *divisors.tensor)
    padded = -(-_PADDED_VOCABULARY // unit) * unit
    small["vocab_size"] = min(small["vocab_size"], padded - _PADDED_VOCABULARY + VOCABULARY)
    for key in _TOKEN_KEYS:
        if key in small:
            small[key] = _token_within(small[key], small["vocab_size"])
    # The default of a config class may be outside the small vocabulary.
    small.setdefault("pad_token_id", None)
    _reduce_heads(small, divisors.tensor)
    small.pop("quantization_config", None)
    return small


def _reduced(size: int, least: int, multiple: int, divisors: Sequence[int]) -> int:
    """Return the smallest value from `least` on, at most `size`, that keeps `size`'s divisors."""
    kept = [divisor for divisor in divisors if size % divisor == 0]
    unit = math.lcm(multiple, *kept)
    return min(size, -(-least // unit) * unit)


def _token_within(token: Any, vocabulary: int) -> Any:
    """Return a token id, or a list of ids, mapped into the vocabulary."""
    if isinstance(token, list):
        return [_token_within(entry, vocabulary) for entry in token]
    return token if token is None or token < vocabulary else token % vocabulary


def _reduce_heads(small: dict[str, Any], tp_sizes: Sequence[int]) -> None:
    """Reduce to 4 key/value heads with 2 query heads each, or the nearest that TP sizes allow."""
    key = "n_head" if "n_head" in small else "num_attention_heads"
    num_heads = small[key]
    num_kv_heads = small.get("num_key_value_heads") or num_heads
    ratio = num_heads // num_kv_heads
    choices = []
    for kv_heads in range(1, num_kv_heads + 1):
        if num_kv_heads % kv_heads:
            continue
        for queries in range(1, ratio + 1):
            if _is_divisible(kv_heads, queries, tp_sizes):
                distance = (abs(4 - kv_heads), abs(2 - queries))
                choices.append((distance, kv_heads, queries))
    # Without a choice, the check of the configuration has the reason.
    _, kv_heads, queries = min(choices, default=((0, 0), 4, 2))
    small[key] = kv_heads * queries
    if "num_key_value_heads" in small:
        small["num_key_value_heads"] = kv_heads
    hidden = small[key] * HEAD_DIM if small.get("head_dim") is None else 4 * HEAD_DIM
    small["n_embd" if "n_embd" in small else "hidden_size"] = hidden
    if small.get("head_dim") is not None:
        small["head_dim"] = HEAD_DIM
    if "query_pre_attn_scalar" in small:
        small["query_pre_attn_scalar"] = HEAD_DIM


def _is_divisible(kv_heads: int, queries: int, tp_sizes: Sequence[int]) -> bool:
    """Return whether all TP sizes divide the query heads, and divide or replicate KV heads."""
    for tp in tp_sizes:
        splits_kv_heads = kv_heads % tp == 0 or tp % kv_heads == 0
        if kv_heads * queries % tp or not splits_kv_heads:
            return False
    return True
