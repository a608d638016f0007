"""What config.json must say for each family: the keys that its table reads, with the defaults of transformers' class.

A key that is missing means to vLLM what the class says, so it does here: `families.table_for` fills it in.

`relations` says what must hold between keys, once each is right by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from hybrid_engine.errors import Violation, shortened
from hybrid_engine.models.config_schema import (
    Activation,
    Epsilon,
    ExpertCount,
    Flag,
    Heads,
    HeadSize,
    Index,
    Layers,
    LayerTypes,
    Period,
    Positions,
    Positive,
    Rope,
    Schema,
    Share,
    Size,
    Tokens,
    Vocabulary,
    Window,
    below,
)

MOST_EXPERTS = 100_000
"""Of all layers together: a table has three tensors for each."""


class Decoder(Schema):
    """What all families but GPT-2 have."""

    num_hidden_layers: Layers
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Vocabulary
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    tie_word_embeddings: Flag = None
    rms_norm_eps: Epsilon = 1e-6
    hidden_act: Activation | None = None
    max_position_embeddings: Positions | None = None
    rope_theta: Positive | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    attention_bias: Flag = None
    mlp_bias: Flag = None
    bos_token_id: Tokens = None
    eos_token_id: Tokens = None
    pad_token_id: Tokens = None

    def relations(self) -> Iterator[Violation]:
        for key in ("rope_scaling", "rope_parameters"):
            rope: Rope | None = getattr(self, key)
            if rope is not None:
                yield from below(key, rope.relations())
                yield from self._original_length(key, rope)
                yield from self._rope_by_layers(key, rope)

    def _original_length(self, key: str, rope: Rope) -> Iterator[Violation]:
        lengths = rope.original_max_position_embeddings, self.max_position_embeddings
        if rope.kind == "llama3" and lengths == (None, None):
            yield Violation(f"{key}.original_max_position_embeddings", "is missing", "Add it")

    def _rope_by_layers(self, key: str, rope: Rope) -> Iterator[Violation]:
        if rope.full_attention or rope.sliding_attention:
            yield Violation(key, "gives parameters by kind of layer, which only Gemma-3 has", "Give one set of them")


class GroupedQuery(Decoder):
    """Attention with query, key and value heads of one size."""

    head_dim: HeadSize | None = None
    partial_rotary_factor: Share | None = None

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


class Glm(GroupedQuery):
    """GLM-4."""

    num_key_value_heads: Heads | None = 2
    head_dim: HeadSize | None = 128
    rms_norm_eps: Epsilon = 1.5625e-07


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
    max_window_layers: Index | None = None


class Qwen3(Qwen):
    """Qwen3."""

    head_dim: HeadSize | None = 128


class Gemma2(Windowed):
    """Gemma-2."""

    num_key_value_heads: Heads | None = 4
    head_dim: HeadSize | None = 256
    tie_word_embeddings: Flag = True
    hidden_activation: Activation | None = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256
    sliding_window: Window | None = 4096
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


class Gemma3(Gemma2):
    """Gemma-3 (text)."""

    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    sliding_window_pattern: Period | None = None
    underscored_pattern: Period | None = Field(None, alias="_sliding_window_pattern")
    rope_local_base_freq: Positive = 10000.0

    def _rope_by_layers(self, key: str, rope: Rope) -> Iterator[Violation]:
        kinds = {"full_attention": rope.full_attention, "sliding_attention": rope.sliding_attention}
        if key == "rope_parameters" and not any(kinds.values()) and rope.model_fields_set:
            problem = f"gives no parameters of {' or '.join(kinds)} layers"
            yield Violation(key, problem, "Give them by kind of layer, as transformers 5 does")
        for kind, one in kinds.items():
            if one is not None:
                yield from below(f"{key}.{kind}", one.relations())
                yield from self._original_length(f"{key}.{kind}", one)


class Experts(Schema):
    """Routed experts; their number by the names that transformers 4 and 5 write."""

    num_hidden_layers: Layers
    num_experts: ExpertCount | None = None
    num_local_experts: ExpertCount | None = None
    n_routed_experts: ExpertCount | None = None
    num_experts_per_tok: ExpertCount
    norm_topk_prob: Flag = None

    @property
    def expert_count(self) -> int | None:
        return self.num_experts or self.num_local_experts or self.n_routed_experts

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if (count := self.expert_count) is None:
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
    decoder_sparse_step: Period = 1
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
    qkv_bias: Flag = None


class DeepseekV3(Experts, Decoder):
    """DeepSeek-V3 and R1: latent attention, groups of experts, multi-token prediction."""

    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size
    qk_nope_head_dim: HeadSize
    qk_rope_head_dim: HeadSize
    v_head_dim: HeadSize
    moe_intermediate_size: Size
    n_shared_experts: Annotated[int, Field(ge=0, le=256)] | None = 1
    first_k_dense_replace: Index = 3
    moe_layer_freq: Period = 1
    n_group: ExpertCount | None = 8
    topk_group: ExpertCount | None = 4
    topk_method: str | None = None
    routed_scaling_factor: Positive = 2.5
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=100)] | None = None
    rope_interleave: bool = True
    hidden_act: Activation = "silu"

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
        if self.num_groups > 1:
            yield from self._groups()

    def _groups(self) -> Iterator[Violation]:
        groups, chosen, count = self.num_groups, self.topk_group, self.expert_count
        if count is not None and count % groups:
            yield Violation("n_group", f"{groups} groups do not divide {count} experts", "Use a divisor")
        if chosen is None or chosen > groups:
            problem = f"is missing, with {groups} groups" if chosen is None else f"{chosen} of {groups} groups"
            yield Violation("topk_group", problem, f"Use a number from 1 to {groups}")
        elif count is not None and self.num_experts_per_tok > chosen * (count // groups):
            there = chosen * (count // groups)
            problem = f"{self.num_experts_per_tok} experts for each token, but {chosen} of {groups} groups have {there}"
            yield Violation("num_experts_per_tok", problem, "Use fewer, or raise topk_group")


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2 and V2-Lite, which have groups with one of the methods only."""

    n_shared_experts: Annotated[int, Field(ge=0, le=256)] | None = 2
    first_k_dense_replace: Index = 0
    n_group: ExpertCount | None = None
    topk_group: ExpertCount | None = None
    routed_scaling_factor: Positive = 1.0

    @property
    def num_groups(self) -> int:
        return super().num_groups if self.topk_method == "group_limited_greedy" else 1

    def relations(self) -> Iterator[Violation]:
        yield from super().relations()
        if self.topk_method == "group_limited_greedy" and self.n_group is None:
            yield Violation("n_group", "is missing, which topk_method 'group_limited_greedy' needs", "Add it")


class Gpt2(Schema):
    """GPT-2 and models of its kind."""

    n_layer: Layers
    n_embd: Size
    n_head: Heads
    vocab_size: Vocabulary
    n_inner: Size | None = None
    n_positions: Size = 1024
    activation_function: Activation = "gelu_new"
    layer_norm_epsilon: Epsilon = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: Flag = None
    add_cross_attention: Flag = None
    tie_word_embeddings: Flag = None
    bos_token_id: Tokens = None
    eos_token_id: Tokens = None
    pad_token_id: Tokens = None

    def relations(self) -> Iterator[Violation]:
        if self.n_embd % self.n_head:
            yield Violation("n_head", f"{self.n_head} heads do not divide n_embd {self.n_embd}", "Use a divisor")
