"""Tensors with the same owners on both sides, which are planned once for all of them; and what cannot be planned.

Tensors of a class move alike but for who sends (see routes.RoundRobinOffset), so a model of 46,000 tensors is some
hundred classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def tensor_classes(source: Holdings, destination: Holdings) -> list[TensorClass]:
    """The tensors that are moved, in classes. Raises PlanError with everything that `holding_faults` finds."""
    if faults := holding_faults(source, destination):
        raise PlanError(faults)
    members: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for ordinal, (name, owners) in enumerate(destination.owners.items()):
        members.setdefault((id(source.owners[name]), id(owners)), []).append((ordinal, name))
    classes = []
    for found in members.values():
        names = tuple(name for _, name in found)
        dtypes = (wire_dtype(source.dtypes[name], destination.dtypes[name]) for name in names)
        itemsizes = np.array([DTYPE_NBYTES[dtype] for dtype in dtypes], dtype=np.int64)
        classes.append(
            TensorClass(source.owners[names[0]], destination.owners[names[0]], names, found[0][0], itemsizes)
        )
    return classes


def holding_faults(source: Holdings, destination: Holdings) -> list[str]:
    """Tensors of two shapes, and boxes that some rank needs and no rank holds."""
    faults = [
        f"{name}: shape {source.shapes[name]} in training, {shape} in inference"
        for name, shape in destination.shapes.items()
        if source.shapes.get(name, shape) != shape
    ]
    by_owners: dict[tuple[int, int], list[tuple[int, Region]]] = {}
    by_boxes: dict[object, list[tuple[int, Region]]] = {}  # other ranks, but cut in the same way: experts
    for name, destinations in destination.owners.items():
        if source.shapes.get(name, destination.shapes[name]) != destination.shapes[name]:
            continue
        sources = source.owners.get(name, ())
        owners = id(sources), id(destinations)
        if owners not in by_owners:
            boxes = tuple(tuple((box.offsets, box.lengths) for box in side) for side in (sources, destinations))
            if boxes not in by_boxes:
                by_boxes[boxes] = list(_unserved(sources, destinations))
            by_owners[owners] = by_boxes[boxes]
        faults += [_unserved_fault(name, destinations[index].ranks, region) for index, region in by_owners[owners]]
    return faults


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
