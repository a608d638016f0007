"""Is the model that Megatron's arguments or objects describe the one of a Hugging Face config?

vLLM computes what the config says, Megatron what its settings say: every difference is reported under the flag, or the
field, that would remove it. The table of the architecture says what to expect; settings it is silent about are
training's own.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch.nn.functional import gelu, silu

from hybrid_engine.errors import Violation
from hybrid_engine.models.table import ModelTable
from hybrid_engine.models.variants import Extras, RotaryScaling

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

_OF_TRAINING = {"moe_router_load_balancing_type", "moe_router_dtype"}
"""Settings that tables give for models built here, and that are training's own choice all the same."""

_OF_PATTERN = {"num_layers", "moe_layer_freq"}
"""Settings that --hybrid-layer-pattern sets where it is given; `config` compares the pattern with the model."""

_DEFAULTS = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "softmax_scale": None,
    "multi_latent_attention": False,
    "num_moe_experts": None,
    "window_size": None,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "attention_output_gate": False,
}
"""What a table that is silent about these means: megatron-core's own defaults."""

_MEGATRON_SCALING = RotaryScaling("llama3", 8.0, 1.0, 4.0, 8192)
"""What --use-rope-scaling computes."""

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
    """

    setting: Callable[[str], str]
    argument: Callable[[str], str]


FLAGS = Names(lambda name: _FLAGS.get(name, _flag(name)), _flag)
"""The command line of Megatron's scripts."""

LIVE = Names("TransformerConfig.{}".format, lambda name: f"GPTModel.{_KEYWORDS.get(name, name)}")
"""Megatron's objects."""


def model_mismatches(table: ModelTable, args: Namespace, config: Any, names: Names = FLAGS) -> list[Violation]:
    """Every difference between the table's model and Megatron's.

    Args:
        table: of the Hugging Face config.
        args: Megatron's validated arguments, or of a live model what it has of them; the vocabulary is compared by
            `vocabulary_mismatches`.
        config: megatron-core's TransformerConfig.
        names: of what differs.
    """
    return [
        *_layers(_expected(table, getattr(args, "hybrid_layer_pattern", None)), config, names),
        *_outside_layers(table, args, names),
        *_beyond_megatron(table, bool(args.use_rope_scaling), names),
    ]


def vocabulary_mismatches(table: ModelTable, args: Namespace, names: Names = FLAGS) -> list[Violation]:
    """Once the tokenizer is there: Megatron's padded vocabulary must hold the model's."""
    padded, wanted = args.padded_vocab_size, table.dims.vocab_size
    if padded >= wanted:
        return []
    key = names.argument("vocab_size")
    remedy = f"Use the model's tokenizer, or raise {key}, or pad it to a larger multiple"
    return [Violation(key, f"{padded} rows after padding, the Hugging Face config has {wanted}", remedy)]


def _expected(table: ModelTable, hybrid_pattern: str | None) -> dict[str, Any]:
    """Settings of the layers; the width of an MLP that no layer has is none of them."""
    unread = _OF_TRAINING | (set() if table.dims.ffn_hidden_size else {"ffn_hidden_size"})
    unread |= _OF_PATTERN if hybrid_pattern else set()
    return {name: value for name, value in {**_DEFAULTS, **table.transformer}.items() if name not in unread}


def _layers(expected: Mapping[str, Any], config: Any, names: Names) -> Iterator[Violation]:
    for name, wanted in expected.items():
        found = getattr(config, name, None)
        if name == "activation_func":
            found = _activation(config)
        elif name == "add_qkv_bias":  # biases everywhere are biases there, too
            found, wanted = found or config.add_bias_linear, wanted or expected["add_bias_linear"]
        elif name == "softmax_scale":  # None is what attention does by itself
            own = config.kv_channels**-0.5
            found, wanted = found or own, wanted or own
        elif name == "moe_layer_freq" and isinstance(found, int):
            found = [int(layer % found == 0) for layer in range(config.num_layers)]
        if found != wanted:
            yield _mismatch(names.setting(name), found, wanted)


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
    if (found := args.mtp_num_layers or 0) != table.dims.num_mtp_layers:
        yield _mismatch(names.argument("mtp_num_layers"), found, table.dims.num_mtp_layers)


def _beyond_megatron(table: ModelTable, use_rope_scaling: bool, names: Names) -> Iterator[Violation]:
    """What the architecture computes and Megatron's own scripts have few settings for, or none."""
    extras = table.extras
    if extras.rotary_scaling != (_MEGATRON_SCALING if use_rope_scaling else None):
        found = f"Megatron's own, {_MEGATRON_SCALING}" if use_rope_scaling else "none"
        yield _mismatch(names.argument("use_rope_scaling"), found, extras.rotary_scaling or "none")
    by_megatron = {"rotary_scaling": extras.rotary_scaling, "experts_per_group_score": _group_score(table)}
    for field in fields(Extras):
        value = getattr(extras, field.name)
        if value != by_megatron.get(field.name, field.default):
            problem = f"{field.name} {value}: Megatron's GPT model does not compute this, vLLM does"
            yield Violation(BEYOND_MEGATRON, problem, "Choose another model, or train it through ActorHybridWorker")


def _group_score(table: ModelTable) -> int | None:
    """How many scores megatron-core ranks a group of experts by, where there are groups."""
    groups = table.transformer.get("moe_router_group_topk")
    return table.transformer["moe_router_topk"] // groups if groups else None


def _mismatch(key: str, found: Any, wanted: Any) -> Violation:
    return Violation(key, f"Megatron has {found}, the Hugging Face config asks for {wanted}", "Make them agree")
