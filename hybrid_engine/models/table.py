"""Name tables: every Megatron parameter name of an architecture, with its packing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from hybrid_engine.models.packing import (
    Packing,
    Replicated,
    part_of_tensor,
)
from hybrid_engine.records.regions import Shapes

DECODER_LAYER = "decoder.layers.{layer}."
MTP_LAYER = "mtp.layers.{layer}."


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Sizes that constrain a layout, from the Hugging Face config.

    Attributes:
        num_layers: decoder layers, without layers for multi-token prediction.
        hidden_size: as in the config.
        ffn_hidden_size: intermediate size of dense layers; 0 if every layer has experts.
        vocab_size: as in the config, without padding.
        num_heads: attention heads.
        num_kv_heads: key/value heads (query groups).
        head_dim: elements per query head.
        tied_embeddings: True if the output head is the embedding.
        num_experts: routed experts per layer; 0 in dense models.
        num_mtp_layers: multi-token prediction (MTP) layers. The checkpoint numbers them after the
            decoder's.
        latent_kv_size: elements per token that multi-head latent attention caches instead of keys
            and values; 0 for other attention.
        num_linear_key_heads: key heads of gated delta nets; 0: no layer is one.
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
    num_linear_key_heads: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """Packing of the parameters (or persistent buffers) with any of `names`.

    Names are Megatron's, below the DDP and precision wrappers, with `{layer}` and `{expert}` for
    global numbers. Several names are the same parameter in several layer specs (local, Transformer
    Engine with fused norms and grouped experts).

    Attributes:
        names: see above.
        packing: where the canonical tensors are in the parameter.
        around_one: the tensor is the factor of a norm, also in a model whose other norms multiply
            by 1 + weight. Megatron then stores the factor - 1 (`layernorm_zero_centered_gamma`).
    """

    names: tuple[str, ...]
    packing: Packing
    around_one: bool = False


Rules = tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Rule of a parameter, with the numbers `layer` and `expert` of its name."""

    rule: Rule
    indices: Mapping[str, int]

    @property
    def packing(self) -> Packing:
        return self.rule.packing


@dataclass(frozen=True, slots=True)
class Serving:
    """Differences of vLLM's model of an architecture from its packing rules.

    Attributes:
        ends_on_every_stage: embedding, final norm and head are on every pipeline stage instead of
            the first and last.
        whole_shared_experts: every rank has the whole shared expert if the replicas of an instance
            share the routed experts (vLLM then splits the sequence over tensor parallel ranks).
        cuts_fused_as_one: a gate and up projection that is one tensor on disk is sharded like a
            single projection.
    """

    ends_on_every_stage: bool = False
    whole_shared_experts: bool = False
    cuts_fused_as_one: bool = False


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Scaling of rotary frequencies for contexts beyond `original_max_position_embeddings` tokens.

    `linear` divides all frequencies by `factor`. `llama3` divides frequencies with a wavelength
    above the original context / `low_freq_factor`, keeps frequencies with a wavelength below the
    original context / `high_freq_factor`, and interpolates between them.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Extras:
    """Features of an architecture without a setting in megatron-core; all are off by default.

    `trainer/megatron/model_variants.py` adds them to Megatron's layers and models. They do not
    affect the layout, except for the names of `post_norms`.

    Attributes:
        rotary_scaling: scaling of the model's rotary frequencies.
        windows: for each layer, the number of tokens that a query attends to, including its token;
            None: all. An empty tuple: no layer has a window.
        window_rotary_base: unscaled rotary base of layers with a window; None: the model's base.
        attention_softcap: cap of attention scores s, which become cap * tanh(s / cap).
        logit_softcap: cap of logits, applied in the same way.
        embedding_scale: factor of word embeddings, rounded to their dtype.
        post_norms: True if a norm follows attention and MLP, before the residual addition.
        experts_per_group_score: a group of experts is ranked by the sum of this many top scores.
    """

    rotary_scaling: RotaryScaling | None = None
    windows: tuple[int | None, ...] = ()
    window_rotary_base: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    post_norms: bool = False
    experts_per_group_score: int | None = None


Head = Literal["vocabulary", "value"]
"""Output of a model for each token."""


