"""Rules of layers with a recurrent state in place of attention: gated delta nets.

A gated delta net (Qwen3-Next, Qwen3.5) projects to queries, keys, values, gates z, and one number
per value head each for b and a. Megatron has one projection, in which each rank has its heads' rows
of all six; a convolution runs over queries, keys and values. In checkpoints of Qwen3-Next the rows
of two projections are ordered by key head, in those of Qwen3.5 there are four projections.

Sources: `transformers` models qwen3_next and qwen3_5; Megatron-LM `ssm/gated_delta_net.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_engine.models.blocks import LAYER
from hybrid_engine.models.packing import HeadRows, PackedHeads, Replicated, Shape, Split
from hybrid_engine.models.table import Rule, in_layer

_NET = LAYER + "linear_attn."
_CONVOLUTION = _NET + "conv1d.weight"


def delta_net_rules(patterns: Mapping[str, Shape], num_key_heads: int) -> tuple[Rule, ...]:
    """Return the rules of gated delta nets; none if no layer is one.

    Args:
        patterns: name with `{layer}` -> shape, of a checkpoint.
        num_key_heads: number of heads of queries and of keys.
    """
    if not num_key_heads or _CONVOLUTION not in patterns:
        return ()
    num_value_heads = patterns[_NET + "A_log"][0]
    value_rows = num_value_heads * patterns[_NET + "norm.weight"][0]
    key_rows = (patterns[_CONVOLUTION][0] - value_rows) // 2
    # Rows of query, key and value, of z, and of b and a, for a key head.
    rows = [key_rows, key_rows, value_rows, value_rows, num_value_heads, num_value_heads]
    rows = [number // num_key_heads for number in rows]

    def of_heads(tensor: str, *lengths: int) -> list[HeadRows]:
        """Return sections of which a tensor has the rows in turn for every key head."""
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        step = sum(lengths)
        return [
            HeadRows(tensor, num_key_heads, length, start, step)
            for start, length in zip(starts, lengths, strict=True)
        ]

    def in_order(tensor: str, *lengths: int) -> list[HeadRows]:
        """Return sections that a tensor has one after another."""
        starts = [num_key_heads * sum(lengths[:index]) for index in range(len(lengths))]
        return [
            HeadRows(tensor, num_key_heads, length, start)
            for start, length in zip(starts, lengths, strict=True)
        ]

    by_head = [
        *of_heads(_NET + "in_proj_qkvz.weight", *rows[:4]),
        *of_heads(_NET + "in_proj_ba.weight", *rows[4:]),
    ]
    apart = [
        *in_order(_NET + "in_proj_qkv.weight", *rows[:3]),
        *in_order(_NET + "in_proj_z.weight", rows[3]),
        *in_order(_NET + "in_proj_b.weight", rows[4]),
        *in_order(_NET + "in_proj_a.weight", rows[5]),
    ]
    prefix = "self_attention."
    return (
        Rule(in_layer(prefix + "in_proj.weight"), PackedHeads(tuple(by_head))),
        Rule(in_layer(prefix + "in_proj.weight"), PackedHeads(tuple(apart))),
        Rule(
            in_layer(prefix + "conv1d.weight"),
            PackedHeads(tuple(in_order(_CONVOLUTION, *rows[:3]))),
        ),
        *(
            Rule(in_layer(prefix + name), Split(_NET + name, dim=0))
            for name in ("A_log", "dt_bias")
        ),
        Rule(
            in_layer(prefix + "out_norm.weight"), Replicated(_NET + "norm.weight"), around_one=True
        ),
        Rule(in_layer(prefix + "out_proj.weight"), Split(_NET + "out_proj.weight", dim=1)),
    )
