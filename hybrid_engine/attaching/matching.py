"""Is the model that Megatron's arguments or objects describe the one of a Hugging Face config?

vLLM computes what the config says, Megatron what its settings say: every difference is reported under the flag, or the
field, that would remove it. FUNCTION_FIELDS of `megatron_patches.review` lists the fields of megatron-core that change
what is computed. Each has to be what megatron-core itself makes of the architecture's table: at its default where the
table is silent. The other fields are training's own.

Scales and rotary frequencies are no fields: several settings give the same ones, and latent attention ignores some that
others heed. They are computed, from live modules where there are any, else by megatron-core's own classes.
"""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from hybrid_engine.errors import Violation
from hybrid_engine.models.table import Extras, ModelTable, RotaryScaling
from hybrid_engine.probes import Attention, Rotary, differences
from megatron_patches.review import FUNCTION_FIELDS, UNREAD_BY_LATENT_ATTENTION

_FLAGS = {
    "activation_func": "--swiglu, --squared-relu, --quick-geglu, --no-bias-gelu-fusion",
    "gated_linear_unit": "--swiglu",
    "num_query_groups": "--group-query-attention --num-query-groups",
    "layernorm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "num_moe_experts": "--num-experts",
}
"""Settings of megatron-core whose flag has another name."""

_OF_PATTERN = {"num_layers", "moe_layer_freq"}
"""Settings that --hybrid-layer-pattern sets where it is given; `config` compares the pattern with the model."""

_LATENT = (
    *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow"),
)
"""Settings by which latent attention (MLA) computes its scale and its rotary frequencies."""

_MEGATRON_SCALING = RotaryScaling("llama3", 8.0, 1.0, 4.0, 8192)
"""What --use-rope-scaling computes."""

_EPSILONS = {"RMSNorm": "rms_norm_eps", "LayerNorm": "layer_norm_epsilon"}
"""Kind of norm -> its epsilon's key in config.json."""

_ARGS = {
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "max_sequence_length": "max_position_embeddings",
}
"""Keyword of GPTModel -> Megatron's argument."""

_KEYWORDS = {
    **{argument: keyword for keyword, argument in _ARGS.items()},
    "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "use_rope_scaling": "rope_scaling",
    "mtp_num_layers": "mtp_block_spec",
}
"""Megatron's argument -> keyword of GPTModel, where they differ."""


BEYOND_MEGATRON = "model"
"""What differences are reported under that no setting of megatron-core's models would remove."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Names:
    """What a difference is reported under.

    Attributes:
        setting: of a field of megatron-core's TransformerConfig.
        argument: of what Megatron's scripts pass to the model beside it, by the name of Megatron's argument.
        flags: all that the parser of these scripts has; None: unknown, or there is no command line.
    """

    setting: Callable[[str], str]
    argument: Callable[[str], str]
    flags: frozenset[str] | None = None

    def mismatch(self, field: str, found: Any, wanted: Any, source: str) -> Violation:
        """A setting of TransformerConfig that is not what `source` asks for."""
        key = self.setting(field)
        if self.flags is None or any(flag in self.flags for flag in re.findall(r"--[\w-]+", key)):
            return _mismatch(key, found, wanted, source)
        remedy = "No flag of this Megatron sets it: change config.json, or train through ActorHybridWorker"
        return replace(_mismatch(LIVE.setting(field), found, wanted, source), remedy=remedy)


FLAGS = Names(lambda name: _FLAGS.get(name, _flag(name)), _flag)
"""The command line of Megatron's scripts."""

LIVE = Names("TransformerConfig.{}".format, lambda name: f"GPTModel.{_KEYWORDS.get(name, name)}")
"""Megatron's objects."""


def model_mismatches(
    table: ModelTable, args: Namespace, config: Any, names: Names = FLAGS, source: str = "the Hugging Face config"
) -> list[Violation]:
    """Every difference between the table's model and Megatron's.

    Args:
        table: of the Hugging Face config.
        args: Megatron's validated arguments, or of a live model what it has of them; the vocabulary is compared by
            `vocabulary_mismatches`.
        config: megatron-core's TransformerConfig.
        names: of what differs.
        source: what the table was read from, in messages.
    """
    has_pattern = getattr(args, "hybrid_layer_pattern", None) is not None
    return [
        *_layers(table, config, has_pattern, names, source),
        *_latent_attention(table, args, config, names, source),
        *_outside_layers(table, args, names),
        *_rotary(table, args, names),
        *_beyond_megatron(table),
    ]


