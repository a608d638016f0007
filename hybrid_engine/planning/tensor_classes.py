"""Classes of tensors with the same owners on both sides of a switch, and faults of the sides.

Tensors of one class are routed once: a model of 46,000 tensors has some hundred classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.plan import wire_dtype
from hybrid_engine.records.holdings import (
    BoxOwners,
    Holdings,
    TensorOwners,
    touching,
)
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.records.regions import Region, subtract_all


@dataclass(frozen=True, eq=False)
class TensorClass:
    """Tensors with the same owners on both sides.

    Attributes:
        sources: the owners in training.
        destinations: the owners in inference.
        tensors: names, in the plan's order.
        first: ordinal of the first tensor in the plan.
        dtypes: dtype of each tensor on the wire.
    """

    sources: TensorOwners
    destinations: TensorOwners
    tensors: tuple[str, ...]
    first: int
    dtypes: tuple[str, ...]

    @cached_property
    def itemsizes(self) -> np.ndarray:
        """Bytes per element on the wire of each tensor, int array."""
        return np.array([DTYPE_NBYTES[dtype] for dtype in self.dtypes])


def tensor_classes(
    source: Holdings,
    destination: Holdings,
    faults: Sequence[str] = (),
) -> list[TensorClass]:
    """Return the tensors that a reshard moves, in classes.

    Raises:
        PlanError: lists all faults that `holding_faults` returns, then the given ones.
    """
    classes = _classes(source, destination)
    faults = [*_shape_faults(source, destination), *_unserved_faults(classes), *faults]
    if faults:
        raise PlanError(faults)
    return classes


def holding_faults(source: Holdings, destination: Holdings) -> list[str]:
    """Return a fault for each tensor of two shapes and each needed box that no rank holds."""
    classes = _classes(source, destination)
    return [*_shape_faults(source, destination), *_unserved_faults(classes)]


def _classes(source: Holdings, destination: Holdings) -> list[TensorClass]:
    """Return the classes of tensors with one shape. Without holders in training, sources are ()."""
    # Equal owners are one object, so identity identifies a class.
    names: dict[tuple[int, int], list[str]] = {}
    first: dict[tuple[int, int], int] = {}
    for ordinal, (name, destinations) in enumerate(destination.owners.items()):
        sources = source.owners.get(name, ())
        if sources and source.shapes[name] != destination.shapes[name]:
            continue
        key = (id(sources), id(destinations))
        first.setdefault(key, ordinal)
        names.setdefault(key, []).append(name)
    return [
        TensorClass(
            sources=source.owners.get(members[0], ()),
            destinations=destination.owners[members[0]],
            tensors=tuple(members),
            first=first[key],
            # A tensor without a source gets any: `_unserved_faults` rejects its class.
            dtypes=tuple(
                wire_dtype(
                    source.dtypes.get(name, destination.dtypes[name]), destination.dtypes[name]
                )
                for name in members
            ),
        )
        for key, members in names.items()
    ]


def _shape_faults(source: Holdings, destination: Holdings) -> list[str]:
    return [
        f"{name}: shape {source.shapes[name]} in training, {shape} in inference"
        for name, shape in destination.shapes.items()
        if source.shapes.get(name, shape) != shape
    ]


def _unserved_faults(classes: Iterable[TensorClass]) -> Iterator[str]:
    """Yield a fault for each box, tensor by tensor, that some rank needs and no rank holds."""
    # By the boxes of both sides: experts are on different ranks, but cut in the same way.
    known: dict[object, list[tuple[int, Region]]] = {}
    for tensors in classes:
        sources = tuple((box.offsets, box.lengths) for box in tensors.sources)
        destinations = tuple((box.offsets, box.lengths) for box in tensors.destinations)
        boxes = (sources, destinations)
        if boxes not in known:
            known[boxes] = list(_unserved(tensors.sources, tensors.destinations))
        for name in tensors.tensors:
            for index, region in known[boxes]:
                yield _unserved_fault(name, tensors.destinations[index].ranks, region)


def _unserved(
    sources: Sequence[BoxOwners],
    destinations: Sequence[BoxOwners],
) -> Iterator[tuple[int, Region]]:
    """Yield (index into `destinations`, part of that box that no source holds)."""
    for index, near in enumerate(touching(sources, destinations)):
        held = [sources[number].region for number in near]
        for region in subtract_all([destinations[index].region], held):
            yield index, region


def _unserved_fault(tensor: str, ranks: np.ndarray, region: Region) -> str:
    # A rank is listed once per place that needs the box.
    first, *others = np.unique(ranks).tolist()
    needing = f"rank {first}"
    if others:
        needing += f" and {len(others)} other{'s' if len(others) > 1 else ''}"
    box = f"[{region.offsets}, {region.ends})"
    return f"{tensor}: elements {box} are needed by {needing}, but no training rank holds them"
