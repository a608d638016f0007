"""Name tables: for one architecture, every Megatron parameter name and how it is packed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybrid_engine.models.packing import Packing, Replicated, Shape

DECODER_LAYER = "decoder.layers.{layer}."
MTP_LAYER = "mtp.layers.{layer}."


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Sizes that constrain a layout, from the Hugging Face config.

    Attributes:
        num_layers: decoder layers, without those for multi-token prediction.
        hidden_size, vocab_size: as in the config; vocab_size without padding.
        ffn_hidden_size: of dense layers; 0 when every layer has experts.
        num_heads, num_kv_heads, head_dim: attention heads, key/value heads (query groups), elements per head.
        tied_embeddings: the output head is the embedding.
        num_experts: routed experts; 0 without.
        num_mtp_layers: multi-token prediction (MTP) layers; the checkpoint numbers them after the decoder's.
        latent_kv_size: elements that multi-head latent attention keeps of a token in place of keys and values; 0:
            there is none.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool
    num_experts: int = 0
    num_mtp_layers: int = 0
    latent_kv_size: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """`packing` for the parameters (or persistent buffers) called by any of `names`.

    Names are Megatron's, from below the DDP and precision wrappers, with `{layer}` for the layer number and
    `{expert}` for the expert's, both global. Several names are the same parameter under several layer specs (local,
    Transformer Engine with fused norms and grouped experts).
    """

    names: tuple[str, ...]
    packing: Packing


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter's rule and the numbers that its name carries: `layer`, `expert`."""

    packing: Packing
    indices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Serving:
    """Where vLLM's model of an architecture differs from what its packing rules would give.

    Attributes:
        ends_on_every_stage: embedding, final norm and head are on every pipeline stage, not on the first and last.
        whole_shared_experts: every rank has the shared expert whole where the replicas of one instance share the routed
            experts (vLLM then splits the sequence over tensor parallel ranks).
        cuts_fused_as_one: gate and up projection that are one tensor on disk are sharded like one projection.
    """

    ends_on_every_stage: bool = False
    whole_shared_experts: bool = False
    cuts_fused_as_one: bool = False


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How rotary frequencies are stretched for contexts longer than `original_max_position_embeddings` tokens.

    `linear` divides all of them by `factor`. `llama3` divides those whose wavelength is longer than the original
    context over `low_freq_factor`, leaves those shorter than it over `high_freq_factor`, and blends in between.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Extras:
    """Features of an architecture that megatron-core has no setting for; everything off by default.

    `trainer/megatron/model_variants.py` adds it to Megatron's layers and models. It has no part in the layout, but for
    the names that `post_norms` brings.

    Attributes:
        rotary_scaling: of the model's rotary frequencies.
        windows: for each layer the number of tokens a query sees, its own included; None sees all. Empty: all see all.
        window_rotary_base: rotary base of the layers that have a window, unscaled; None: the model's own.
        attention_softcap: attention scores s become cap * tanh(s / cap).
        logit_softcap: likewise the logits.
        embedding_scale: word embeddings are multiplied by it, rounded to their dtype.
        post_norms: the outputs of attention and MLP pass a norm before they are added to the residual.
        experts_per_group_score: a group of experts is ranked by the sum of its top-k scores (k = this value).
    """

    rotary_scaling: RotaryScaling | None = None
    windows: tuple[int | None, ...] = ()
    window_rotary_base: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    post_norms: bool = False
    experts_per_group_score: int | None = None