def vocabulary_mismatches(table: ModelTable, args: Namespace, names: Names = FLAGS) -> list[Violation]:
    """Once the tokenizer is there: Megatron's padded vocabulary must hold the model's."""
    padded, wanted = args.padded_vocab_size, table.dims.vocab_size
    if padded >= wanted:
        return []
    key = names.argument("vocab_size")
    remedy = f"Use the model's tokenizer, or raise {key}, or pad it to a larger multiple"
    return [Violation(key, f"{padded} rows after padding, the Hugging Face config has {wanted}", remedy)]


def _layers(table: ModelTable, config: Any, has_pattern: bool, names: Names, source: str) -> Iterator[Violation]:
    """Every field that changes what is computed is what megatron-core itself makes of the table."""
    from hybrid_engine.backends.megatron.megatron_config import described_config

    found, wanted = _computed(config), _computed(described_config(table))
    unread = set(_OF_PATTERN) if has_pattern else set()
    if not table.dims.ffn_hidden_size:  # no layer has an MLP of that width
        unread.add("ffn_hidden_size")
    if table.transformer["activation_func"] is None:  # `not_built` names it
        unread.add("activation_func")
    # a field that only one of them reads follows from another one, in which they differ
    for name in (name for name in wanted if name in found and name not in unread):
        if found[name] != wanted[name]:
            said_by = f"{_EPSILONS[wanted['normalization']]} in {source}" if name == "layernorm_epsilon" else source
            yield names.mismatch(name, found[name], wanted[name], said_by)


def _latent_attention(
    table: ModelTable, args: Namespace, config: Any, names: Names, source: str
) -> Iterator[Violation]:
    """Scale and rotary frequencies of latent attention; of live modules, else of those that would be built.

    A setting is named where the table's value, alone, would change what Megatron computes.
    """
    if not (config.multi_latent_attention and table.transformer.get("multi_latent_attention")):
        return
    from hybrid_engine.backends.megatron.live_attention import latent_attention
    from hybrid_engine.backends.megatron.megatron_config import described_config

    described = described_config(table)
    if any(getattr(config, size) != getattr(described, size) for size in ("qk_head_dim", "qk_pos_emb_head_dim")):
        return  # reported as sizes
    wanted = latent_attention(described)
    built = latent_attention(config)

    def acts_alone(field: str) -> bool:
        changed = copy.copy(config)
        setattr(changed, field, getattr(described, field))
        return any(differences(latent_attention(changed), built))

    def completed(attention: Attention) -> Attention:
        """Fill in from the settings whatever cannot be read from a live module."""
        read = attention if attention.scale is not None else replace(built, rotary=attention.rotary)
        return read if read.rotary is not None else replace(read, rotary=built.rotary)

    live = dict.fromkeys(map(completed, getattr(args, "attention", {}).values())) or {built: None}
    if not any(found for attention in live for found in differences(attention, wanted)):
        return
    if any(differences(built, wanted)):
        other = [field for field in _LATENT if getattr(config, field) != getattr(described, field)]
        for field in [field for field in other if acts_alone(field)] or other:
            yield names.mismatch(field, getattr(config, field), getattr(described, field), source)
        return
    for found in dict.fromkeys(found for attention in live for found in differences(attention, wanted)):
        yield _mismatch(f"MLASelfAttention, {found.name}", found.first, found.second, source)


def _computed(config: Any) -> dict[str, Any]:
    """Fields that decide what Megatron computes, without those that it does not read in this configuration."""
    found = {name: getattr(config, name) for name in FUNCTION_FIELDS if hasattr(config, name)}
    found["activation_func"] = _activation(config)
    found["add_qkv_bias"] |= config.add_bias_linear  # biases everywhere are biases there, too
    found["softmax_scale"] = config.softmax_scale or config.kv_channels**-0.5  # as attention does by itself
    unread = {*_LATENT, *UNREAD_BY_LATENT_ATTENTION} if config.multi_latent_attention else set()
    if config.num_moe_experts is None:
        unread |= {name for name in FUNCTION_FIELDS if name.startswith("moe_")}
    else:
        found |= _routing(config)
    if config.moe_router_score_function != "softmax":
        unread.add("moe_router_pre_softmax")
    return {name: value for name, value in found.items() if name not in unread}


def _routing(config: Any) -> dict[str, Any]:
    """Settings of experts that have several values for the same."""
    frequency, groups = config.moe_layer_freq, (config.moe_router_num_groups, config.moe_router_group_topk)
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    if groups[1] in (None, groups[0]):  # all groups may be chosen
        groups = (None, None)
    return {
        "moe_layer_freq": frequency,
        "moe_router_num_groups": groups[0],
        "moe_router_group_topk": groups[1],
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
    }


