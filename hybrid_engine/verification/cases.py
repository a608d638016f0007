"""A case of `verify`: a small model with both sides' layouts, as a checked configuration.

The small model is the published one's config.json with its sizes cut down. What decides a layout's form stays: the
architecture, biases, tied embeddings, ratio of query to key/value heads where it is small, the kinds of layers, experts
and their groups. What only makes it large shrinks, as far as the layouts can still divide it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, load_config
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism, sizes_of
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
    *("micro_batch_size", "seq_length", "optimizer"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
}
"""Of `actor_config`: the batch and its memory."""
_OF_LAYOUTS = {
    *(size.key for size in sizes_of(InferenceParallelism)),
    *("infer_rank_order", "compress_reshard", "compression_dtype", "dtype", "lora_delivery", "transport"),
    *("release_weights", "enforce_eager", "vllm", "allow_version"),
}
"""Of `generate_config`: where weights lie in vLLM, and what they and the kernels are."""

HEAD_DIM = 32
"""Elements per attention head: the minimum of vLLM's CPU attention."""

VOCABULARY = 515
"""Tokens: not a multiple of anything that either engine pads to. More where the padded ones do not divide by TP."""

_PADDED_VOCABULARY = 576
"""By vLLM, to a multiple of 64."""

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
"""Largest value of keys that only scale the model."""

_WIDTHS = {
    "intermediate_size": 192,
    "n_inner": 192,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}
"""Of keys that tensor parallel sizes divide: the smallest value, or the next one that they divide too."""
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
_NUM_EXPERTS = 8

_LAYER_KEYS = ("num_hidden_layers", "n_layer")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Divisors:
    """Parallel sizes of both layouts; what they divide in the model they divide in the small one too."""

    tensor: Sequence[int] = ()
    expert: Sequence[int] = ()
    expert_tensor: Sequence[int] = ()


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


# -- the small model -------------------------------------------------------------------------------------------------


def reduced_config(config: Mapping[str, Any], num_layers: int, divisors: Divisors = Divisors()) -> dict[str, Any]:
    """Return the config with small sizes.

    Args:
        config: contents of config.json.
        num_layers: decoder layers to keep, at most the model's own.
        divisors: parallel sizes that it is for.
    """
    small = dict(config)
    for key, largest in _SIZES.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], largest)
    for key, width in _WIDTHS.items():
        if isinstance(small.get(key), int):
            small[key] = _reduced(small[key], width, 32, (*divisors.tensor, *divisors.expert_tensor))
    for key in _EXPERT_KEYS:
        if isinstance(small.get(key), int):
            fewest = max(_NUM_EXPERTS, *divisors.expert, 0)
            small[key] = _reduced(small[key], fewest, small.get("n_group") or 1, divisors.expert)
    for key in _LAYER_KEYS:
        if key in small:
            small[key] = min(small[key], num_layers)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            small[key] = value[:num_layers]  # one entry per layer
    if isinstance(dense := small.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [layer for layer in dense if layer < num_layers]
    padded = -(-_PADDED_VOCABULARY // (unit := math.lcm(64, *divisors.tensor))) * unit
    small["vocab_size"] = min(small["vocab_size"], padded - _PADDED_VOCABULARY + VOCABULARY)
    for key in _TOKEN_KEYS:
        if key in small:
            small[key] = _token_within(small[key], small["vocab_size"])
    small.setdefault("pad_token_id", None)  # a class's default may be outside the small vocabulary
    _reduce_heads(small, divisors.tensor)
    small.pop("quantization_config", None)
    return small


def _reduced(own: int, least: int, multiple: int, divisors: Sequence[int]) -> int:
    """The smallest multiple from `least` on that has those of the divisors that `own` has."""
    unit = math.lcm(multiple, *(each for each in divisors if own % each == 0))
    return min(own, -(-least // unit) * unit)


def _token_within(token: Any, vocabulary: int) -> Any:
    if isinstance(token, list):
        return [_token_within(one, vocabulary) for one in token]
    return token if token is None or token < vocabulary else token % vocabulary


def _reduce_heads(small: dict[str, Any], tp_sizes: Sequence[int]) -> None:
    """Reduce to 4 key/value heads with 2 query heads each, or as near to that as the parallel sizes allow."""
    key = "n_head" if "n_head" in small else "num_attention_heads"
    num_heads = small[key]
    num_kv_heads = small.get("num_key_value_heads") or num_heads
    ratio = num_heads // num_kv_heads
    choices = [
        (kv_heads, queries)
        for kv_heads in range(1, num_kv_heads + 1)
        for queries in range(1, ratio + 1)
        if num_kv_heads % kv_heads == 0 and _suits(kv_heads, queries, tp_sizes)
    ]
    kv_heads, queries = min(choices, key=lambda choice: (abs(4 - choice[0]), abs(2 - choice[1])), default=(4, 2))
    small[key] = kv_heads * queries
    if "num_key_value_heads" in small:
        small["num_key_value_heads"] = kv_heads
    hidden = small[key] * HEAD_DIM if small.get("head_dim") is None else 4 * HEAD_DIM
    small["n_embd" if "n_embd" in small else "hidden_size"] = hidden
    if small.get("head_dim") is not None:
        small["head_dim"] = HEAD_DIM
    if "query_pre_attn_scalar" in small:
        small["query_pre_attn_scalar"] = HEAD_DIM


def _suits(kv_heads: int, queries: int, tp_sizes: Sequence[int]) -> bool:
    return all(kv_heads * queries % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) for tp in tp_sizes)
