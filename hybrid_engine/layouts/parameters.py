"""Every parameter of a name table, with its rule, layer, expert and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hybrid_engine.models.packing import Packing, part_of_tensor, tensor_name
from hybrid_engine.models.table import DECODER_LAYER, MTP_LAYER, ModelTable, Rule
from hybrid_engine.records.regions import Shape, Shapes


class Location(StrEnum):
    """Part of a model that contains a parameter; the value is the prefix of Megatron's name."""

    EMBEDDING = "embedding."
    DECODER = DECODER_LAYER
    MTP = MTP_LAYER
    FINAL_NORM = "decoder.final_"
    HEAD = "output_layer."


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model.

    Attributes:
        rule: index of its rule in the table.
        packing: mapping between the parameter and its canonical tensors.
        location: part of the model.
        name: Megatron's name, as a pattern.
        indices: global `layer` and `expert`, if they occur in the name.
        tensors: canonical tensors packed in it; all are in the table.
        selections: distinct parts of these tensors that it has, without names; empty for a whole
            tensor.
        shapes: shapes of these parts.
    """

    rule: int
    packing: Packing
    location: Location
    name: str
    indices: Mapping[str, int]
    tensors: tuple[str, ...]
    selections: tuple[str, ...]
    shapes: tuple[Shape, ...]

    @property
    def is_expert(self) -> bool:
        """True if it belongs to a routed expert."""
        return "expert" in self.indices


def parameters_of(table: ModelTable, most_experts: int | None = None) -> Iterator[Parameter]:
    """Yield all parameters.

    A parameter on several stages (a tied head, an embedding) is yielded once per location.

    Args:
        table: name table of the model.
        most_experts: number of experts of each layer to yield, from the first; default: all.
            The experts of a layer have equal shapes.

    Raises:
        ValueError: the name of a parameter has no known location.
    """
    dims = table.dims
    num_experts = dims.num_experts
    if most_experts is not None:
        num_experts = min(num_experts, most_experts)
    layers = {
        Location.DECODER: range(dims.num_layers),
        Location.MTP: range(dims.num_layers, dims.num_layers + dims.num_mtp_layers),
    }
    for number, rule in enumerate(table.rules):
        patterns = rule.packing.parts()
        for location, name in _locations_of(rule).items():
            has_experts = "{expert}" in name
            for layer in layers.get(location, (None,)):
                for expert in range(num_experts) if has_experts else (None,):
                    indices: dict[str, int] = {}
                    if layer is not None:
                        indices["layer"] = layer
                    if expert is not None:
                        indices["expert"] = expert
                    parts = [pattern.format(**indices) for pattern in patterns]
                    # A tensor occurs once, even if several parts of it are packed, as gate and up
                    # of a fused one.
                    tensors = tuple(dict.fromkeys(map(tensor_name, parts)))
                    # The table's rules cover all layer specs and options of the family, some of
                    # which this model does not have.
                    if any(tensor in table.shapes for tensor in tensors):
                        yield Parameter(
                            number,
                            rule.packing,
                            location,
                            name,
                            indices,
                            tensors,
                            tuple(part.removeprefix(tensor_name(part)) for part in parts),
                            tuple(_shape_of(part, table.shapes) for part in parts),
                        )


def _shape_of(part: str, shapes: Shapes) -> Shape:
    name = tensor_name(part)
    # Most parts are whole tensors.
    return shapes[name] if name == part else part_of_tensor(part, shapes[name]).kept


def packed_size(parameter: Parameter) -> int:
    """Return the length of the whole parameter along the packed dim, without padding."""
    return sum(shape[parameter.packing.dim] for shape in parameter.shapes)


def _locations_of(rule: Rule) -> dict[Location, str]:
    """Return the locations of a rule's parameters, each with the first of its names.

    Names differ by layer spec.
    """
    names: dict[Location, str] = {}
    for name in rule.names:
        location = next((prefix for prefix in Location if name.startswith(prefix)), None)
        if location is None:
            known = ", ".join(Location)
            raise ValueError(f"{name}: begins with none of {known}, so its stage is unknown")
        names.setdefault(location, name)
    return names


def linear_modules(table: ModelTable) -> dict[str, bool]:
    """Return Megatron's names of linear modules -> whether adapters on them have PEFT's form.

    They have none in experts, and on weights that a checkpoint stores transposed.
    """
    have_form: dict[str, bool] = {}
    for parameter in parameters_of(table, most_experts=1):
        module, _, kind = parameter.name.rpartition(".")
        # Grouped experts have a number at the end of the name: weight0, weight1.
        if "linear_" in module and kind.startswith("weight"):
            name = module.rpartition(".")[2]
            is_plain = not (parameter.is_expert or parameter.packing.transposed)
            have_form[name] = have_form.get(name, True) and is_plain
    return have_form
