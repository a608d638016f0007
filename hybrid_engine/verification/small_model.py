"""A small model of the same architecture: the config of any Hugging Face model with its sizes cut down.

What decides a layout's form stays: the architecture, biases, tied embeddings, ratio of query to key/value heads where
it is small, the kinds of layers, experts and their groups. What only makes it large shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD_DIM = 32
"""Elements per attention head: the minimum of vLLM's CPU attention."""

VOCABULARY = 515
"""Tokens: not a multiple of anything that either engine pads to."""

_SIZES = {
    "intermediate_size": 192,
    "n_inner": 192,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts": 8,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
"""Largest value of keys that only scale the model."""

_LAYER_KEYS = ("num_hidden_layers", "n_layer")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def reduced_config(config: Mapping[str, Any], num_layers: int, tp_sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Return the config with small sizes.

    Args:
        config: contents of config.json.
        num_layers: decoder layers to keep, at most the model's own.
        tp_sizes: tensor parallel sizes that must divide the small model's heads, if they divide the model's own.
    """
    small = dict(config)
    for key, largest in _SIZES.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], largest)
    for key in _LAYER_KEYS:
        if key in small:
            small[key] = min(small[key], num_layers)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            small[key] = value[:num_layers]  # one entry per layer
    for key in _TOKEN_KEYS:
        if key in small:
            small[key] = _token_within(small[key], VOCABULARY)
    small.setdefault("pad_token_id", None)  # a class's default may be outside the small vocabulary
    _reduce_heads(small, tp_sizes)
    small.pop("quantization_config", None)
    return small


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
