"""Schemas of config.json: keys that name tables read, with types, ranges, relations and defaults.

`read_config` reports all faults under config.json's keys, before a table is built. A missing key
has the default of transformers' class, which is its meaning in vLLM; a test compares all defaults.
Sizes that every published file contains are required. Keys that no table reads are accepted, unless
vLLM reads them (backends/vllm/config_reads.py).

`transformers.AutoConfig` is not an alternative. Version 5.19 accepts 36 of the 57 wrong files of
the test's table (0 heads, 3 key/value heads for 4, a vocabulary of 2**80, an infinite rotary base)
and an empty file, for which it invents the sizes. It raises only the first of several faults, in
four kinds of exceptions. It changes the dictionary that is passed in. It takes 3.4 s and torch to
import, compared with 0.35 s for all of `config/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, Field

from hybrid_engine.errors import ConfigError, Violation, Violations, clipped, shortened
from hybrid_engine.files.model_files import HfConfig

# The bounds exceed any model. They keep numbers that are computed from the sizes from overflowing,
# and work that is proportional to them from taking long.
Layers = Annotated[int, Field(ge=1, le=1000)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Heads = Annotated[int, Field(ge=1, le=2**12)]
HeadSize = Annotated[int, Field(ge=1, le=2**13)]
ExpertCount = Annotated[int, Field(ge=1, le=2**14)]
Window = Annotated[int, Field(ge=0, le=2**40)]
Positions = Annotated[int, Field(ge=1, le=2**40)]
Index = Annotated[int, Field(ge=0, le=2**20)]
Epsilon = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e15)]
NonNegative = Annotated[float, Field(ge=0, le=1e15)]
Share = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(max_length=100)]
Flag = bool | None
# `attention` is an old name of `full_attention`.
LayerTypes = Annotated[
    list[Literal["full_attention", "sliding_attention", "attention"]],
    Field(max_length=1000),
]

MOST_EXPERTS = 100_000
"""Limit for all layers together. A table has three tensors per expert."""


def _token_ids(value: Any) -> Any:
    """Validate a token id, a list of token ids, or None."""
    if value is None:
        return value
    for token in value if isinstance(value, list) else [value]:
        # `type`, because a bool is an int and not a token id.
        if type(token) is not int or not -(2**31) <= token < 2**31:
            raise ValueError("Input should be a token id, or a list of token ids")
    return value


Tokens = Annotated[Any, AfterValidator(_token_ids)]


class Schema(pydantic.BaseModel):
    """Base of schemas: the keys of a family that name tables read."""

    model_config = pydantic.ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, frozen=True
    )
    implied: ClassVar[Mapping[str, Any]] = {}
    """Keys with the only value that both engines compute; vLLM gets it if the file lacks it."""

    def relations(self) -> Violations:
        """Yield the violations between keys that are valid individually."""
        return iter(())


Read = TypeVar("Read", bound=Schema)


def read_config(config: HfConfig, schema: type[Read], source: str) -> Read:
    """Validate the contents of a config.json.

    Args:
        config: the contents.
        schema: schema of the model's family.
        source: name of the file in error messages.

    Raises:
        ConfigError: lists every wrong value or, if there are none, every wrong relation.
    """
    try:
        read = schema.model_validate(config)
        invalid = [*_contradictions(config, schema), *read.relations()]
    except pydantic.ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        invalid = [_violation_of(item) for item in items]
    if invalid:
        raise ConfigError(
            [
                replace(violation, problem=f"{violation.problem}, in {source}")
                for violation in invalid
            ]
        )
    return read


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
    is_scaled = scaling.get("rope_type", scaling.get("type")) in _SCALED_BY_KEY
    factor = 1 if is_scaled else scaling.get("factor") or 1
    return int(positions * factor) if isinstance(factor, int | float) else None


def _contradictions(config: HfConfig, schema: type[Schema]) -> Violations:
    for key, implied in schema.implied.items():
        if config.get(key) not in (None, implied):
            yield Violation(
                key,
                f"is {shortened(config[key])}, but trainer and vLLM compute "
                f"this family only with {implied!r}",
                f"Write {implied!r} if the model is trained with it, or name another model",
                code="unsupported-value",
            )


def _violation_of(item: Mapping[str, Any]) -> Violation:
    """Convert an error of pydantic."""
    key = clipped(".".join(map(str, item["loc"])))
    if item["type"] == "missing":
        return Violation(
            key,
            "is missing",
            "Name a model with a complete config.json",
            code="missing-key",
        )
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "model_type":
        # pydantic's message names the class.
        message = "Input should be keys and values"
    return Violation(
        key,
        f"{message}, found {shortened(item.get('input'))}",
        "Correct the value, or name another model",
        code="invalid-value",
    )


def _missing(key: str, problem: str = "is missing") -> Violation:
    return Violation(key, problem, "Add it", code="missing-key")


class Rope(Schema):
    """Rotary settings: `rope_scaling` of transformers 4 or `rope_parameters` of transformers 5."""

    rope_type: Name | None = None
    type: Name | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    partial_rotary_factor: Share | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None
    attention_factor: Positive | None = None
    truncate: Flag = True
    full_attention: Rope | None = None
    sliding_attention: Rope | None = None

    @property
    def kind(self) -> str:
        """Type of the scaling."""
        return self.rope_type or self.type or "default"

    def relations(self) -> Violations:
        required = []
        if self.kind in ("linear", "yarn", "llama3"):
            required.append("factor")
        if self.kind == "llama3":
            required += ["low_freq_factor", "high_freq_factor"]
        for key in required:
            if getattr(self, key) is None:
                yield _missing(key, f"is missing, which scaling of type {self.kind!r} needs")
        low = self.low_freq_factor
        high = self.high_freq_factor
        if self.kind == "llama3" and low is not None and high is not None and low >= high:
            yield Violation(
                "high_freq_factor",
                f"{high:g} is not above low_freq_factor {low:g}",
                "Use a larger one",
                code="out-of-range",
            )


class Decoder(Schema):
    """Common keys of all families except GPT-2."""

    num_hidden_layers: Layers
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Vocabulary
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    tie_word_embeddings: Flag = None
    rms_norm_eps: Epsilon = 1e-6
    hidden_act: Name | None = None
    max_position_embeddings: Positions | None = None
    rope_theta: Positive | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    attention_bias: Flag = None
    mlp_bias: Flag = None
    bos_token_id: Tokens = None
    eos_token_id: Tokens = None
    pad_token_id: Tokens = None

    @property
    def rope(self) -> Rope:
        """Rotary settings, of either version of transformers."""
        rope = Rope()
        for section in (self.rope_scaling, self.rope_parameters):
            # `rope_parameters` comes last and wins. An empty section counts as absent.
            if section is not None and section.model_fields_set:
                rope = section
        base = rope.rope_theta or self.rope_theta or 10000.0
        return rope.model_copy(update={"rope_theta": base})

    @property
    def activation(self) -> str:
        """Name of the activation in transformers."""
        return self.hidden_act or "silu"

    def relations(self) -> Violations:
        for key in ("rope_scaling", "rope_parameters"):
            rope: Rope | None = getattr(self, key)
            if rope is not None:
                yield from self._rope_relations(key, rope)
                yield from self._rope_by_layers(key, rope)

    def _rope_relations(self, key: str, rope: Rope) -> Violations:
        for violation in rope.relations():
            yield replace(violation, key=f"{key}.{violation.key}")
        original = rope.original_max_position_embeddings or self.max_position_embeddings
        if rope.kind == "llama3" and not original:
            yield _missing(f"{key}.original_max_position_embeddings")

    def _rope_by_layers(self, key: str, rope: Rope) -> Violations:
        if rope.full_attention or rope.sliding_attention:
            yield Violation(
                key,
                "gives parameters by kind of layer, which only Gemma-3 has",
                "Give one set of them",
                code="unsupported-value",
            )


class GroupedQuery(Decoder):
    """Attention with query, key and value heads of one size, as in Llama."""

    rotates_part: ClassVar[bool] = False
    """True if transformers' class has partial_rotary_factor."""
    head_dim: HeadSize | None = None
    partial_rotary_factor: Share | None = None

    @property
    def rotary_share(self) -> float | None:
        """Rotated share of each head; None if the file does not contain it."""
        return self.rope.partial_rotary_factor or self.partial_rotary_factor

    def relations(self) -> Violations:
        yield from super().relations()
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if kv_heads is not None and heads % kv_heads:
            yield Violation(
                "num_key_value_heads",
                f"{kv_heads} key/value heads do not divide {heads} attention heads",
                "Use a divisor of num_attention_heads",
                code="not-divisible",
            )
        if self.head_dim is None and self.hidden_size % heads:
            yield Violation(
                "num_attention_heads",
                f"{heads} heads do not divide hidden_size {self.hidden_size}, "
                "and there is no head_dim",
                "Use a divisor, or add head_dim",
                code="not-divisible",
            )
        else:
            size = self.head_dim or self.hidden_size // heads
            if size % 2:
                yield Violation(
                    "hidden_size" if self.head_dim is None else "head_dim",
                    f"heads have {size} elements, which are rotated in pairs",
                    "Use an even number",
                    code="not-even",
                )
        if not self.rotates_part and self.rotary_share not in (None, 1.0):
            yield Violation(
                "partial_rotary_factor",
                f"is {self.rotary_share}, which vLLM computes and transformers' "
                "class of this family does not",
                "Remove it, or use a family that has it",
                code="unsupported-value",
            )


