"""What a name table is: for one architecture, every Megatron parameter name and how it is packed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.models.packing import ModelDims, Packing

_LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True, slots=True)
class Rule:
    """`packing` for the parameters called by any of `names`.

    Names are Megatron's, from below the DDP and precision wrappers, with `{layer}` for the layer number. Several
    names are the same parameter under several layer specs (local, Transformer Engine with fused norms).
    """

    names: tuple[str, ...]
    packing: Packing


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter's rule and, below a decoder layer, the layer index that its name carries."""

    packing: Packing
    layer: int | None


@dataclass(frozen=True)
class ModelTable:
    """The name table of one model: rules, sizes, and the canonical tensors of its checkpoint.

    Attributes:
        dims: sizes.
        rules: Megatron side.
        shapes: canonical name -> shape, in checkpoint order. Tied heads are not in it.
        megatron_settings: keyword arguments of megatron-core's TransformerConfig that the architecture determines, for
            building a model.
        not_built: settings of the config that a model built here would not have, one sentence each. The layout of a
            model that somebody else built does not depend on them.
    """

    dims: ModelDims
    rules: tuple[Rule, ...]
    shapes: Mapping[str, tuple[int, ...]]
    megatron_settings: Mapping[str, Any]
    not_built: tuple[str, ...] = ()

    def match(self, name: str) -> Match | None:
        """The rule for a Megatron parameter name, or None when the architecture has no such parameter."""
        layer_match = re.match(r"decoder\.layers\.(\d+)\.", name)
        layer = int(layer_match[1]) if layer_match else None
        pattern = name if layer_match is None else _LAYER + name[layer_match.end() :]
        for rule in self.rules:
            if pattern in rule.names:
                return Match(rule.packing, layer)
        return None


Table = Callable[[Mapping[str, Any]], ModelTable]


def in_layer(*names: str) -> tuple[str, ...]:
    """Names below a decoder layer."""
    return tuple(_LAYER + name for name in names)
