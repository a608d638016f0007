"""config.json as data from outside: the keys that name tables read, with their types, ranges, relations and defaults.

`read_config` reports everything that is wrong, by config.json's own keys, before a table is made. A key that is missing
means what transformers' class says, and so what it means to vLLM; a test compares all of them. Sizes that every
published file gives are required. Keys that no table reads are let through, unless vLLM reads them
(backends/vllm/config_reads.py).

`transformers.AutoConfig` does not serve: with version 5.19 it accepts 36 of the 57 wrong files of the test's table (0
heads, 3 key/value heads for 4, a vocabulary of 2**80, an infinite rotary base) and a file that says nothing at all,
whose sizes it makes up; it raises the first of several faults alone, in four kinds of exceptions; it changes the
dictionary that it is given; and it takes 3.4 s and torch to import, where all of `config/` takes 0.35 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, Field

from hybrid_engine.errors import ConfigError, Violation, clipped, shortened

# The bounds are far beyond any model, and small enough that nothing which is made of them takes long or overflows.
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
LayerTypes = Annotated[
    list[Literal["full_attention", "sliding_attention", "attention"]], Field(max_length=1000)
]  # `attention` is an old name of the first

MOST_EXPERTS = 100_000
"""Limit over all layers together: a table has three tensors for each expert."""


def _token_ids(value: Any) -> Any:
    ids = value if isinstance(value, list) else [value]
    if value is not None and not all(type(token) is int and -(2**31) <= token < 2**31 for token in ids):
        raise ValueError("Input should be a token id, or a list of token ids")
    return value


Tokens = Annotated[Any, AfterValidator(_token_ids)]


class Schema(pydantic.BaseModel):
    """The keys of a family that are read."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
    implied: ClassVar[Mapping[str, Any]] = {}
    """Keys with the only value that both engines compute; vLLM is given it where it is absent."""

    def relations(self) -> Iterator[Violation]:
        """Find faults between keys that are valid by themselves."""
        return iter(())


Read = TypeVar("Read", bound=Schema)


def read_config(config: Mapping[str, Any], schema: type[Read], source: str) -> Read:
    """Return what `config`, the contents of the file `source`, says.

    Raises ConfigError with every wrong value or, where there is none, with every wrong relation.
    """
    try:
        read = schema.model_validate(config)
        found = [*_contradictions(config, schema), *read.relations()]
    except pydantic.ValidationError as error:
        found = [_violation_of(item) for item in error.errors(include_url=False, include_context=False)]
    if found:
        raise ConfigError([Violation(one.key, f"{one.problem}, in {source}", one.remedy) for one in found])
    return read


def _contradictions(config: Mapping[str, Any], schema: type[Schema]) -> Iterator[Violation]:
    for key, implied in schema.implied.items():
        if config.get(key) not in (None, implied):
            problem = f"is {shortened(config[key])}, but trainer and vLLM compute this family with {implied!r} alone"
            yield Violation(key, problem, f"Write {implied!r} if that is what it means, or name another model")


def _violation_of(item: Mapping[str, Any]) -> Violation:
    key = clipped(".".join(map(str, item["loc"])))
    if item["type"] == "missing":
        return Violation(key, "is missing", "Name a model with a complete config.json")
    is_section = item["type"] == "model_type"  # pydantic names the class
    message = "Input should be keys and values" if is_section else item["msg"].removeprefix("Value error, ")
    problem = f"{message}, found {shortened(item.get('input'))}"
    return Violation(key, problem, "Correct the value, or name another model")


class Rope(Schema):
    """`rope_scaling` as transformers 4 writes it, or `rope_parameters` as transformers 5 does."""

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
        """Type of scaling."""
        return self.rope_type or self.type or "default"

    def relations(self) -> Iterator[Violation]:
        needed = ["factor"] if self.kind in ("linear", "yarn", "llama3") else []
        needed += ["low_freq_factor", "high_freq_factor"] if self.kind == "llama3" else []
        for key in needed:
            if getattr(self, key) is None:
                yield Violation(key, f"is missing, which scaling of type {self.kind!r} needs", "Add it")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and low is not None and high is not None and low >= high:
            yield Violation("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}", "Use a larger one")