def _activation(config: Any) -> str:
    """The name that tables use. Megatron's fused bias and gelu, its default, is the approximation by tanh."""
    function = config.activation_func
    if function is silu:
        return "silu"
    if function is gelu:
        return "gelu_tanh" if config.bias_activation_fusion and not config.gated_linear_unit else "gelu"
    if isinstance(function, partial) and function.func is gelu:
        return "gelu_tanh"
    return getattr(function, "__name__", repr(function))


def _outside_layers(table: ModelTable, args: Namespace, names: Names) -> Iterator[Violation]:
    """Embeddings, positions, head and multi-token prediction."""
    expected = dict(table.gpt)
    if expected.get("position_embedding_type") == "rope":
        expected.setdefault("rotary_percent", 1.0)
    for name, wanted in expected.items():
        if (found := getattr(args, _ARGS[name], wanted)) != wanted:
            yield _mismatch(names.argument(_ARGS[name]), found, wanted)
    tied, wanted = not args.untie_embeddings_and_output_weights, table.dims.tied_embeddings
    if tied != wanted:
        found = "tied" if tied else "untied"
        key = names.argument("untie_embeddings_and_output_weights")
        yield _mismatch(key, found, "tied" if wanted else "untied")
    # vLLM reads no weight of multi-token prediction: a model may go without
    if (found := args.mtp_num_layers or 0) not in (0, table.dims.num_mtp_layers):
        yield _mismatch(names.argument("mtp_num_layers"), found, table.dims.num_mtp_layers)


def _rotary(table: ModelTable, args: Namespace, names: Names) -> Iterator[Violation]:
    """Rotary frequencies: those of live layers, else what the arguments of Megatron's scripts make of them."""
    if table.gpt.get("position_embedding_type") != "rope" or table.transformer.get("multi_latent_attention"):
        return
    wanted = table.extras.rotary_scaling
    if not hasattr(args, "attention"):
        llama3 = _MEGATRON_SCALING if args.use_rope_scaling else None
        linear = getattr(args, "rotary_seq_len_interpolation_factor", None)
        is_linear = wanted is not None and wanted.rope_type == "linear"
        if llama3 != (None if is_linear else wanted):
            found = f"Megatron's own, {llama3}" if llama3 else "none"
            yield _mismatch(names.argument("use_rope_scaling"), found, wanted or "none")
        if (linear or 1.0) != (wanted.factor if wanted is not None and is_linear else 1.0):
            key = names.argument("rotary_seq_len_interpolation_factor")
            yield _mismatch(key, linear, wanted or "no rotary scaling")
        return
    live = dict.fromkeys(attention.rotary for attention in args.attention.values())
    if None in live:
        yield _beyond("rotary frequencies cannot be read off this model")
    asked = Attention(1.0, rotary=Rotary(tuple(_frequencies(table).tolist())))
    for each in dict.fromkeys(each for rotary in live for each in differences(replace(asked, rotary=rotary), asked)):
        problem = f"{each.name} is {each.first} in Megatron, the Hugging Face config asks for {each.second}"
        problem += f" (rotary scaling: {wanted or 'none'})"
        yield Violation(names.argument("rotary_pos_emb"), problem, "Make them agree")


def _frequencies(table: ModelTable) -> torch.Tensor:
    """Rotary frequencies [half of the rotated part of a head] that config.json asks for, in radians per token."""
    from hybrid_engine.backends.megatron.megatron_config import scaled_frequencies

    dim = int(table.dims.head_dim * table.gpt.get("rotary_percent", 1.0))
    frequencies = table.gpt["rotary_base"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = table.extras.rotary_scaling
    return frequencies if scaling is None else scaled_frequencies(frequencies, scaling)


def _beyond_megatron(table: ModelTable) -> Iterator[Violation]:
    """Yield what the architecture computes and Megatron's own models have no setting for."""
    for what in table.not_built:
        yield _beyond(what)
    by_megatron = {"rotary_scaling": table.extras.rotary_scaling, "experts_per_group_score": _group_score(table)}
    for field in fields(Extras):
        value = getattr(table.extras, field.name)
        if value != by_megatron.get(field.name, field.default):
            yield _beyond(f"{field.name} {value}")


def _beyond(what: str) -> Violation:
    problem = f"{what}: Megatron's GPT model does not compute this, vLLM does"
    return Violation(BEYOND_MEGATRON, problem, "Choose another model, or train it through ActorHybridWorker")


def _group_score(table: ModelTable) -> int | None:
    """How many scores megatron-core ranks a group of experts by, where there are groups."""
    groups = table.transformer.get("moe_router_group_topk")
    return table.transformer["moe_router_topk"] // groups if groups else None


def _mismatch(key: str, found: Any, wanted: Any, source: str = "the Hugging Face config") -> Violation:
    return Violation(key, f"Megatron has {found}, {source} asks for {wanted}", "Make them agree")