class Glm(GroupedQuery):
    rotates_part: ClassVar[bool] = True
    num_key_value_heads: Heads | None = 2
    head_dim: HeadSize | None = 128
    rms_norm_eps: Epsilon = 1.5625e-07
    attention_bias: Flag = True


class Windowed(GroupedQuery):
    """Attention with a sliding window in some layers."""

    sliding_window: Window | None = None
    layer_types: LayerTypes | None = None

    def relations(self) -> Violations:
        yield from super().relations()
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            yield Violation(
                "layer_types",
                f"has {len(self.layer_types)} entries, but num_hidden_layers "
                f"is {self.num_hidden_layers}",
                "Name the kind of every layer, or leave it out",
                code="different-number-of-layers",
            )


class Qwen(Windowed):
    """Qwen2, Qwen2.5."""

    num_key_value_heads: Heads | None = 32
    use_sliding_window: Flag = None
    sliding_window: Window | None = 4096
    max_window_layers: Index | None = None


class Qwen3(Qwen):
    head_dim: HeadSize | None = 128


class Gemma2(Windowed):
    num_key_value_heads: Heads | None = 4
    head_dim: HeadSize | None = 256
    tie_word_embeddings: Flag = True
    hidden_activation: Name | None = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256
    sliding_window: Window | None = 4096
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    use_bidirectional_attention: Flag = None

    def relations(self) -> Violations:
        yield from super().relations()
        if self.use_bidirectional_attention:
            yield Violation(
                "use_bidirectional_attention",
                "is true, but vLLM computes causal attention only",
                "Set it to false, or name another model",
                code="unsupported-value",
            )

    @property
    def activation(self) -> str:
        return self.hidden_activation or super().activation


