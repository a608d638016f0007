"""The picture of a job: who holds which layers and slices, before and after.

column      ranks that hold the same on both sides; left half training, right half inference
row         the embedding, each layer (its experts apart), the final norm and head
bar         which part of the row's tensors: from left to right the slice of its largest tensor, or the experts
overlap     what inference needs and the rank has already
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.layouts.parameters import Location, parameters_of
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import Holdings, TensorOwners, first_members, rank_classes
from hybrid_engine.records.owners import presence_of
from hybrid_engine.records.regions import Region, joined

SIDES = ("train", "infer", "both")


@dataclass(frozen=True, slots=True)
class Column:
    """Ranks that hold the same; the first of them stands for all."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the model.

    Attributes:
        label: for people.
        tensors: of the part; of experts those of all of them.
        experts: expert number of each tensor, or None for a part that is not experts.
    """

    label: str
    tensors: tuple[str, ...]
    experts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Bar:
    """What a column holds of consecutive rows that it holds in the same way.

    Attributes:
        column, first_row, num_rows: where.
        side: "train", "infer", or "both" for what is there already.
        extents: parts of the width, from 0 to 1.
        share: part of each element of the extents (an expert that is cut further).
        text: exact regions; index into `Picture.texts`.
    """

    column: int
    first_row: int
    num_rows: int
    side: str
    extents: tuple[tuple[float, float], ...]
    share: float
    text: int


@dataclass(frozen=True)
class Picture:
    """Columns, rows and bars; `texts` are what the bars' tooltips say; `num_hidden` columns are left out."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]
    texts: tuple[str, ...]
    num_hidden: int


@dataclass(frozen=True, slots=True)
class _Look:
    """How a column has a row on a side."""

    extents: tuple[tuple[float, float], ...]
    share: float
    text: str


def picture_of(table: ModelTable, source: Holdings, destination: Holdings, max_columns: int = 600) -> Picture:
    """Draw both sides. Of more classes of ranks than `max_columns` the first ones are drawn."""
    _, classes = np.unique(rank_classes(source) * source.num_ranks + rank_classes(destination), return_inverse=True)
    firsts = np.sort(first_members(classes))
    shown = firsts[:max_columns]
    columns = tuple(Column(tuple(np.flatnonzero(classes == classes[first]).tolist())) for first in shown)
    rows = tuple(rows_of(table))
    texts: dict[str, int] = {}
    bars: list[Bar] = []
    looks = [_looks_of(row, source, destination, shown) for row in rows]
    for column in range(len(shown)):
        for side in SIDES:
            bars += _merged(column, side, [look.get((column, side)) for look in looks], texts)
    return Picture(columns, rows, tuple(bars), tuple(texts), len(firsts) - len(shown))


def rows_of(table: ModelTable) -> list[Row]:
    """The model's parts in order, experts after all others; a tensor is in one of them."""
    found: dict[tuple[bool, int], dict[str, int | None]] = {}
    order = {Location.EMBEDDING: -1, Location.FINAL_NORM: table.dims.num_layers + table.dims.num_mtp_layers}
    seen: set[str] = set()
    for parameter in parameters_of(table):
        number = parameter.indices.get("layer", order.get(parameter.location, order[Location.FINAL_NORM]))
        for tensor in parameter.tensors:
            if tensor in table.shapes and tensor not in seen:
                seen.add(tensor)
                key = parameter.is_expert, number
                found.setdefault(key, {})[tensor] = parameter.indices.get("expert")
    rows = []
    for (is_expert, number), tensors in sorted(found.items(), key=lambda item: item[0]):
        names = {-1: "embedding", order[Location.FINAL_NORM]: "norm and head"}
        label = names.get(number, f"layer {number}" + (" experts" if is_expert else ""))
        experts = tuple(expert for expert in tensors.values() if expert is not None)
        rows.append(Row(label, tuple(tensors), experts if is_expert else None))
    return rows


def _merged(column: int, side: str, looks: Sequence[_Look | None], texts: dict[str, int]) -> list[Bar]:
    """One bar for each run of rows that look the same."""
    bars: list[Bar] = []
    start = 0
    for row in range(1, len(looks) + 1):
        if row < len(looks) and looks[row] == looks[start]:
            continue
        if (look := looks[start]) is not None:
            text = texts.setdefault(look.text, len(texts))
            bars.append(Bar(column, start, row - start, side, look.extents, look.share, text))
        start = row
    return bars


