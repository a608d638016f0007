"""Tensors with the same owners on both sides, which are planned once for all of them; and what cannot be planned.

Tensors of a class move alike but for who sends (see routes.RoundRobinOffset), so a model of 46,000 tensors is some
hundred classes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.plan import wire_dtype
from hybrid_engine.records.holdings import Holdings, TensorOwners
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.records.owners import BoxOwners, touching
from hybrid_engine.records.regions import Region, subtract_all


@dataclass(frozen=True, eq=False)
class TensorClass:
    """Tensors with the same owners on both sides.

    Attributes:
        sources, destinations: the owners in training and in inference.
        tensors: names, in the plan's order.
        first: the first one's ordinal in the plan.
        itemsizes: bytes per element on the wire, for each tensor; int array.
    """

    sources: TensorOwners
    destinations: TensorOwners
    tensors: tuple[str, ...]
    first: int
    itemsizes: np.ndarray


class _Members(NamedTuple):
    """A class as it is found: its owners, the ordinal of its first tensor, and its tensors."""

    sources: TensorOwners
    destinations: TensorOwners
    first: int
    names: list[str]


def tensor_classes(source: Holdings, destination: Holdings) -> list[TensorClass]:
    """The tensors that are moved, in classes. Raises PlanError with everything that `holding_faults` finds."""
    members = _members(source, destination)
    if faults := [*_shape_faults(source, destination), *_unserved_faults(members)]:
        raise PlanError(faults)
    classes = []
    for sources, destinations, first, names in members:
        dtypes = ((source.dtypes[name], destination.dtypes[name]) for name in names)
        itemsizes = np.array([_wire_itemsize(*each) for each in dtypes], dtype=np.int64)
        classes.append(TensorClass(sources, destinations, tuple(names), first, itemsizes))
    return classes


def holding_faults(source: Holdings, destination: Holdings) -> list[str]:
    """Tensors of two shapes, and boxes that some rank needs and no rank holds."""
    return [*_shape_faults(source, destination), *_unserved_faults(_members(source, destination))]


def _members(source: Holdings, destination: Holdings) -> list[_Members]:
    """The classes of tensors that have one shape; what no training rank holds has no sources."""
    found: dict[tuple[int, int], _Members] = {}
    for ordinal, (name, destinations) in enumerate(destination.owners.items()):
        sources = source.owners.get(name, ())
        if not sources or source.shapes[name] == destination.shapes[name]:
            key = id(sources), id(destinations)
            if key not in found:
                found[key] = _Members(sources, destinations, ordinal, [])
            found[key].names.append(name)
    return list(found.values())


@functools.cache
def _wire_itemsize(source: str, destination: str) -> int:
    return DTYPE_NBYTES[wire_dtype(source, destination)]


def _shape_faults(source: Holdings, destination: Holdings) -> list[str]:
    return [
        f"{name}: shape {source.shapes[name]} in training, {shape} in inference"
        for name, shape in destination.shapes.items()
        if source.shapes.get(name, shape) != shape
    ]


def _unserved_faults(members: Iterable[_Members]) -> Iterator[str]:
    """Elements that no source holds, tensor by tensor."""
    known: dict[object, list[tuple[int, Region]]] = {}  # experts: on other ranks, but cut in the same way
    for sources, destinations, _, names in members:
        boxes = tuple(tuple((box.offsets, box.lengths) for box in side) for side in (sources, destinations))
        if boxes not in known:
            known[boxes] = list(_unserved(sources, destinations))
        for name in names if known[boxes] else ():
            yield from (_unserved_fault(name, destinations[index].ranks, region) for index, region in known[boxes])


def _unserved(sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners]) -> Iterator[tuple[int, Region]]:
    """(index into `destinations`, part of that box that no source holds)."""
    for index, near in enumerate(touching(sources, destinations)):
        for region in subtract_all([destinations[index].region], [sources[number].region for number in near]):
            yield index, region


def _unserved_fault(tensor: str, ranks: np.ndarray, region: Region) -> str:
    first, *others = np.unique(ranks).tolist()
    needing = f"rank {first}" + (f" and {len(others)} other{'s' if len(others) > 1 else ''}" if others else "")
    box = f"[{region.offsets}, {region.ends})"
    return f"{tensor}: elements {box} are needed by {needing}, but no training rank holds them"
