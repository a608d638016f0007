"""config.json as transformers' class of an architecture reads it, and checks of its values.

vLLM reads the file by the same class, which gives missing keys their defaults, checks types and
puts rotary settings of all versions in one place. But it accepts 0 heads, and a vocabulary of
2**80. So numbers have bounds here, and values that only one of the two engines computes are
refused.

transformers is imported by the first reading, and needs no torch for it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid_engine.errors import ConfigError, Violation, Violations, clipped, shortened
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.models.table import ModelDims

REMEDY = "Correct the value, or name another model"
MOST_EXPERTS = 100_000
"""Limit for all layers together. A table has three tensors per expert."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which configs have the number of routed experts in a layer."""
_DENSE_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
"""Keys under which configs have the intermediate size of dense layers."""

_REQUIRED = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("intermediate_size", "vocab_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
"""Sizes that published files contain, of those that their class has."""
_OF_ROTARY = ("rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim")
"""Keys that every class with `rope_parameters` reads, also without such a field."""
_ROTATED = ("head_dim", "qk_rope_head_dim")
_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers in `layer_types`."""
ROTARY_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
        *_KINDS,
    }
)
"""Keys of `rope_parameters` that tables know."""


_BOUNDS = {
    (1, 1000): ("num_hidden_layers", "n_layer"),
    (1, 2**24): ("vocab_size",),
    (1, 2**12): ("num_attention_heads", "num_key_value_heads", "n_head"),
    (1, 2**13): ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    (1, 2**14): (*NUM_EXPERTS, "num_experts_per_tok", "n_group", "topk_group"),
    (1, 2**40): ("max_position_embeddings", "original_max_position_embeddings"),
    (0, 2**40): ("sliding_window",),
    (0, 2**20): ("first_k_dense_replace", "max_window_layers"),
    (0, 256): ("n_shared_experts",),
    (0, 100): ("num_nextn_predict_layers",),
    (1, 2**20): (
        *("hidden_size", "intermediate_size", "n_embd", "n_inner", "n_positions"),
        *("moe_intermediate_size", "shared_expert_intermediate_size"),
        *("q_lora_rank", "kv_lora_rank"),
        *("decoder_sparse_step", "moe_layer_freq", "sliding_window_pattern"),
    ),
    (0.0, 1.0): ("rms_norm_eps", "layer_norm_epsilon"),
    (1e-9, 1.0): ("partial_rotary_factor",),
    (0.0, 1e15): ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    (1e-9, 1e15): (
        *("rope_theta", "rope_local_base_freq"),
        *("factor", "low_freq_factor", "high_freq_factor", "attention_factor"),
        *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        "routed_scaling_factor",
    ),
}
"""Least and most -> keys that have such numbers, whole ones if the least is one.

The bounds exceed any model. They keep numbers that are computed from the sizes from overflowing,
and work that is proportional to them from taking long.
"""
_BOUNDS_OF = {key: bounds for bounds, keys in _BOUNDS.items() for key in keys}


@dataclass(frozen=True)
class ConfigClass:
    """transformers' class of a config, and what a family's table knows beside it.

    Attributes:
        name: of the class.
        implied: keys with the only value that both engines compute; vLLM gets it if the file lacks
            it.
        others: further keys that the table reads, and sizes that published files lack, with their
            values if a file lacks them.
        rotates_part: transformers' model has `partial_rotary_factor`.
        relations: yields the violations between keys of the family, which are valid one by one.
    """

    name: str
    implied: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    rotates_part: bool = False
    relations: Callable[[Any], Violations] = lambda _: iter(())

    @property
    def loaded(self) -> Any:
        """The class."""
        import transformers

        return getattr(transformers, self.name)

    @property
    def keys(self) -> set[str]:
        """Keys of config.json that the class or the table reads."""
        aliases = self.loaded.attribute_map
        fields = inspect.get_annotations(self.loaded)
        rotary = _OF_ROTARY if "rope_parameters" in fields else ()
        return {*fields, *aliases, *aliases.values(), *rotary, *self.implied, *self.others}


def read_config(config: HfConfig, config_class: ConfigClass, source: str) -> Any:
    """Return an object of transformers' class with the contents of a config.json.

    Args:
        config: the contents. Keys that the class does not read are left out.
        config_class: class of the architecture.
        source: name of the file in error messages.

    Raises:
        ConfigError: lists every wrong value or, if there are none, every wrong relation.
    """
    keys = config_class.keys
    values = dict(config_class.others)
    values |= {key: copy.deepcopy(value) for key, value in config.items() if key in keys}
    aliases = config_class.loaded.attribute_map
    # By the names of the class: GPT-2's file has n_head for num_attention_heads.
    required = {aliases.get(key, key) for key in _REQUIRED if key in keys}
    lacking = required - {aliases.get(key, key) for key in values}
    invalid = [*map(missing, sorted(lacking)), *_outside_bounds(values)]
    for key in _NEVER_NULL & values.keys():
        if values[key] is None:
            del values[key]
    # A value out of bounds would make the class fail once more, or compute for very long.
    for violation in invalid:
        values.pop(violation.key.partition(".")[0], None)
    read = _read_by_class(values, config_class.loaded, invalid)
    if not invalid:
        invalid += _contradictions(config, config_class)
        invalid += _relations(read, config_class)
        invalid += config_class.relations(read)
    if invalid:
        raise ConfigError(
            [
                replace(violation, problem=f"{violation.problem}, in {source}")
                for violation in invalid
            ]
        )
    return read


_NEVER_NULL = frozenset(["partial_rotary_factor", "rope_theta"])
"""Keys of which null is the default of the class."""


def _read_by_class(values: dict[str, Any], loaded: Any, invalid: list[Violation]) -> Any:
    """Return an object of a class; append its refusals to `invalid`, by keys that they name."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    while True:
        try:
            return loaded(**values)
        except Exception as error:  # KeyError for a missing key, ZeroDivisionError for a size, ...
            is_of_field = isinstance(error, StrictDataclassFieldValidationError)
            if invalid and not is_of_field:
                return None  # may be due to a value that was left out
            message = f"{type(error).__name__}: {error}"
        # Messages name fields of the class, of which one has another name in config.json.
        fields = {key: key.replace("rope_scaling", "rope_parameters") for key in values}
        named = (key for key, field in fields.items() if re.search(rf"['`]{field}['`]", message))
        key = next(named, "model")
        values.pop(key, None)
        problem = clipped(f"{loaded.__name__} refuses it: {' '.join(message.split())}", 1000)
        invalid.append(Violation(key, problem, REMEDY, code="invalid-value"))
        if key == "model" or not is_of_field:
            return None


def _outside_bounds(values: Mapping[str, Any], section: str = "") -> Violations:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _outside_bounds(value, f"{section}{key}.")
        if key not in _BOUNDS_OF or value is None:
            continue
        least, most = _BOUNDS_OF[key]
        is_whole = isinstance(least, int)
        # `type`, because a bool is an int.
        is_number = type(value) is int or (type(value) is float and not is_whole)
        if not is_number or not least <= value <= most:
            kind = "whole number" if is_whole else "number"
            yield Violation(
                f"{section}{key}",
                f"{shortened(value)} is not a {kind} from {least} to {most:g}",
                REMEDY,
                code="invalid-value",
            )
        elif key in _ROTATED and value % 2:
            yield Violation(
                key,
                f"{value} elements, which are rotated in pairs",
                "Use an even number",
                code="not-even",
            )


def _contradictions(config: HfConfig, config_class: ConfigClass) -> Violations:
    for key, implied in config_class.implied.items():
        if config.get(key) not in (None, implied):
            yield Violation(
                key,
                f"is {shortened(config[key])}, but trainer and vLLM compute "
                f"this family only with {implied!r}",
                f"Write {implied!r} if the model is trained with it, or name another model",
                code="unsupported-value",
            )


def _relations(config: Any, config_class: ConfigClass) -> Violations:
    """Yield the violations between keys that families share."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # With latent attention every head has keys and values of its own.
    if heads % kv_heads and not hasattr(config, "kv_lora_rank"):
        yield Violation(
            "num_key_value_heads",
            f"{kv_heads} key/value heads do not divide {heads} attention heads",
            "Use a divisor of num_attention_heads",
            code="not-divisible",
        )
    if not getattr(config, "head_dim", None) and config.hidden_size % heads:
        yield Violation(
            config.attribute_map.get("num_attention_heads", "num_attention_heads"),
            f"{heads} heads do not divide hidden_size {config.hidden_size}, "
            "and there is no head_dim",
            "Use a divisor, or add head_dim",
            code="not-divisible",
        )
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _KINDS:
            yield Violation(
                f"layer_types.{layer}",
                f"{shortened(kind)} is none of {', '.join(sorted(_KINDS))}",
                REMEDY,
                code="invalid-value",
            )
    rope = getattr(config, "rope_parameters", None) or {}
    # Gemma-3's class has a default for each kind of layer.
    if _KINDS & rope.keys() and not isinstance(config.default_theta, dict):
        yield Violation(
            "rope_parameters",
            "gives parameters by kind of layer, which only Gemma-3 has",
            "Give one set of them",
            code="unsupported-value",
        )
    sections = (vars(config), rope, *(rope.get(kind) or {} for kind in sorted(_KINDS)))
    # Files give the share at the top or with the rotary settings, of all layers or of each kind. 1
    # means the whole head.
    shares = {section.get("partial_rotary_factor") or 1.0 for section in sections} - {1.0}
    if shares and not config_class.rotates_part:
        yield Violation(
            "partial_rotary_factor",
            f"is {shares.pop()}, which vLLM computes and transformers' "
            "class of this family does not",
            "Remove it, or use a family that has it",
            code="unsupported-value",
        )
    yield from _expert_relations(config)


def _expert_relations(config: Any) -> Violations:
    # The class decides which of the keys exists.
    count = next((getattr(config, key) for key in NUM_EXPERTS if hasattr(config, key)), 0)
    if not count:
        return
    if config.num_experts_per_tok is None:
        yield missing("num_experts_per_tok")
    elif config.num_experts_per_tok > count:
        yield Violation(
            "num_experts_per_tok",
            f"{config.num_experts_per_tok} of {count} experts for each token",
            f"Use at most {count}",
            code="more-than-experts",
        )
    if count * config.num_hidden_layers > MOST_EXPERTS:
        yield Violation(
            "num_experts",
            f"{count} experts in each of {config.num_hidden_layers} layers "
            f"are more than {MOST_EXPERTS:,}",
            "Use fewer",
            code="too-many-experts",
        )


def missing(key: str, problem: str = "is missing") -> Violation:
    """Return the violation of a key that config.json lacks."""
    return Violation(key, problem, "Name a model with a complete config.json", code="missing-key")


_SCALED_BY_KEY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Rotary scalings with whose factor `max_position_embeddings` is multiplied already."""


def longest_of(config: HfConfig) -> int | None:
    """Return the tokens of the longest sequence that vLLM derives from config.json, if it does.

    vLLM multiplies the positions by the factor of some rotary scalings. Source: vLLM 0.32.0,
    config/model.py.
    """
    config = config.get("text_config") or config
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or "gemma3" in str(config.get("model_type")):
        return positions
    # 4,096 positions with linear scaling by 4 make 16,384 tokens. Llama 3.1's 131,072 with "llama3"
    # by 8 stay, since the file's number includes the factor.
    is_scaled = scaling.get("rope_type", scaling.get("type")) in _SCALED_BY_KEY
    factor = 1 if is_scaled else scaling.get("factor") or 1
    return int(positions * factor) if isinstance(factor, int | float) else None


def dense_width(values: HfConfig, hidden_size: int) -> int:
    """Return the intermediate size of dense layers; `values`: contents of a config."""
    # GPT-2, GPT-J and Bloom compute it if config.json has none.
    widths = (values[key] for key in _DENSE_WIDTHS if values.get(key))
    return next(widths, 4 * hidden_size)


def dims_of(config: Any, with_experts: Collection[int] = (), *, tied_embeddings: bool) -> ModelDims:
    """Return the sizes of a text config, whose keys differ between families.

    Args:
        config: object of transformers' class.
        with_experts: layers that have experts.
        tied_embeddings: as in `ModelDims`.
    """
    # In place of attributes where layers may differ: such a config's attribute raises.
    values: dict[str, Any] = config.to_dict()
    num_heads = getattr(config, "num_attention_heads", None) or 1
    num_kv_heads = values.get("num_key_value_heads") or num_heads
    head_dim = values.get("head_dim") or config.hidden_size // num_heads
    latent = values.get("kv_lora_rank") or 0
    if latent:
        # `head_dim` is the rotated part alone. Every head computes keys from the cached vector.
        rotated = values["qk_rope_head_dim"]
        # DeepSeek-V3 caches 512 + 64 = 576 elements per token, and its query heads have 128 + 64 =
        # 192.
        latent += rotated
        head_dim = values["qk_nope_head_dim"] + rotated
        num_kv_heads = num_heads
    num_layers = config.num_hidden_layers
    num_experts = next((values[key] for key in NUM_EXPERTS if values.get(key)), 0)
    return ModelDims(
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=(
            0 if len(with_experts) == num_layers else dense_width(values, config.hidden_size)
        ),
        vocab_size=config.vocab_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tied_embeddings=tied_embeddings,
        # Some configs have a default number in models without experts.
        num_experts=num_experts if with_experts else 0,
        latent_kv_size=latent,
        num_linear_key_heads=values.get("linear_num_key_heads") or 0,
    )
