"""Comparison of Megatron's model with the Hugging Face config that vLLM computes.

vLLM computes what config.json describes, Megatron what its settings describe. Every difference is
reported under the flag or field that would remove it. FUNCTION_FIELDS of the refused fields
of `megatron_patches` lists the fields of megatron-core that change what is computed: each must have
the value that megatron-core derives from the architecture's table, and its default where the table
has none. All other fields belong to training.

Scales and rotary frequencies are not compared as fields, because several settings give the same
ones and latent attention ignores some that other attention reads. They are computed: from live
modules if there are any, otherwise by megatron-core's own classes.
"""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from hybrid_engine.compute_check.attention import Attention, Difference, Rotary, differences
from hybrid_engine.errors import Violation, Violations
from hybrid_engine.models.table import Extras, ModelTable, RotaryScaling
from megatron_patches.refused_fields import FUNCTION_FIELDS, UNREAD_BY_LATENT_ATTENTION

_FLAGS = {
    "activation_func": "--swiglu, --squared-relu, --quick-geglu, --no-bias-gelu-fusion",
    "gated_linear_unit": "--swiglu",
    "num_query_groups": "--group-query-attention --num-query-groups",
    "layernorm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "num_moe_experts": "--num-experts",
}
"""Fields of megatron-core whose flag has another name -> the flag."""

_OF_PATTERN = {"num_layers", "moe_layer_freq"}
"""Fields that --hybrid-layer-pattern sets; `config` compares the pattern with the model."""

_LATENT = (
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)
"""Fields from which latent attention (MLA) computes its scale and its rotary frequencies."""

_MEGATRON_SCALING = RotaryScaling("llama3", 8.0, 1.0, 4.0, 8192)
"""Rotary scaling of --use-rope-scaling."""

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
"""Key of differences that no setting of megatron-core's models would remove."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class SettingNames:
    """Names under which differences are reported.

    Attributes:
        setting: field of megatron-core's TransformerConfig -> its name for the user.
        argument: argument of Megatron's scripts, if not such a field -> its name for the user.
        flags: flags that the parser of these scripts has; None if it is unknown, or if there is no
            command line.
    """

    setting: Callable[[str], str]
    argument: Callable[[str], str]
    flags: frozenset[str] | None = None

    def mismatch(self, field: str, actual: Any, expected: Any, source: str) -> Violation:
        """Return the violation of a field of TransformerConfig that differs from `source`."""
        key = self.setting(field)
        has_flag = self.flags is None or any(
            flag in self.flags for flag in re.findall(r"--[\w-]+", key)
        )
        if has_flag:
            return _mismatch(key, actual, expected, source)
        violation = _mismatch(LIVE.setting(field), actual, expected, source)
        return replace(
            violation,
            remedy="No flag of this Megatron sets it: change config.json, "
            "or train through ActorHybridWorker",
            code="no-flag",
        )


FLAGS = SettingNames(lambda name: _FLAGS.get(name, _flag(name)), _flag)
"""Names on the command line of Megatron's scripts."""

LIVE = SettingNames(
    "TransformerConfig.{}".format, lambda name: f"GPTModel.{_KEYWORDS.get(name, name)}"
)
"""Names in Megatron's objects."""


def model_mismatches(
    table: ModelTable,
    args: Namespace,
    config: Any,
    names: SettingNames = FLAGS,
    source: str = "the Hugging Face config",
) -> list[Violation]:
    """Return every difference between the table's model and Megatron's.

    The vocabulary is compared by `vocabulary_mismatches`.

    Args:
        table: table of the Hugging Face config.
        args: Megatron's validated arguments, or those that can be read from a live model.
        config: megatron-core's TransformerConfig.
        names: names to report differences under.
        source: name of the config that the table was read from, for messages.
    """
    if table.is_derived:
        # The first switch compares what both sides compute.
        return [*_sizes(table, config, names, source), *_tied_embeddings(table, args, names)]
    has_pattern = getattr(args, "hybrid_layer_pattern", None) is not None
    return [
        *_layers(table, config, has_pattern, names, source),
        *_latent_attention(table, args, config, names, source),
        *_outside_layers(table, args, names),
        *_rotary(table, args, names),
        *_beyond_megatron(table),
    ]


