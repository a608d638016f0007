"""A small model of the same architecture: the config of any Hugging Face model with its sizes cut down.

What decides a layout's form stays: the architecture, biases, tied embeddings, ratio of query to key/value heads where
it is small, the kinds of layers, experts and their groups. What only makes it large shrinks, as far as the layouts can
still divide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