def _looks_of(row: Row, source: Holdings, destination: Holdings, ranks: np.ndarray) -> dict[tuple[int, str], _Look]:
    """(column, side) -> how it looks, for the columns that have any of the row."""
    sets = _sets_of(row, source, destination, ranks)
    found: dict[tuple[int, str], _Look] = {}
    cache: dict[tuple[bytes, ...], dict[str, _Look]] = {}
    for column in range(len(ranks)):
        key = tuple(present[:, column].tobytes() for each in sets for present in (each.held, each.needed))
        if key not in cache:
            boxes = [each.boxes(column) for each in sets]
            cache[key] = {}
            for side in SIDES:
                if held := {
                    tensor: own[side]
                    for each, own in zip(sets, boxes, strict=True)
                    if own[side]
                    for tensor in each.tensors
                }:
                    cache[key][side] = _look(row, held, source.shapes)
        found.update({(column, side): look for side, look in cache[key].items()})
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _TensorSet:
    """Tensors of a row with the same owners on both sides; `held` and `needed`: [box, column], who is in it."""

    tensors: tuple[str, ...]
    sources: TensorOwners
    destinations: TensorOwners
    held: np.ndarray
    needed: np.ndarray

    def boxes(self, column: int) -> dict[str, list[Region]]:
        """Side -> the boxes of each of the tensors."""
        train = [box.region for box, yes in zip(self.sources, self.held[:, column], strict=True) if yes]
        infer = [box.region for box, yes in zip(self.destinations, self.needed[:, column], strict=True) if yes]
        both = [part for want in infer for has in train if (part := want.intersect(has))]
        return {"train": train, "infer": infer, "both": both}


def _sets_of(row: Row, source: Holdings, destination: Holdings, ranks: np.ndarray) -> list[_TensorSet]:
    tensors: dict[tuple[int, int], list[str]] = {}
    for tensor in row.tensors:
        key = id(source.owners.get(tensor)), id(destination.owners.get(tensor))
        tensors.setdefault(key, []).append(tensor)
    sets = []
    for names in tensors.values():
        sources, destinations = (side.owners.get(names[0], ()) for side in (source, destination))
        held, needed = (
            np.array([presence_of(box, source.num_ranks)[ranks] for box in owners]).reshape(-1, len(ranks))
            for owners in (sources, destinations)
        )
        sets.append(_TensorSet(tuple(names), sources, destinations, held, needed))
    return sets


def _look(row: Row, held: Mapping[str, list[Region]], shapes: Mapping[str, tuple[int, ...]]) -> _Look:
    if row.experts is not None:
        return _look_of_experts(row, held, shapes)
    in_order = [tensor for tensor in row.tensors if tensor in held]
    largest = max(in_order, key=lambda tensor: math.prod(shapes[tensor]))
    extents = sorted({_extent(box, shapes[largest]) for box in held[largest]})
    lines = (f"{_NUMBERED.sub('', tensor)} {_slices(held[tensor], shapes[tensor])}" for tensor in in_order)
    return _Look(_runs(extents), 1.0, "\n".join(lines))


def _look_of_experts(row: Row, held: Mapping[str, list[Region]], shapes: Mapping[str, tuple[int, ...]]) -> _Look:
    """All experts are cut in the same way, so the first one that is held says how."""
    expert_of = dict(zip(row.tensors, row.experts or (), strict=True))
    num_experts = max(row.experts or ()) + 1
    numbers = sorted({expert_of[tensor] for tensor in held})
    whole = [tensor for tensor in row.tensors if expert_of[tensor] == numbers[0]]
    first = [tensor for tensor in whole if tensor in held]
    share = sum(box.numel for tensor in first for box in held[tensor]) / sum(math.prod(shapes[name]) for name in whole)
    lines = (f"{_NUMBERED.sub('', tensor)} {_slices(held[tensor], shapes[tensor])}" for tensor in first)
    extents = [(number / num_experts, (number + 1) / num_experts) for number in numbers]
    return _Look(_runs(extents), share, "\n".join((f"experts {_ranges(numbers)}, of each", *lines)))


_NUMBERED = re.compile(r"^.*\.\d+\.")


def _extent(box: Region, shape: Sequence[int]) -> tuple[float, float]:
    """A box's bounds along the first dim in which it is cut, as parts of the whole."""
    for low, high, size in zip(box.offsets, box.ends, shape, strict=True):
        if high - low < size:
            return low / size, high / size
    return 0.0, 1.0


def _runs(extents: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Sorted extents, those that touch as one."""
    runs: list[tuple[float, float]] = []
    for low, high in extents:
        if runs and low <= runs[-1][1] + 1e-9:
            runs[-1] = runs[-1][0], max(high, runs[-1][1])
        else:
            runs.append((low, high))
    return tuple(runs)


def _slices(boxes: Iterable[Region], shape: Sequence[int]) -> str:
    """[0:4, :] for each box."""
    texts = []
    for box in joined(boxes):
        bounds = zip(box.offsets, box.ends, shape, strict=True)
        texts.append(
            "[" + ", ".join(":" if high - low == size else f"{low}:{high}" for low, high, size in bounds) + "]"
        )
    return " ".join(texts)


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 8, 10-11"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