@dataclass(frozen=True)
class ModelTable:
    """The name table of one model: rules, sizes, and the canonical tensors of its checkpoint.

    Attributes:
        dims: sizes.
        rules: rules of Megatron's parameters; none if a derived table has unusual names.
        shapes: canonical name -> shape, in checkpoint order, without tied heads and other copies.
        transformer: keyword arguments of megatron-core's TransformerConfig (or
            MLATransformerConfig) that the architecture determines, for building a model. Functions
            and classes are given by name, see `trainer/megatron/build.py`. `moe_layer_freq` is a
            list with 1 for each layer of the checkpoint that has experts, else 0. Empty in a
            derived table.
        layer_sizes: settings of `transformer` on which estimates of memory depend, in a derived
            table.
        gpt: keyword arguments of megatron-core's GPTModel that the architecture determines.
        extras: features without a setting in megatron-core.
        copies: further tensors of a checkpoint -> the canonical tensor they repeat (shared
            embeddings of multi-token prediction). They are written when a checkpoint is saved and
            ignored when it is read.
        unserved: name prefixes of tensors that vLLM's model does not read (multi-token prediction).
        serving: differences of vLLM's model.
        dtypes: canonical name -> dtype in a checkpoint, if it differs from the weights' dtype (a
            router's bias).
        head: output per token: "vocabulary" for logits, "value" for one number (`value_table`).
        may_be_new: tensors that a checkpoint may lack; the model then keeps its initial values.
        left_out: tensors of a checkpoint without a place in this model, ignored when it is read.
        ignored: patterns of the names of further such tensors, searched for in a name.
        not_built: settings of the config that `build_model()` does not implement, a sentence each.
            The layout of a model that was built elsewhere does not depend on them.
        architecture: its entry of config.json's `architectures`.
        placeholders: kind ("image", "video") -> token in whose places the model puts such; empty
            for models of text.
    """

    dims: ModelDims
    rules: Rules
    shapes: Shapes
    transformer: Mapping[str, Any]
    layer_sizes: Mapping[str, Any] = field(default_factory=dict)
    gpt: Mapping[str, Any] = field(default_factory=dict)
    extras: Extras = field(default_factory=Extras)
    copies: Mapping[str, str] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()
    serving: Serving = field(default_factory=Serving)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    head: Head = "vocabulary"
    may_be_new: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    not_built: tuple[str, ...] = ()
    architecture: str = ""
    placeholders: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_derived(self) -> bool:
        """True if it follows from transformers' class, and was not written."""
        return not self.transformer

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Settings of TransformerConfig on which estimates of memory depend."""
        return self.transformer or self.layer_sizes

    @property
    def extends_layers(self) -> bool:
        """True if Megatron's GPT layers are extended, by trainer/megatron/model_variants.py."""
        extras = self.extras
        return bool(extras.windows or extras.attention_softcap or extras.post_norms)

    @cached_property
    def refined_shapes(self) -> Shapes:
        """`shapes`, with the dims that rules take in steps split: see `PartOfTensor`."""
        refined = dict(self.shapes)
        parts = {part for rule in self.rules for part in rule.packing.parts()}
        # An index takes a dim as it is. Only steps split it.
        for part in sorted(part for part in parts if "::" in part):
            # Any expert has the same dims.
            pattern, _, selection = part.replace("{expert}", "0").partition("[")
            name = re.compile(re.escape(pattern).replace(r"\{layer\}", r"\d+"))
            for tensor in filter(name.fullmatch, self.shapes):
                selected = f"{tensor}[{selection}"
                refined[tensor] = part_of_tensor(selected, self.shapes[tensor]).shape
        return refined

    def match(self, name: str) -> Match | None:
        """Return the rule of a Megatron parameter; None if the architecture does not have it."""
        pattern, indices = _pattern_of(name)
        for rule in self.rules:
            if pattern in rule.names:
                return Match(rule, indices)
        return None

    def is_ignored(self, tensor: str) -> bool:
        """Return whether a checkpoint's tensor is ignored when the checkpoint is read."""
        return tensor in self.left_out or any(re.search(part, tensor) for part in self.ignored)

    def is_served(self, tensor: str) -> bool:
        """Return whether vLLM's model reads this canonical tensor."""
        return not tensor.startswith(self.unserved)


# A SequentialMLP has the number of an expert inside the name, a grouped MLP at its end.
_NUMBERS = {
    "layer": re.compile(r"(?P<before>^(?:decoder|mtp)\.layers\.)(?P<number>\d+)(?=\.)"),
    "expert": re.compile(
        r"(?P<before>\.experts\."
        r"(?:local_experts\.(?=\d+\.)|linear_fc[12]\.(?:weight|bias)(?=\d+$)))"
        r"(?P<number>\d+)"
    ),
}


def _pattern_of(name: str) -> tuple[str, dict[str, int]]:
    """Return a parameter's name with placeholders for its numbers, and the numbers."""
    indices: dict[str, int] = {}
    for key, expression in _NUMBERS.items():
        match = expression.search(name)
        if match:
            indices[key] = int(match["number"])
            name = expression.sub(rf"\g<before>{{{key}}}", name)
    return name, indices


_LAYERS = (
    DECODER_LAYER,
    # The transformer layer of a multi-token prediction layer, before and since megatron-core 0.17.
    MTP_LAYER + "transformer_layer.",
    MTP_LAYER + "mtp_model_layer.",
)


def in_layer(*names: str) -> tuple[str, ...]:
    """Return names below a decoder layer and below the transformer layer of an MTP layer."""
    return tuple(prefix + name for prefix in _LAYERS for name in names)


VALUE_HEAD = "score.weight"
"""Name of a value model's output layer, as in transformers' classification models."""
_OUTPUT_LAYERS = ("lm_head.", "embed_out.", "head.")
"""Beginnings of the names of output layers in checkpoints."""


def value_table(table: ModelTable) -> ModelTable:
    """Return the table of a value model on an architecture, with one number per token as output.

    The output layer has one row, [1, hidden_size], instead of a row per token of the vocabulary,
    and is not tied to the embedding. Layers for multi-token prediction serve only a loss over the
    vocabulary and are left out.
    """
    rules = []
    for rule in table.rules:
        names = tuple(name for name in rule.names if not name.startswith("output_layer."))
        if names:
            rules.append(replace(rule, names=names))
    # A tied embedding has only its own name here, and stays.
    shapes = {
        name: shape
        for name, shape in table.shapes.items()
        if table.is_served(name) and not name.startswith(_OUTPUT_LAYERS)
    }
    shapes[VALUE_HEAD] = (1, table.dims.hidden_size)
    # A checkpoint with a head for the vocabulary may contain it even if it is tied.
    checkpoint = {*table.shapes, *table.copies, "lm_head.weight"}
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
        left_out=frozenset(checkpoint - shapes.keys()),
    )