class Gemma3(Gemma2):
    """Gemma-3 (text)."""

    vocab_size: Vocabulary = 262208
    num_attention_heads: Heads = 8
    rope_theta: Positive | None = 1e6
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    sliding_window_pattern: Size | None = None
    underscored_pattern: Size | None = Field(None, alias="_sliding_window_pattern")
    rope_local_base_freq: Positive = 10000.0

    @property
    def rope(self) -> Rope:
        """Rotary settings of the layers without a window."""
        # transformers 4 writes one set, transformers 5 one per kind of layer.
        if self.rope_parameters is None:
            return super().rope
        whole = self.rope_parameters.full_attention or Rope()
        return whole.model_copy(update={"rope_theta": whole.rope_theta or 1e6})

    @property
    def window_rotary_base(self) -> float:
        """Rotary base of the layers with a window."""
        if self.rope_parameters is None:
            return self.rope_local_base_freq
        windowed = self.rope_parameters.sliding_attention
        return (windowed.rope_theta if windowed else None) or 10000.0

    def _rope_by_layers(self, key: str, rope: Rope) -> Violations:
        kinds = {
            "full_attention": rope.full_attention,
            "sliding_attention": rope.sliding_attention,
        }
        if key == "rope_parameters" and not any(kinds.values()) and rope.model_fields_set:
            yield Violation(
                key,
                f"gives no parameters of {' or '.join(kinds)} layers",
                "Give them by kind of layer, as transformers 5 does",
                code="missing-key",
            )
        for kind, parameters in kinds.items():
            if parameters is not None:
                yield from self._rope_relations(f"{key}.{kind}", parameters)


