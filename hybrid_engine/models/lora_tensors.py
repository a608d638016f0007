"""LoRA adapters as canonical tensors: PEFT's names, and their packing, derived from the rule of the adapted weight.

W [out, in] of rule P        A [rank, in]                        B [out, rank]
column-parallel (dim 0)      replicated, the same for every      packed and sharded like the rows of W
                             tensor that P packs
row-parallel (dim 1)         sharded along its columns           replicated
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybrid_engine.models.packing import Packing, Replicated, Shape, Span, Split
from hybrid_engine.models.table import ModelTable

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM 0.32 accepts for `max_lora_rank`; an adapter's own rank may be smaller."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Scale and targets of a LoRA: W + alpha / rank * B A.

    Attributes:
        rank, alpha: as in the formula.
        target_modules: last parts of the changed modules' Hugging Face names, e.g. "q_proj".
        ranks, alphas: Hugging Face name of a module -> its own, where they are not the above.
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


@dataclass(frozen=True)
class ActorLora:
    """The LoRA that is trained, where it is delivered by itself.

    Attributes:
        settings: what its tensors mean.
        shapes: its canonical tensors.
        name: to generate with.
    """

    settings: LoraSettings
    shapes: Mapping[str, Shape]
    name: str = "actor"


def a_name(weight: str) -> str:
    """PEFT's name of the matrix A on a canonical weight."""
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_A.weight"


def b_name(weight: str) -> str:
    """PEFT's name of the matrix B on a canonical weight."""
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_B.weight"


def module_of(tensor: str) -> str:
    """Hugging Face name of the module that a matrix A or B, by its canonical name, is on."""
    return tensor.removeprefix("base_model.model.").rpartition(".lora_")[0]


def adapter_packings(packing: Packing) -> tuple[tuple[Packing, ...], Packing]:
    """Return the rules of an adapter on a weight with this one: of A for each canonical tensor that A belongs to, and
    of B. Raises ValueError for weights stored transposed."""
    if packing.transposed:
        raise ValueError(
            f"{', '.join(packing.tensors())}: adapters on transposed weights cannot be delivered; merge them"
        )
    if packing.dim == 0:
        return tuple(Replicated(a_name(weight)) for weight in packing.tensors()), _renamed(packing)
    (weight,) = packing.tensors()
    return (Split(a_name(weight), dim=1),), Replicated(b_name(weight))


def _renamed(packing: Packing) -> Packing:
    """The same rule for the matrices B of its tensors."""
    changes: dict[str, Any] = {}  # of fields that each kind of packing has of its own
    for each in fields(packing):
        value = getattr(packing, each.name)
        if isinstance(value, Span):
            changes[each.name] = Span(b_name(value.tensor), value.start)
        elif each.name == "name":
            changes[each.name] = b_name(value)
    return replace(packing, **changes)


def adapter_shapes(table: ModelTable, target_modules: Collection[str], rank: int) -> dict[str, Shape]:
    """Canonical tensors of adapters on every layer's `target_modules` (Megatron's names): name -> shape."""
    shapes: dict[str, Shape] = {}
    patterns = {
        pattern
        for rule in table.rules
        for name in rule.names
        if name.endswith(".weight") and name.removesuffix(".weight").rpartition(".")[2] in target_modules
        for pattern in rule.packing.tensors()
    }
    for layer in range(table.dims.num_layers + table.dims.num_mtp_layers):
        for pattern in sorted(patterns):
            weight = pattern.replace("{layer}", str(layer))
            if weight in table.shapes and table.is_served(weight):
                out, inner = table.shapes[weight]
                shapes[a_name(weight)], shapes[b_name(weight)] = (rank, inner), (out, rank)
    return shapes


def adapted_modules(shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    """Last parts of the Hugging Face names of the modules that have adapters, e.g. "q_proj"."""
    return tuple(sorted({module_of(name).rpartition(".")[2] for name in shapes}))
