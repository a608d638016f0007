"""Rules of layers with a recurrent state in place of attention: gated delta nets and Mamba-2.

A gated delta net (Qwen3-Next, Qwen3.5) projects to queries, keys, values, gates z, and one number
per value head each for b and a. Megatron has one projection, in which each rank has its heads' rows
of all six; a convolution runs over queries, keys and values. In checkpoints of Qwen3-Next the rows
of two projections are ordered by key head, in those of Qwen3.5 there are four projections.

Mamba-2 (Nemotron-H) projects to gates z, to x of every head, to B and C of every group of heads,
and to one number dt per head; its convolution runs over x, B and C. Nemotron-H's layers are one
block each: Mamba, attention, or an MLP without a gate.

Sources: `transformers` models qwen3_next, qwen3_5 and nemotron_h; Megatron-LM
`ssm/gated_delta_net.py`, `ssm/mamba_mixer.py`, `ssm/mamba_block.py`.
"""

from __future__ import annotations

from hybrid_engine.models.blocks import LAYER, attention_rules, outer_rules
from hybrid_engine.models.packing import HeadRows, PackedHeads, Packing, Replicated, Split
from hybrid_engine.models.table import ModelDims, Rule, Rules, in_layer
from hybrid_engine.records.regions import Shapes

_NET = LAYER + "linear_attn."
_CONVOLUTION = _NET + "conv1d.weight"

BACKBONE_LAYER = "backbone.layers.{layer}."
_MIXER = BACKBONE_LAYER + "mixer."


def delta_net_rules(patterns: Shapes, num_key_heads: int) -> Rules:
    """Return the rules of gated delta nets; none if no layer is one.

    Args:
        patterns: name with `{layer}` -> shape, of a checkpoint.
        num_key_heads: number of heads of queries and of keys.
    """
    if not num_key_heads or _CONVOLUTION not in patterns:
        return ()
    num_value_heads = patterns[_NET + "A_log"][0]
    value_rows = num_value_heads * patterns[_NET + "norm.weight"][0]
    # The convolution runs over queries, keys and values: 2 * key rows + value rows.
    key_rows = (patterns[_CONVOLUTION][0] - value_rows) // 2
    # Rows of query, key and value, of z, and of b and a, for a key head.
    rows = [key_rows, key_rows, value_rows, value_rows, num_value_heads, num_value_heads]
    rows = [number // num_key_heads for number in rows]

    def of_heads(tensor: str, *lengths: int) -> list[HeadRows]:
        """Return sections of which a tensor has the rows in turn for every key head."""
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        # In Qwen3-Next's in_proj_qkvz each key head has its q, k, v and z rows one after another,
        # so the q rows of the next head come a whole head later.
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
        # Both have the same parameter. A checkpoint has the tensors of one of them, and
        # `conventional_rules` drops the other.
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


def backbone_rules(patterns: Shapes, dims: ModelDims) -> Rules:
    """Return the rules of a model of one block per layer; none if it is no such model.

    Arguments as for `delta_net_rules`.
    """
    if _MIXER + "in_proj.weight" not in patterns:
        return ()
    norms = (
        *("norm.weight", "mixer.in_proj.layer_norm_weight"),
        *("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        *("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    )
    return (
        *outer_rules(dims, "backbone.embeddings.weight", "backbone.norm_f.weight"),
        Rule(in_layer(*norms), Replicated(BACKBONE_LAYER + "norm.weight")),
        *attention_rules(dims, _MIXER),
        Rule(in_layer("mlp.linear_fc1.weight"), Split(_MIXER + "up_proj.weight", dim=0)),
        Rule(in_layer("mlp.linear_fc2.weight"), Split(_MIXER + "down_proj.weight", dim=1)),
        *_mamba_rules(patterns),
    )


def _mamba_rules(patterns: Shapes) -> Rules:
    num_heads = patterns[_MIXER + "A_log"][0]
    inner = patterns[_MIXER + "norm.weight"][0]
    convolved = patterns[_MIXER + "conv1d.weight"][0]
    # Rows of B and of C. How many of them a group of heads has is not needed: Megatron requires a
    # multiple of the ranks as number of groups.
    state = (convolved - inner) // 2

    def of_convolution(tensor: str, start: int = 0) -> tuple[HeadRows, ...]:
        """Return x, B and C, which a tensor has in turn from a row on."""
        name = _MIXER + tensor
        return (
            HeadRows(name, num_heads, inner // num_heads, start),
            # One row per "head": any number of ranks that divides the groups divides the rows.
            HeadRows(name, state, 1, start + inner),
            HeadRows(name, state, 1, start + inner + state),
        )

    projection = _MIXER + "in_proj.weight"
    packings: dict[str, Packing] = {
        "in_proj.weight": PackedHeads(
            (
                HeadRows(projection, num_heads, inner // num_heads),
                *of_convolution("in_proj.weight", inner),
                # dt comes last, behind z (`inner` rows) and behind x, B and C (`convolved` rows).
                HeadRows(projection, num_heads, 1, inner + convolved),
            )
        ),
        "conv1d.weight": PackedHeads(of_convolution("conv1d.weight")),
        "conv1d.bias": PackedHeads(of_convolution("conv1d.bias")),
        "out_proj.weight": Split(_MIXER + "out_proj.weight", dim=1),
    }
    packings |= {
        name: Split(_MIXER + name, dim=0) for name in ("A_log", "D", "dt_bias", "norm.weight")
    }
    rules = []
    for name, packing in packings.items():
        # The convolution is no module of its own since megatron-core 0.19.
        names = dict.fromkeys(("mixer." + name, "mixer." + name.replace("conv1d.", "conv1d_")))
        rules.append(Rule(in_layer(*names), packing))
    return tuple(rules)