@dataclass(frozen=True)
class ModelTable:
    """The name table of one model: rules, sizes, and the canonical tensors of its checkpoint.

    Attributes:
        dims: sizes.
        rules: Megatron side.
        shapes: canonical name -> shape, in checkpoint order. Tied heads and other copies are not in it.
        transformer: keyword arguments of megatron-core's TransformerConfig (or MLATransformerConfig) that the
            architecture determines, for building a model. Functions and classes by name, see
            `trainer/megatron/build.py`. `moe_layer_freq` is a list: 1 for each layer of the checkpoint that has
            experts, else 0.
        gpt: keyword arguments of megatron-core's GPTModel, likewise.
        extras: what megatron-core has no setting for.
        copies: further tensors of a checkpoint -> the canonical tensor they repeat (shared embeddings of multi-token
            prediction); written when a checkpoint is saved, ignored when one is read.
        unserved: name prefixes of tensors that vLLM's model does not read (multi-token prediction).
        serving: vLLM's peculiarities.
        dtypes: canonical name -> dtype in a checkpoint, where it is not that of the weights (a router's bias).
        head: what the output layer gives for each token: a number for each of the vocabulary, or one (`value_table`).
        may_be_new: tensors that a checkpoint need not have; without them the model keeps its own.
        left_out: tensors of a checkpoint that this model has no place for, ignored when one is read.
        not_built: settings of the config that `build_model()` does not implement, one sentence each. The layout of a
            model that was built elsewhere does not depend on them.
        architecture: the entry of config.json's `architectures` that it is of.
    """

    dims: ModelDims
    rules: tuple[Rule, ...]
    shapes: Mapping[str, Shape]
    transformer: Mapping[str, Any]
    gpt: Mapping[str, Any] = field(default_factory=dict)
    extras: Extras = field(default_factory=Extras)
    copies: Mapping[str, str] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()
    serving: Serving = field(default_factory=Serving)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    head: Literal["vocabulary", "value"] = "vocabulary"
    may_be_new: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    not_built: tuple[str, ...] = ()
    architecture: str = ""

    @property
    def layer_spec(self) -> str:
        """Which layers Megatron builds, by name in `trainer/megatron/specs.py`."""
        extras = self.extras
        return "extended" if extras.windows or extras.attention_softcap or extras.post_norms else "default"

    def match(self, name: str) -> Match | None:
        """Return the rule for a Megatron parameter name, or None when the architecture has no such parameter."""
        pattern, indices = _pattern_of(name)
        for rule in self.rules:
            if pattern in rule.names:
                return Match(rule.packing, indices)
        return None

    def is_served(self, tensor: str) -> bool:
        """Return whether vLLM's model reads this canonical tensor."""
        return not tensor.startswith(self.unserved) if self.unserved else True


_NUMBERS = {
    "layer": re.compile(r"(?P<before>^(?:decoder|mtp)\.layers\.)(?P<number>\d+)(?=\.)"),
    "expert": re.compile(
        r"(?P<before>\.experts\.(?:local_experts\.(?=\d+\.)|linear_fc[12]\.(?:weight|bias)(?=\d+$)))(?P<number>\d+)"
    ),
}


def _pattern_of(name: str) -> tuple[str, dict[str, int]]:
    """A parameter's name with placeholders for its numbers, and the numbers."""
    indices: dict[str, int] = {}
    for key, expression in _NUMBERS.items():
        if found := expression.search(name):
            indices[key] = int(found["number"])
            name = expression.sub(rf"\g<before>{{{key}}}", name)
    return name, indices


_LAYERS = (DECODER_LAYER, MTP_LAYER + "transformer_layer.", MTP_LAYER + "mtp_model_layer.")
"""A decoder layer, and the transformer layer of a multi-token prediction layer before and since megatron-core 0.17."""


def in_layer(*names: str) -> tuple[str, ...]:
    """Return names below a decoder layer, and below the transformer layer of a multi-token prediction layer."""
    return tuple(prefix + name for prefix in _LAYERS for name in names)


VALUE_HEAD = "score.weight"
"""The output layer of a value model, as in transformers' classes for the classification of sequences and tokens."""


def value_table(table: ModelTable) -> ModelTable:
    """Return the table of a value model on an architecture, whose output is one number for each token.

    In place of the rows of the vocabulary the output layer has one row, [1, hidden_size]; it and the embedding are two
    weights. Layers for multi-token prediction only serve a loss over the vocabulary, and are left out.
    """
    own = [(tuple(name for name in rule.names if not name.startswith("output_layer.")), rule) for rule in table.rules]
    rules = [Rule(names, rule.packing) for names, rule in own if names]
    of_head = _packed(table.rules) - _packed(rules)
    shapes = {name: shape for name, shape in table.shapes.items() if table.is_served(name) and name not in of_head}
    shapes[VALUE_HEAD] = (1, table.dims.hidden_size)
    return replace(
        table,
        dims=replace(table.dims, tied_embeddings=False, num_mtp_layers=0),
        rules=(*rules, Rule(("output_layer.weight",), Replicated(VALUE_HEAD))),
        shapes=shapes,
        extras=replace(table.extras, logit_softcap=None),
        copies={},
        unserved=(),
        head="value",
        may_be_new=frozenset({VALUE_HEAD}),
        left_out=frozenset({*table.shapes, *table.copies, "lm_head.weight"} - shapes.keys()),
    )


def _packed(rules: Iterable[Rule]) -> set[str]:
    """The patterns of all tensors that some rules pack."""
    return {tensor for rule in rules for tensor in rule.packing.tensors()}