class ExpertKeys(Schema):
    """Routed experts, with the keys of transformers 4 and 5 for their number."""

    # The only activation of experts in vLLM.
    implied: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    num_hidden_layers: Layers
    num_experts: ExpertCount | None = None
    num_local_experts: ExpertCount | None = None
    n_routed_experts: ExpertCount | None = None
    num_experts_per_tok: ExpertCount
    norm_topk_prob: Flag = None

    @property
    def expert_count(self) -> int:
        """Routed experts per layer; 0 if the file has none of the three keys."""
        return self.num_experts or self.num_local_experts or self.n_routed_experts or 0

    def relations(self) -> Violations:
        yield from super().relations()
        count = self.expert_count
        if count == 0:
            yield _missing(
                "num_experts",
                "is missing, and so are num_local_experts and n_routed_experts",
            )
            return
        if self.num_experts_per_tok > count:
            yield Violation(
                "num_experts_per_tok",
                f"{self.num_experts_per_tok} of {count} experts for each token",
                f"Use at most {count}",
                code="more-than-experts",
            )
        if count * self.num_hidden_layers > MOST_EXPERTS:
            yield Violation(
                "num_experts",
                f"{count} experts in each of {self.num_hidden_layers} layers "
                f"are more than {MOST_EXPERTS:,}",
                "Use fewer",
                code="too-many-experts",
            )


class Mixtral(ExpertKeys, GroupedQuery):
    """Experts in every layer, each of width `intermediate_size`."""

    num_local_experts: ExpertCount
    num_key_value_heads: Heads | None = 8
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Positive | None = 1e6
    sliding_window: Window | None = None


class Qwen3Moe(ExpertKeys, Qwen):
    """Qwen3 with experts."""

    num_key_value_heads: Heads | None = 4
    moe_intermediate_size: Size
    decoder_sparse_step: Size = 1
    mlp_only_layers: Annotated[list[Index], Field(max_length=1000)] | None = None

    def relations(self) -> Violations:
        yield from super().relations()
        layers = self.mlp_only_layers or ()
        outside = [layer for layer in layers if layer >= self.num_hidden_layers]
        if outside:
            yield Violation(
                "mlp_only_layers",
                f"names layers {shortened(outside)}, but num_hidden_layers "
                f"is {self.num_hidden_layers}",
                "Count layers from 0",
                code="out-of-range",
            )


class Qwen2Moe(Qwen3Moe):
    """Qwen1.5 and Qwen2 with experts, one of them shared."""

    num_key_value_heads: Heads | None = 16
    shared_expert_intermediate_size: Size
    qkv_bias: Flag = True


