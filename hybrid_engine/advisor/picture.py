"""The picture of a job: who holds which layers and slices, before and after.

column      ranks that hold the same on both sides
group       columns that have parts of the same rows on both sides: those of a pipeline stage, some at a time
row         the embedding, each layer (its experts apart), the final norm and head; neighbours that all ranks hold in
            the same way are one
bar         which part of the row's tensors: from left to right the slice of its largest tensor, or the experts
both        what inference needs and the rank has already
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybrid_engine.layouts.parameters import Location, parameters_of
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import Holdings, TensorOwners, first_members, rank_classes
from hybrid_engine.records.owners import groups_of_columns, presence_of
from hybrid_engine.records.regions import Region, joined

SIDES = ("train", "infer", "both")
MOST_OF_A_GROUP = 128
"""Columns; what has more is several groups."""


@dataclass(frozen=True, slots=True)
class Column:
    """Ranks that hold the same; the first of them stands for all."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive columns, and how many more classes of ranks like them are not drawn."""

    columns: range
    num_hidden: int


@dataclass(frozen=True)
class Row:
    """One part of the model, or neighbouring ones that all ranks hold in the same way.

    Attributes:
        label: for people.
        tensors: of the part; of experts those of all of them.
        experts: expert number of each tensor, or None for a part that is not experts.
        layers: numbers of the layers that it stands for.
    """

    label: str
    tensors: tuple[str, ...]
    experts: tuple[int, ...] | None
    layers: tuple[int, ...] = ()

    @cached_property
    def tensors_of_expert(self) -> Mapping[int, Sequence[str]]:
        """Expert number -> its tensors."""
        found: dict[int, list[str]] = {}
        for tensor, expert in zip(self.tensors, self.experts or (), strict=True):
            found.setdefault(expert, []).append(tensor)
        return found


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

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + self.num_rows)

    @property
    def part(self) -> float:
        """How much of a row's elements it stands for, from 0 to 1."""
        return self.share * sum(high - low for low, high in self.extents)


@dataclass(frozen=True)
class Picture:
    """Columns in groups, rows and bars; `texts` say what the bars hold."""

    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Look:
    """How a column has a row on a side; `largest`: the tensor whose slices `extents` are, None for experts."""

    extents: tuple[tuple[float, float], ...]
    share: float
    text: str
    largest: str | None = None


_Looks = Mapping[tuple[int, str], _Look]
"""(column, side) -> how it looks, for the columns that have any of the row."""


def picture_of(table: ModelTable, source: Holdings, destination: Holdings, most_columns: int = 2048) -> Picture:
    """Draw both sides. Of more classes of ranks than `most_columns` some of every group are drawn, evenly spread."""
    _, classes = np.unique(rank_classes(source) * source.num_ranks + rank_classes(destination), return_inverse=True)
    parts = rows_of(table)
    groups = list(_groups_of(parts, source, destination, np.sort(first_members(classes))))
    share = min(1.0, most_columns / sum(map(len, groups)))
    shown = [_spread(firsts, max(1, int(len(firsts) * share))) for firsts in groups]
    ends = np.cumsum([len(firsts) for firsts in shown]).tolist()
    in_groups = (
        Group(range(end - len(drawn), end), len(firsts) - len(drawn))
        for end, drawn, firsts in zip(ends, shown, groups, strict=True)
    )
    ranks = np.concatenate(shown)
    by_class = np.split(np.argsort(classes, kind="stable"), np.cumsum(np.bincount(classes))[:-1])
    columns = tuple(Column(tuple(by_class[classes[first]].tolist())) for first in ranks)
    rows, looks = _rows_and_looks(parts, source, destination, ranks)
    texts: dict[str, int] = {}
    bars: list[Bar] = []
    for column in range(len(ranks)):
        for side in SIDES:
            bars += _merged(column, side, [look.get((column, side)) for look in looks], texts)
    return Picture(columns, tuple(in_groups), tuple(rows), tuple(bars), tuple(texts))


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
        kind = " (MTP)" * (number >= table.dims.num_layers) + ", experts" * is_expert
        label = names.get(number, f"layer {number}{kind}")
        experts = tuple(expert for expert in tensors.values() if expert is not None)
        rows.append(Row(label, tuple(tensors), experts if is_expert else None, () if number in names else (number,)))
    return rows


def _groups_of(
    rows: Sequence[Row], source: Holdings, destination: Holdings, firsts: np.ndarray
) -> Iterator[np.ndarray]:
    """The first ranks of classes, those together that have parts of the same rows, in order of the first of them."""
    known: dict[tuple[int, ...], np.ndarray] = {}
    having = []
    for row in rows:
        for side in (source, destination):
            owners = {id(each): each for tensor in row.tensors if (each := side.owners.get(tensor))}
            if (key := tuple(sorted(owners))) not in known:
                has = [presence_of(box, side.num_ranks)[firsts] for each in owners.values() for box in each]
                known[key] = np.any(has, axis=0) if has else np.zeros(len(firsts), dtype=bool)
            having.append(known[key])
    for members in sorted(groups_of_columns(having, len(firsts)), key=lambda members: members[0]):
        for start in range(0, len(members), MOST_OF_A_GROUP):
            yield firsts[members[start : start + MOST_OF_A_GROUP]]