class Decoder(Schema):
    """All families but GPT-2."""

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
        """Rotary settings, whichever transformers wrote them."""
        sections = (self.rope_parameters, self.rope_scaling)
        given = next((one for one in sections if one is not None and one.model_fields_set), Rope())
        return given.model_copy(update={"rope_theta": given.rope_theta or self.rope_theta or 10000.0})

    @property
    def activation(self) -> str:
        """transformers' name."""
        return self.hidden_act or "silu"

    def relations(self) -> Iterator[Violation]:
        for key in ("rope_scaling", "rope_parameters"):
            rope: Rope | None = getattr(self, key)
            if rope is not None:
                yield from self._rope_relations(key, rope)
                yield from self._rope_by_layers(key, rope)

    def _rope_relations(self, key: str, rope: Rope) -> Iterator[Violation]:
        for found in rope.relations():
            yield Violation(f"{key}.{found.key}", found.problem, found.remedy)
        if rope.kind == "llama3" and not (rope.original_max_position_embeddings or self.max_position_embeddings):
            yield Violation(f"{key}.original_max_position_embeddings", "is missing", "Add it")

    def _rope_by_layers(self, key: str, rope: Rope) -> Iterator[Violation]:
        if rope.full_attention or rope.sliding_attention:
            yield Violation(key, "gives parameters by kind of layer, which only Gemma-3 has", "Give one set of them")


class GroupedQuery(Decoder):
    """Attention with query, key and value heads of one size. Llama."""

    rotates_part: ClassVar[bool] = False
    """Whether transformers' class has partial_rotary_factor."""
    head_dim: HeadSize | None = None
    partial_rotary_factor: Share | None = None

    @property
    def rotary_share(self) -> float | None:
        """Part of each head that is rotated, where the file says so."""
        return self.rope.partial_rotary_factor or self.partial_rotary_factor

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads is not None and heads % kv_heads:
            problem = f"{kv_heads} key/value heads do not divide {heads} attention heads"
            yield Violation("num_key_value_heads", problem, "Use a divisor of num_attention_heads")
        if self.head_dim is None and self.hidden_size % heads:
            problem = f"{heads} heads do not divide hidden_size {self.hidden_size}, and there is no head_dim"
            yield Violation("num_attention_heads", problem, "Use a divisor, or add head_dim")
        elif (size := self.head_dim or self.hidden_size // heads) % 2:
            key = "hidden_size" if self.head_dim is None else "head_dim"
            yield Violation(key, f"heads have {size} elements, which are rotated in pairs", "Use an even number")
        if not self.rotates_part and self.rotary_share not in (None, 1.0):
            problem = f"is {self.rotary_share}, which vLLM computes and transformers' class of this family does not"
            yield Violation("partial_rotary_factor", problem, "Remove it, or use a family that has it")


class Glm(GroupedQuery):
    rotates_part: ClassVar[bool] = True
    num_key_value_heads: Heads | None = 2
    head_dim: HeadSize | None = 128
    rms_norm_eps: Epsilon = 1.5625e-07
    attention_bias: Flag = True


class Windowed(GroupedQuery):
    """Some layers may see a sliding window."""

    sliding_window: Window | None = None
    layer_types: LayerTypes | None = None

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            problem = f"has {len(self.layer_types)} entries, but num_hidden_layers is {self.num_hidden_layers}"
            yield Violation("layer_types", problem, "Name the kind of every layer, or leave it out")


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

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if self.use_bidirectional_attention:
            problem = "is true, but vLLM's tokens attend to earlier ones alone"
            yield Violation("use_bidirectional_attention", problem, "Set it to false, or name another model")

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
        """Rotary settings of the layers that see everything."""
        if self.rope_parameters is None:  # as transformers 4 writes it
            return super().rope
        whole = self.rope_parameters.full_attention or Rope()
        return whole.model_copy(update={"rope_theta": whole.rope_theta or 1e6})

    @property
    def window_rotary_base(self) -> float:
        """Rotary base of the layers that have a window."""
        if self.rope_parameters is None:
            return self.rope_local_base_freq
        windowed = self.rope_parameters.sliding_attention
        return (windowed.rope_theta if windowed else None) or 10000.0

    def _rope_by_layers(self, key: str, rope: Rope) -> Iterator[Violation]:
        kinds = {"full_attention": rope.full_attention, "sliding_attention": rope.sliding_attention}
        if key == "rope_parameters" and not any(kinds.values()) and rope.model_fields_set:
            problem = f"gives no parameters of {' or '.join(kinds)} layers"
            yield Violation(key, problem, "Give them by kind of layer, as transformers 5 does")
        for kind, one in kinds.items():
            if one is not None:
                yield from self._rope_relations(f"{key}.{kind}", one)


class Experts(Schema):
    """Routed experts; their number by the names that transformers 4 and 5 write."""

    implied: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}  # vLLM computes experts with no other
    num_hidden_layers: Layers
    num_experts: ExpertCount | None = None
    num_local_experts: ExpertCount | None = None
    n_routed_experts: ExpertCount | None = None
    num_experts_per_tok: ExpertCount
    norm_topk_prob: Flag = None

    @property
    def expert_count(self) -> int:
        """Routed experts of a layer; 0 where the file has none of the three keys."""
        return self.num_experts or self.num_local_experts or self.n_routed_experts or 0

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if (count := self.expert_count) == 0:
            yield Violation("num_experts", "is missing, and so are num_local_experts and n_routed_experts", "Add it")
            return
        if self.num_experts_per_tok > count:
            problem = f"{self.num_experts_per_tok} of {count} experts for each token"
            yield Violation("num_experts_per_tok", problem, f"Use at most {count}")
        if count * self.num_hidden_layers > MOST_EXPERTS:
            problem = f"{count} experts in each of {self.num_hidden_layers} layers are more than {MOST_EXPERTS:,}"
            yield Violation("num_experts", problem, "Use fewer")