def vocabulary_mismatches(
    table: ModelTable,
    args: Namespace,
    names: SettingNames = FLAGS,
) -> list[Violation]:
    """Return a violation if Megatron's padded vocabulary is smaller than the model's.

    Call it once the tokenizer has been read.
    """
    padded = args.padded_vocab_size
    expected = table.dims.vocab_size
    if padded >= expected:
        return []
    key = names.argument("vocab_size")
    return [
        Violation(
            key,
            f"{padded} rows after padding, the Hugging Face config has {expected}",
            f"Use the model's tokenizer, or raise {key}, or pad it to a larger multiple",
            code="vocabulary-too-small",
        )
    ]


def _sizes(table: ModelTable, config: Any, names: SettingNames, source: str) -> Violations:
    """Yield sizes of Megatron's layers that differ from those of the config."""
    dims = table.dims
    expected = {
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "num_attention_heads": dims.num_heads,
        "num_moe_experts": dims.num_experts or None,
    }
    if not dims.latent_kv_size:
        expected |= {"num_query_groups": dims.num_kv_heads, "kv_channels": dims.head_dim}
    for name, expected_value in expected.items():
        actual = getattr(config, name)
        if actual != expected_value:
            yield names.mismatch(name, actual, expected_value, source)


def _layers(
    table: ModelTable,
    config: Any,
    has_pattern: bool,
    names: SettingNames,
    source: str,
) -> Violations:
    """Yield fields of layers that differ from those that megatron-core derives from the table."""
    from hybrid_engine.backends.megatron.megatron_config import described_config

    actual = _computed(config)
    expected = _computed(described_config(table))
    ignored = set(_OF_PATTERN) if has_pattern else set()
    if not table.dims.ffn_hidden_size:
        # No layer has an MLP of that width.
        ignored.add("ffn_hidden_size")
    if table.transformer["activation_func"] is None:
        # `not_built` names it.
        ignored.add("activation_func")
    for name, expected_value in expected.items():
        # A field that only one of the two reads follows from another one, in which they differ.
        if name not in actual or name in ignored or actual[name] == expected_value:
            continue
        origin = source
        if name == "layernorm_epsilon":
            origin = f"{_EPSILONS[expected['normalization']]} in {source}"
        yield names.mismatch(name, actual[name], expected_value, origin)


def _latent_attention(
    table: ModelTable,
    args: Namespace,
    config: Any,
    names: SettingNames,
    source: str,
) -> Violations:
    """Yield differences in the scale and the rotary frequencies of latent attention.

    They are those of live modules, or of modules that would be built. A field is named if the
    table's value of it, alone, would change what Megatron computes.
    """
    if not (config.multi_latent_attention and table.transformer.get("multi_latent_attention")):
        return
    from hybrid_engine.backends.megatron.live_attention import latent_attention
    from hybrid_engine.backends.megatron.megatron_config import described_config

    described = described_config(table)
    sizes = ("qk_head_dim", "qk_pos_emb_head_dim")
    if any(getattr(config, size) != getattr(described, size) for size in sizes):
        return  # `_layers` reports the sizes
    expected = latent_attention(described)
    built = latent_attention(config)

    def acts_alone(field: str) -> bool:
        changed = copy.copy(config)
        setattr(changed, field, getattr(described, field))
        return any(differences(latent_attention(changed), built))

    def completed(attention: Attention) -> Attention:
        """Fill in from the settings whatever cannot be read from a live module."""
        if attention.scale is None:
            attention = replace(built, rotary=attention.rotary)
        if attention.rotary is None:
            attention = replace(attention, rotary=built.rotary)
        return attention

    live_modules = getattr(args, "attention", {}).values()
    live_differences = _distinct(map(completed, live_modules or [built]), expected)
    if not live_differences:
        return
    if any(differences(built, expected)):
        changed = [
            field for field in _LATENT if getattr(config, field) != getattr(described, field)
        ]
        for field in [field for field in changed if acts_alone(field)] or changed:
            yield names.mismatch(field, getattr(config, field), getattr(described, field), source)
        return
    for difference in live_differences:
        key = f"MLASelfAttention, {difference.name}"
        actual, described_value = difference.values
        yield _mismatch(key, actual, described_value, source)