def _spread(values: np.ndarray, count: int) -> np.ndarray:
    """So many of them, the first and others at equal distances."""
    return values[np.arange(count) * len(values) // count]


def _rows_and_looks(
    parts: Sequence[Row], source: Holdings, destination: Holdings, ranks: np.ndarray
) -> tuple[list[Row], list[_Looks]]:
    """Neighbouring parts that are held by the same ranks in the same way as one row, and how it looks."""
    rows: list[Row] = []
    looks: list[_Looks] = []
    known: dict[object, _Looks] = {}
    last: object = None
    for part in parts:
        kinds = tuple(
            (_NUMBERED.sub("", tensor), id(source.owners.get(tensor)), id(destination.owners.get(tensor)))
            for tensor in part.tensors
        )
        key = kinds, part.experts
        if key == last and part.layers:
            before = rows[-1]
            layers = (*before.layers, *part.layers)
            label = f"layers {_ranges(layers)}" + ", experts" * (part.experts is not None)
            experts = None if part.experts is None else (*(before.experts or ()), *part.experts)
            rows[-1] = Row(label, (*before.tensors, *part.tensors), experts, layers)
            continue
        if key not in known:
            known[key] = _looks_of(part, source, destination, ranks)
        rows.append(part)
        looks.append(known[key])
        last = key
    return rows, looks


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


def _looks_of(row: Row, source: Holdings, destination: Holdings, ranks: np.ndarray) -> _Looks:
    sets = _sets_of(row, source, destination, ranks)
    found: dict[tuple[int, str], _Look] = {}
    present = [column for each in sets for side in (each.held, each.needed) for column in side]
    for columns in groups_of_columns(present, len(ranks)):
        boxes = [each.boxes(columns[0]) for each in sets]
        held = {
            side: [_Held(each, own[side]) for each, own in zip(sets, boxes, strict=True) if own[side]] for side in SIDES
        }
        looks = {side: _look(row, each, source.shapes) for side, each in held.items() if each}
        if "both" in looks and looks["both"].largest != looks["infer"].largest:
            # Slices of another tensor than those in front of which they would be drawn.
            part = sum(each.numel for each in held["both"]) / sum(each.numel for each in held["infer"])
            low, high = looks["infer"].extents[0]
            looks["both"] = replace(looks["both"], extents=((low, low + part * (high - low)),))
        found.update({(column, side): look for side, look in looks.items() for column in columns.tolist()})
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _TensorSet:
    """Tensors of a row with the same owners on both sides.

    Attributes:
        experts: whose tensors they are.
        held, needed: [box, column], who is in it.
    """

    tensors: tuple[str, ...]
    experts: frozenset[int]
    sources: TensorOwners
    destinations: TensorOwners
    held: np.ndarray
    needed: np.ndarray

    def boxes(self, column: int) -> dict[str, list[Region]]:
        """Side -> the boxes of each of the tensors."""
        train = [self.sources[index].region for index in np.flatnonzero(self.held[:, column])]
        infer = [self.destinations[index].region for index in np.flatnonzero(self.needed[:, column])]
        both = [part for want in infer for has in train if (part := want.intersect(has))]
        return {"train": train, "infer": infer, "both": both}


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The boxes that a column has of each of some tensors."""

    tensors: _TensorSet
    boxes: list[Region]

    @property
    def numel(self) -> int:
        return len(self.tensors.tensors) * sum(box.numel for box in self.boxes)


def _sets_of(row: Row, source: Holdings, destination: Holdings, ranks: np.ndarray) -> list[_TensorSet]:
    tensors: dict[tuple[int, int], list[str]] = {}
    for tensor in row.tensors:
        key = id(source.owners.get(tensor)), id(destination.owners.get(tensor))
        tensors.setdefault(key, []).append(tensor)
    expert_of = {} if row.experts is None else dict(zip(row.tensors, row.experts, strict=True))
    sets = []
    for names in tensors.values():
        sources, destinations = (side.owners.get(names[0], ()) for side in (source, destination))
        held, needed = (
            np.array([presence_of(box, source.num_ranks)[ranks] for box in owners]).reshape(-1, len(ranks))
            for owners in (sources, destinations)
        )
        experts = frozenset(expert_of[name] for name in names) if expert_of else frozenset()
        sets.append(_TensorSet(tuple(names), experts, sources, destinations, held, needed))
    return sets


def _look(row: Row, held: Sequence[_Held], shapes: Mapping[str, tuple[int, ...]]) -> _Look:
    if row.experts is not None:
        return _look_of_experts(row, held, shapes)
    boxes_of = {tensor: each.boxes for each in held for tensor in each.tensors.tensors}
    in_order = [tensor for tensor in row.tensors if tensor in boxes_of]
    largest = max(in_order, key=lambda tensor: math.prod(shapes[tensor]))
    extents = sorted({_extent(box, shapes[largest]) for box in boxes_of[largest]})
    lines = (f"{_NUMBERED.sub('', tensor)} {_slices(boxes_of[tensor], shapes[tensor])}" for tensor in in_order)
    return _Look(_runs(extents), 1.0, "\n".join(lines), _NUMBERED.sub("", largest))


def _look_of_experts(row: Row, held: Sequence[_Held], shapes: Mapping[str, tuple[int, ...]]) -> _Look:
    """All experts are cut in the same way, so the first one that is held says how."""
    numbers = sorted(frozenset().union(*(each.tensors.experts for each in held)))
    of_first = [each for each in held if numbers[0] in each.tensors.experts]
    boxes_of = {tensor: each.boxes for each in of_first for tensor in each.tensors.tensors}
    whole = row.tensors_of_expert[numbers[0]]
    first = [tensor for tensor in whole if tensor in boxes_of]
    share = sum(box.numel for name in first for box in boxes_of[name]) / sum(math.prod(shapes[name]) for name in whole)
    lines = (f"{_NUMBERED.sub('', tensor)} {_slices(boxes_of[tensor], shapes[tensor])}" for tensor in first)
    num_experts = max(row.tensors_of_expert) + 1
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
