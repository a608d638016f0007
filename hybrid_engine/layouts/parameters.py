"""Every parameter that a name table speaks of: which rule, which layer and expert, which tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hybrid_engine.models.packing import Packing, Shape
from hybrid_engine.models.table import DECODER_LAYER, MTP_LAYER, ModelTable, Rule


class Location(StrEnum):
    """The part of a model that a parameter is in, by the beginning of Megatron's name."""

    EMBEDDING = "embedding."
    DECODER = DECODER_LAYER
    MTP = MTP_LAYER
    FINAL_NORM = "decoder.final_"
    HEAD = "output_layer."


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the whole model.

    Attributes:
        rule: its rule's index in the table.
        packing: how it is packed.
        location: part of the model.
        name: Megatron's, as a pattern.
        indices: `layer` and `expert`, global, where the name has them.
        tensors: canonical tensors that it packs; all are in the table.
    """

    rule: int
    packing: Packing
    location: Location
    name: str
    indices: Mapping[str, int]
    tensors: tuple[str, ...]

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one of the routed experts."""
        return "expert" in self.indices

    @property
    def is_of_mlp(self) -> bool:
        """Whether it belongs to a layer's MLP or experts, and not to its attention."""
        return "mlp" in self.name.removeprefix(self.location)


def parameters_of(table: ModelTable, most_experts: int | None = None) -> Iterator[Parameter]:
    """All parameters, each once; one that is on several stages (a tied head, an embedding) once for each location.

    `most_experts`: of each layer, counted from 0; default: all. Experts of a layer have equal shapes.

    Raises ValueError for a rule whose names begin with no known location.
    """
    dims = table.dims
    num_experts = dims.num_experts if most_experts is None else min(dims.num_experts, most_experts)
    layers = {
        Location.DECODER: range(dims.num_layers),
        Location.MTP: range(dims.num_layers, dims.num_layers + dims.num_mtp_layers),
    }
    for number, rule in enumerate(table.rules):
        patterns = rule.packing.tensors()
        for location, name in _locations_of(rule).items():
            has_experts = "{expert}" in name
            for layer in layers.get(location, (None,)):
                for expert in range(num_experts) if has_experts else (None,):
                    numbers = (("layer", layer), ("expert", expert))
                    indices = {key: value for key, value in numbers if value is not None}
                    tensors = tuple(pattern.format(**indices) for pattern in patterns)
                    if any(tensor in table.shapes for tensor in tensors):
                        yield Parameter(number, rule.packing, location, name, indices, tensors)


@dataclass(frozen=True, eq=False)
class StoredElements:
    """Elements of the parameters that ranks store, as in `SideLayout`; int arrays by pipeline stage.

    Attributes:
        largest_part: elements of one part of the model (see `parts_of`) on a rank, of all experts of a layer together.
    """

    num_elements: np.ndarray
    num_expert_elements: np.ndarray
    largest_part: int


def parts_of(table: ModelTable, numel_of: Callable[[Parameter], int]) -> list[tuple[Parameter, int]]:
    """Return one parameter of each part of the model, with the sum of `numel_of` over the part's; of experts one.

    A part is what is always on the same ranks: a layer's attention, MLP, expert; the embedding, the head and so on.
    """
    found: dict[object, tuple[Parameter, int]] = {}
    for parameter in parameters_of(table, most_experts=1):
        layer = parameter.indices.get("layer")
        key = parameter.location, layer, parameter.is_of_mlp, parameter.is_expert, layer is None and parameter.tensors
        first, numel = found.get(key, (parameter, 0))
        found[key] = first, numel + numel_of(parameter)
    return list(found.values())


def packed_size(packing: Packing, shapes: Mapping[str, Shape], tensors: tuple[str, ...]) -> int:
    """Length of the whole parameter along the packed dim, without padding."""
    return sum(shapes[tensor][packing.dim] for tensor in tensors)


def _locations_of(rule: Rule) -> dict[Location, str]:
    """The parts of the model that a rule speaks of, each with one of its names (they differ by layer spec)."""
    found: dict[Location, str] = {}
    for name in rule.names:
        location = next((location for location in Location if name.startswith(location)), None)
        if location is None:
            raise ValueError(f"{name}: begins with none of {', '.join(Location)}, so it is on no known stage")
        found.setdefault(location, name)
    return found