class DeepseekV3(ExpertKeys, Decoder):
    """DeepSeek-V3 and R1: latent attention, shared experts, groups of experts."""

    implied: ClassVar[Mapping[str, Any]] = {
        **ExpertKeys.implied,
        # vLLM does not read it.
        "rope_interleave": True,
        # transformers does not read these. Without them, vLLM uses softmax and no router bias.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size
    qk_nope_head_dim: HeadSize
    qk_rope_head_dim: HeadSize
    v_head_dim: HeadSize
    moe_intermediate_size: Size
    n_shared_experts: Annotated[int, Field(ge=0, le=256)] | None = 1
    first_k_dense_replace: Index = 3
    moe_layer_freq: Size = 1
    n_group: ExpertCount | None = 8
    topk_group: ExpertCount | None = 4
    norm_topk_prob: Flag = True
    routed_scaling_factor: Positive = 2.5
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=100)] | None = None

    @property
    def num_groups(self) -> int:
        """Number of groups of experts; a token uses experts of some of them."""
        return self.n_group or 1

    def relations(self) -> Violations:
        yield from super().relations()
        if self.qk_rope_head_dim % 2:
            yield Violation(
                "qk_rope_head_dim",
                f"{self.qk_rope_head_dim} elements, which are rotated in pairs",
                "Use an even number",
                code="not-even",
            )
        for key in ("rope_scaling", "rope_parameters"):
            rope: Rope | None = getattr(self, key)
            if rope is None or rope.kind != "yarn":
                continue
            if rope.original_max_position_embeddings is None:
                yield _missing(f"{key}.original_max_position_embeddings")
        if self.num_groups > 1 and self.expert_count:
            yield from self._group_relations()

    def _group_relations(self) -> Violations:
        groups = self.num_groups
        count = self.expert_count
        chosen = self.topk_group
        if count % groups:
            yield Violation(
                "n_group",
                f"{groups} groups do not divide {count} experts",
                "Use a divisor",
                code="not-divisible",
            )
        remedy = f"Use a number from 1 to {groups}"
        if chosen is None:
            problem = f"is missing, with {groups} groups"
            yield Violation("topk_group", problem, remedy, code="missing-key")
            return
        if chosen > groups:
            problem = f"{chosen} of {groups} groups"
            yield Violation("topk_group", problem, remedy, code="out-of-range")
            return
        available = chosen * (count // groups)
        if self.num_experts_per_tok > available:
            yield Violation(
                "num_experts_per_tok",
                f"{self.num_experts_per_tok} experts for each token, "
                f"but {chosen} of {groups} groups have {available}",
                "Use fewer, or raise topk_group",
                code="more-than-experts",
            )


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2 and V2-Lite, which have groups only with topk_method group_limited_greedy."""

    # transformers reads neither key.
    implied: ClassVar[Mapping[str, Any]] = {
        **ExpertKeys.implied,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }
    n_shared_experts: Annotated[int, Field(ge=0, le=256)] | None = 2
    first_k_dense_replace: Index = 0
    n_group: ExpertCount | None = None
    topk_group: ExpertCount | None = None
    topk_method: Name | None = "greedy"
    routed_scaling_factor: Positive = 1.0

    @property
    def num_groups(self) -> int:
        return super().num_groups if self.topk_method == "group_limited_greedy" else 1

    def relations(self) -> Violations:
        yield from super().relations()
        if self.topk_method == "group_limited_greedy" and self.n_group is None:
            yield _missing(
                "n_group",
                "is missing, which topk_method 'group_limited_greedy' needs",
            )
        if self.topk_method != "greedy":
            return
        for key, number in {"n_group": self.n_group, "topk_group": self.topk_group}.items():
            if number is not None and number > 1:
                yield Violation(
                    key,
                    f"is {number} with topk_method 'greedy', for which vLLM has "
                    "groups and the trainer has none",
                    "Set it to 1, or topk_method to group_limited_greedy",
                    code="unsupported-value",
                )


class Gpt2(Schema):
    """GPT-2 and derived models."""

    n_layer: Layers
    n_embd: Size
    n_head: Heads
    vocab_size: Vocabulary
    n_inner: Size | None = None
    n_positions: Size = 1024
    activation_function: Name = "gelu_new"
    layer_norm_epsilon: Epsilon = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: Flag = None
    add_cross_attention: Flag = None
    tie_word_embeddings: Flag = True
    bos_token_id: Tokens = None
    eos_token_id: Tokens = None
    pad_token_id: Tokens = None

    def relations(self) -> Violations:
        if self.n_embd % self.n_head:
            yield Violation(
                "n_head",
                f"{self.n_head} heads do not divide n_embd {self.n_embd}",
                "Use a divisor",
                code="not-divisible",
            )