class Mixtral(Experts, GroupedQuery):
    """Experts in every layer, each as wide as `intermediate_size`."""

    num_local_experts: ExpertCount
    num_key_value_heads: Heads | None = 8
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Positive | None = 1e6
    sliding_window: Window | None = None


class Qwen3Moe(Experts, Qwen):
    """Qwen3 with experts."""

    num_key_value_heads: Heads | None = 4
    moe_intermediate_size: Size
    decoder_sparse_step: Size = 1
    mlp_only_layers: Annotated[list[Index], Field(max_length=1000)] | None = None

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if outside := [layer for layer in self.mlp_only_layers or () if layer >= self.num_hidden_layers]:
            problem = f"names layers {shortened(outside)}, but num_hidden_layers is {self.num_hidden_layers}"
            yield Violation("mlp_only_layers", problem, "Count layers from 0")


class Qwen2Moe(Qwen3Moe):
    """Qwen1.5 and Qwen2 with experts, one of them shared."""

    num_key_value_heads: Heads | None = 16
    shared_expert_intermediate_size: Size
    qkv_bias: Flag = True


class DeepseekV3(Experts, Decoder):
    """DeepSeek-V3 and R1: latent attention, shared experts, groups of experts."""

    implied: ClassVar[Mapping[str, Any]] = {
        **Experts.implied,
        "rope_interleave": True,  # vLLM does not read it
        # transformers does not read them; without, vLLM takes softmax and has no bias for the router
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
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
        """Groups of experts of which a token may use some."""
        return self.n_group or 1

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if self.qk_rope_head_dim % 2:
            problem = f"{self.qk_rope_head_dim} elements, which are rotated in pairs"
            yield Violation("qk_rope_head_dim", problem, "Use an even number")
        for key in ("rope_scaling", "rope_parameters"):
            rope: Rope | None = getattr(self, key)
            if rope is not None and rope.kind == "yarn" and rope.original_max_position_embeddings is None:
                yield Violation(f"{key}.original_max_position_embeddings", "is missing", "Add it")
        if self.num_groups > 1 and self.expert_count:
            yield from self._group_relations()

    def _group_relations(self) -> Iterator[Violation]:
        groups, chosen, count = self.num_groups, self.topk_group, self.expert_count
        if count % groups:
            yield Violation("n_group", f"{groups} groups do not divide {count} experts", "Use a divisor")
        if chosen is None or chosen > groups:
            problem = f"is missing, with {groups} groups" if chosen is None else f"{chosen} of {groups} groups"
            yield Violation("topk_group", problem, f"Use a number from 1 to {groups}")
        elif self.num_experts_per_tok > (there := chosen * (count // groups)):
            problem = f"{self.num_experts_per_tok} experts for each token, but {chosen} of {groups} groups have {there}"
            yield Violation("num_experts_per_tok", problem, "Use fewer, or raise topk_group")


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2 and V2-Lite, which have groups with one of the methods only."""

    # transformers reads neither
    implied: ClassVar[Mapping[str, Any]] = {**Experts.implied, "scoring_func": "softmax", "norm_topk_prob": False}
    n_shared_experts: Annotated[int, Field(ge=0, le=256)] | None = 2
    first_k_dense_replace: Index = 0
    n_group: ExpertCount | None = None
    topk_group: ExpertCount | None = None
    topk_method: Name | None = "greedy"
    routed_scaling_factor: Positive = 1.0

    @property
    def num_groups(self) -> int:
        return super().num_groups if self.topk_method == "group_limited_greedy" else 1

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if self.topk_method == "group_limited_greedy" and self.n_group is None:
            yield Violation("n_group", "is missing, which topk_method 'group_limited_greedy' needs", "Add it")
        for key, number in {"n_group": self.n_group, "topk_group": self.topk_group}.items():
            if self.topk_method == "greedy" and number is not None and number > 1:
                problem = f"is {number} with topk_method 'greedy', for which vLLM has groups and the trainer has none"
                yield Violation(key, problem, "Set it to 1, or topk_method to group_limited_greedy")


class Gpt2(Schema):
    """GPT-2 and models of its kind."""

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

    def relations(self) -> Iterator[Violation]:
        if self.n_embd % self.n_head:
            yield Violation("n_head", f"{self.n_head} heads do not divide n_embd {self.n_embd}", "Use a divisor")
