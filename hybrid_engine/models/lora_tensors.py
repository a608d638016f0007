"""LoRA adapters as canonical tensors with PEFT's names, packed by the rule of the adapted weight.

W [out, in] of rule P        A [rank, in]                        B [out, rank]
column-parallel (dim 0)      replicated, the same for every      packed and sharded like the rows
                             tensor that P packs                 of W
row-parallel (dim 1)         sharded along its columns           replicated
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybrid_engine.models.packing import Packing, Replicated, Span, Split
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.regions import Shape, Shapes

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 accepts for `max_lora_rank`. The rank of an adapter may be smaller."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Scale and targets of a LoRA: W + alpha / rank * B A.

    Attributes:
        rank: rank in the formula.
        alpha: alpha in the formula.
        target_modules: last parts of the adapted modules' Hugging Face names, e.g. "q_proj".
        ranks: exceptions to `rank`, by Hugging Face name of the module.
        alphas: exceptions to `alpha`, by Hugging Face name of the module.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest_rank(self) -> int:
        """Largest rank of any module."""
        return max([self.rank, *self.ranks.values()])

    def in_peft(self) -> dict[str, Any]:
        """Return the contents of PEFT's adapter_config.json, without the name of the model."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.target_modules),
            # Matched as regular expressions of a name's end: a dot would match any character.
            "rank_pattern": {re.escape(name): rank for name, rank in self.ranks.items()},
            "alpha_pattern": {re.escape(name): alpha for name, alpha in self.alphas.items()},
        }


@dataclass(frozen=True)
class ActorLora:
    """The trained LoRA, as it is delivered beside the base weights, or written for PEFT.

    Attributes:
        settings: scale and targets.
        shapes: canonical tensors of the adapter.
        name: name of the adapter in generation requests.
    """

    settings: LoraSettings
    shapes: Shapes
    name: str = "actor"


def a_name(weight: str) -> str:
    """Return PEFT's name of the matrix A on a canonical weight."""
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_A.weight"


def b_name(weight: str) -> str:
    """Return PEFT's name of the matrix B on a canonical weight."""
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_B.weight"


def module_of(tensor: str) -> str:
    """Return the Hugging Face name of the module adapted by a matrix A or B."""
    return tensor.removeprefix("base_model.model.").rpartition(".lora_")[0]


def adapter_packings(packing: Packing) -> tuple[tuple[Packing, ...], Packing]:
    """Return the packings of an adapter on a weight with `packing`.

    Returns:
        One packing of A for each canonical tensor that A belongs to, and the packing of B.

    Raises:
        ValueError: the weight is stored transposed.
    """
    if packing.transposed:
        names = ", ".join(packing.tensors())
        raise ValueError(f"{names}: adapters on transposed weights cannot be delivered; merge them")
    # W = [Wq; Wk; Wv] by rows has one update B A with one A for all three, so PEFT's A of q, k and
    # v are equal, and B is cut like W.
    if packing.dim == 0:
        packings_of_a = tuple(Replicated(a_name(weight)) for weight in packing.tensors())
        # Each kind of packing has different fields for its tensors: a name, or spans.
        changes: dict[str, Any] = {}
        for field_ in fields(packing):
            value = getattr(packing, field_.name)
            if isinstance(value, Span):
                changes[field_.name] = Span(b_name(value.tensor), value.start)
            elif field_.name == "name":
                changes[field_.name] = b_name(value)
        return packings_of_a, replace(packing, **changes)
    (weight,) = packing.tensors()
    return (Split(a_name(weight), dim=1),), Replicated(b_name(weight))


def adapter_shapes(
    table: ModelTable,
    target_modules: Collection[str],
    rank: int,
) -> dict[str, Shape]:
    """Return the canonical tensors of adapters on the `target_modules` of every layer.

    Args:
        table: name table of the model.
        target_modules: last parts of Megatron's names of the modules.
        rank: rank of the adapters.
    """
    patterns: set[str] = set()
    for rule in table.rules:
        for name in rule.names:
            module, _, kind = name.rpartition(".")
            if kind == "weight" and module.rpartition(".")[2] in target_modules:
                patterns.update(rule.packing.tensors())
    shapes: dict[str, Shape] = {}
    for layer in range(table.dims.num_layers + table.dims.num_mtp_layers):
        for pattern in sorted(patterns):
            weight = pattern.replace("{layer}", str(layer))
            if weight in table.shapes and table.is_served(weight):
                out, inner = table.shapes[weight]
                shapes[a_name(weight)] = (rank, inner)
                shapes[b_name(weight)] = (out, rank)
    return shapes


def adapted_modules(shapes: Shapes) -> tuple[str, ...]:
    """Return the sorted last parts of the adapted modules' Hugging Face names, e.g. "q_proj"."""
    names = {module_of(name).rpartition(".")[2] for name in shapes}
    return tuple(sorted(names))
