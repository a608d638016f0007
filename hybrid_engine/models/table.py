"""What a name table is: for one architecture, every Megatron parameter name and how it is packed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_engine.models.packing import Packing, Shape
from hybrid_engine.models.variants import Extras

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
        num_experts, moe_ffn_hidden_size: routed experts and the width of one; 0 without.
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
    moe_ffn_hidden_size: int = 0
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
        layer_spec: which layers Megatron builds, by name in `trainer/megatron/specs.py`.
        extras: what megatron-core has no setting for, see `models/variants.py`.
        copies: further tensors of a checkpoint -> the canonical tensor they repeat (shared embeddings of multi-token
            prediction); written when a checkpoint is saved, ignored when one is read.
        unserved: name prefixes of tensors that vLLM's model does not read (multi-token prediction).
        serving: vLLM's peculiarities.
        dtypes: canonical name -> dtype in a checkpoint, where it is not that of the weights (a router's bias).
        head: what the output layer gives for each token: a number for each of the vocabulary, or one (value_table.py).
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
    layer_spec: str = "default"
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


Table = Callable[[Mapping[str, Any]], ModelTable]

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