def _distinct(layers: Iterable[Attention], expected: Attention) -> list[Difference]:
    """Return the differences of layers from `expected`, in order: layers alike differ alike."""
    distinct = dict.fromkeys(layers)
    return [*dict.fromkeys(chain.from_iterable(differences(layer, expected) for layer in distinct))]


def _computed(config: Any) -> dict[str, Any]:
    """Return the fields that decide what Megatron computes.

    Fields that Megatron does not read in this configuration are left out, and fields with several
    values of one meaning get the same value.
    """
    values = {name: getattr(config, name) for name in FUNCTION_FIELDS if hasattr(config, name)}
    values["activation_func"] = _activation(config)
    values["add_qkv_bias"] |= config.add_bias_linear  # covers all linear layers, these included
    # Attention computes the same default.
    values["softmax_scale"] = config.softmax_scale or config.kv_channels**-0.5
    ignored = set()
    if config.multi_latent_attention:
        ignored |= {*_LATENT, *UNREAD_BY_LATENT_ATTENTION}
    if config.num_moe_experts is None:
        ignored |= {name for name in FUNCTION_FIELDS if name.startswith("moe_")}
    else:
        values |= _routing(config)
    if config.moe_router_score_function != "softmax":
        ignored.add("moe_router_pre_softmax")
    return {name: value for name, value in values.items() if name not in ignored}


def _routing(config: Any) -> dict[str, Any]:
    """Return the settings of experts for which several values mean the same, in one form."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    num_groups = config.moe_router_num_groups
    num_chosen_groups = config.moe_router_group_topk
    if num_chosen_groups in (None, num_groups):
        # Any group may be chosen, as without groups.
        num_groups = None
        num_chosen_groups = None
    return {
        "moe_layer_freq": frequency,
        "moe_router_num_groups": num_groups,
        "moe_router_group_topk": num_chosen_groups,
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
    }


def _activation(config: Any) -> str:
    """Return the name that tables use for the activation."""
    function = config.activation_func
    if function is silu:
        return "silu"
    if function is gelu:
        # Megatron's fused bias and gelu, its default, is the approximation by tanh.
        return (
            "gelu_tanh"
            if config.bias_activation_fusion and not config.gated_linear_unit
            else "gelu"
        )
    if isinstance(function, partial) and function.func is gelu:
        return "gelu_tanh"
    return getattr(function, "__name__", repr(function))


def _outside_layers(table: ModelTable, args: Namespace, names: SettingNames) -> Violations:
    """Yield differences in embeddings, positions, head and multi-token prediction."""
    keywords = dict(table.gpt)
    if keywords.get("position_embedding_type") == "rope":
        keywords.setdefault("rotary_percent", 1.0)
    for name, expected in keywords.items():
        actual = getattr(args, _ARGS[name], expected)
        if actual != expected:
            yield _mismatch(names.argument(_ARGS[name]), actual, expected)
    yield from _tied_embeddings(table, args, names)
    # vLLM reads no weight of multi-token prediction, so a model may also be trained without it.
    num_mtp_layers = args.mtp_num_layers or 0
    if num_mtp_layers not in (0, table.dims.num_mtp_layers):
        key = names.argument("mtp_num_layers")
        yield _mismatch(key, num_mtp_layers, table.dims.num_mtp_layers)


def _tied_embeddings(table: ModelTable, args: Namespace, names: SettingNames) -> Violations:
    is_tied = not args.untie_embeddings_and_output_weights
    if is_tied != table.dims.tied_embeddings:
        key = names.argument("untie_embeddings_and_output_weights")
        yield _mismatch(key, _tied(is_tied), _tied(table.dims.tied_embeddings))


def _tied(is_tied: bool) -> str:
    return "tied" if is_tied else "untied"


def _rotary(table: ModelTable, args: Namespace, names: SettingNames) -> Violations:
    """Yield differences in rotary frequencies: of live layers, or of Megatron's arguments."""
    is_rotary = table.gpt.get("position_embedding_type") == "rope"
    if not is_rotary or table.transformer.get("multi_latent_attention"):
        return
    scaling = table.extras.rotary_scaling
    if not hasattr(args, "attention"):
        yield from _rotary_arguments(scaling, args, names)
        return
    expected = Attention(None, rotary=Rotary.of_frequencies(_frequencies(table)))
    if any(attention.rotary is None for attention in args.attention.values()):
        yield _beyond("rotary frequencies cannot be read off this model")
    for difference in _distinct(args.attention.values(), expected):
        actual, described = difference.values
        problem = (
            f"{difference.name} is {actual} in Megatron, "
            f"the Hugging Face config asks for {described} "
            f"(rotary scaling: {scaling or 'none'})"
        )
        key = names.argument("rotary_pos_emb")
        yield Violation(key, problem, "Make them agree", code="computes-otherwise")


def _rotary_arguments(
    scaling: RotaryScaling | None,
    args: Namespace,
    names: SettingNames,
) -> Violations:
    """Yield differences between the config's rotary scaling and Megatron's arguments for it.

    Megatron's scripts have one flag for Llama 3's scaling and one for the linear kind.
    """
    linear_factor = 1.0
    llama3 = scaling
    if scaling is not None and scaling.rope_type == "linear":
        linear_factor = scaling.factor
        llama3 = None
    actual_llama3 = _MEGATRON_SCALING if args.use_rope_scaling else None
    if actual_llama3 != llama3:
        actual = f"Megatron's own, {actual_llama3}" if actual_llama3 else "none"
        yield _mismatch(names.argument("use_rope_scaling"), actual, scaling or "none")
    actual_factor = getattr(args, "rotary_seq_len_interpolation_factor", None)
    if (actual_factor or 1.0) != linear_factor:
        key = names.argument("rotary_seq_len_interpolation_factor")
        yield _mismatch(key, actual_factor, scaling or "no rotary scaling")


def _frequencies(table: ModelTable) -> torch.Tensor:
    """Return the rotary frequencies of config.json, in radians per token.

    Shape: [half of the rotated part of a head].
    """
    from hybrid_engine.backends.megatron.megatron_config import scaled_frequencies

    dim = int(table.dims.head_dim * table.gpt.get("rotary_percent", 1.0))
    frequencies = table.gpt["rotary_base"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = table.extras.rotary_scaling
    return frequencies if scaling is None else scaled_frequencies(frequencies, scaling)


def _beyond_megatron(table: ModelTable) -> Violations:
    """Yield computations of the architecture that Megatron's own models have no setting for."""
    for computation in table.not_built:
        yield _beyond(computation)
    # megatron-core ranks a group of experts by this number of its best scores.
    num_chosen_groups = table.transformer.get("moe_router_group_topk")
    group_score = None
    if num_chosen_groups:
        group_score = table.transformer["moe_router_topk"] // num_chosen_groups
    by_megatron = {
        "rotary_scaling": table.extras.rotary_scaling,
        "experts_per_group_score": group_score,
    }
    for field in fields(Extras):
        value = getattr(table.extras, field.name)
        if value != by_megatron.get(field.name, field.default):
            yield _beyond(f"{field.name} {value}")


def _beyond(computation: str) -> Violation:
    return Violation(
        BEYOND_MEGATRON,
        f"{computation}: Megatron's GPT model does not compute this, vLLM does",
        "Choose another model, or train it through ActorHybridWorker",
        code="beyond-megatron",
    )


def _mismatch(
    key: str,
    actual: Any,
    expected: Any,
    source: str = "the Hugging Face config",
) -> Violation:
    return Violation(
        key,
        f"Megatron has {actual}, {source} asks for {expected}",
        "Make them agree",
        code="computes-otherwise",
    )
