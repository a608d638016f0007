"""The records of all ranks of one side in compact form: no object per rank and record.

A tensor's `BoxOwners` say which boxes of it are held and by which ranks. Tensors with the same owners (the experts of
one stage, a projection in the layers of one stage) share one tuple of them, so whoever works on the owners works once.

    Holdings         who holds which boxes
    PlacedHoldings   and where in their buffers: from explicit records by `placed_holdings`
    SideLayout       the same of a side that is computed (layouts/), collected by `SideBuilder`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.validation import dtype_faults


@dataclass(frozen=True, slots=True, eq=False)
class BoxOwners:
    """One box of a tensor and the ranks that hold (or want) it.

    Attributes:
        offsets, lengths: of the box, in elements, one entry per dim.
        ranks: sorted; a rank is in it once for every place in which it has the box.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    ranks: np.ndarray

    @property
    def region(self) -> Region:
        """The box, of a tensor without a name: equal for all tensors with the same owners."""
        return Region("", self.offsets, self.lengths)


def contains(ranks: np.ndarray, rank: int) -> bool:
    """Whether a rank is among sorted ranks."""
    position = ranks.searchsorted(rank)
    return bool(position < len(ranks) and ranks[position] == rank)


def presence_of(box: BoxOwners, num_ranks: int) -> np.ndarray:
    """Bool array by rank: who has the box."""
    present = np.zeros(num_ranks, dtype=bool)
    present[box.ranks] = True
    return present


def groups_of_columns(rows: Sequence[np.ndarray], num_columns: int) -> list[np.ndarray]:
    """Indices of equal columns of a boolean matrix, as groups in a fixed order; each group is sorted."""
    if num_columns == 0:
        return []
    if not rows:
        return [np.arange(num_columns)]
    # Eight rows become one byte, and the bytes of a column one opaque value, so that `unique` compares whole columns.
    packed = np.ascontiguousarray(np.packbits(np.array(rows), axis=0).T)
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, group_of = np.unique(keys, return_inverse=True)
    # Sorted by group, the columns of each are neighbours; a stable sort keeps their order, and groups end where the
    # cumulated sizes say.
    order = np.argsort(group_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group_of))[:-1])


Boxes = Sequence[BoxOwners] | Sequence[Region]


def touching(sources: Boxes, destinations: Boxes) -> list[list[int]]:
    """For every destination box, the indices of the source boxes that share elements with it; boxes of one tensor."""
    if not sources or not destinations:
        return [[] for _ in destinations]
    # Two boxes share elements when in every dim the later start is before the earlier end: [destination, source, dim].
    # A scalar has no dims, and `all` of nothing is true: its one element is common.
    low, high = _bounds(sources)
    start, stop = (bound[:, None] for bound in _bounds(destinations))
    common = np.all(np.maximum(low, start) < np.minimum(high, stop), axis=2)
    return [np.flatnonzero(row).tolist() for row in common]


def _bounds(owners: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of boxes; int arrays [box, dim]."""
    shape = len(owners), len(owners[0].offsets)
    low = np.array([box.offsets for box in owners], dtype=np.int64).reshape(shape)
    return low, low + np.array([box.lengths for box in owners], dtype=np.int64).reshape(shape)


TensorOwners = tuple[BoxOwners, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who holds which boxes of every tensor.

    Attributes:
        num_ranks: of the world.
        shapes: of all tensors that this side knows, in the model's order, held or not.
        dtypes: of the tensors that are held; one for each, whoever holds it.
        owners: of the tensors that are held, in the order of `shapes`. Boxes are sorted and differ; equal tuples are
            one object.
    """

    num_ranks: int
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    owners: Mapping[str, TensorOwners]

    @property
    def model_nbytes(self) -> int:
        """Bytes of all tensors that are held, each once."""
        return sum(math.prod(self.shapes[name]) * DTYPE_NBYTES[dtype] for name, dtype in self.dtypes.items())

    def nbytes_by_rank(self) -> np.ndarray:
        """Bytes of the boxes that each rank holds, each place of one counted; int array by rank."""
        itemsizes: dict[int, int] = {}  # of tensors with the same owners, together
        for name, owners in self.owners.items():
            itemsizes[id(owners)] = itemsizes.get(id(owners), 0) + DTYPE_NBYTES[self.dtypes[name]]
        total = np.zeros(self.num_ranks, dtype=np.int64)
        for owners in {id(owners): owners for owners in self.owners.values()}.values():
            for box in owners:
                np.add.at(total, box.ranks, box.region.numel * itemsizes[id(owners)])
        return total


def rank_classes(holdings: Holdings) -> np.ndarray:
    """Number of its class for each rank; ranks of one class hold the same boxes of everything."""
    classes = np.zeros(holdings.num_ranks, dtype=np.int64)
    seen: set[int] = set()
    for owners in holdings.owners.values():
        for box in owners:
            if id(box.ranks) not in seen:
                seen.add(id(box.ranks))
                # Each box splits every class in two, those that hold it (odd) and those that do not (even). `unique`
                # numbers the halves anew, so that numbers stay below the number of ranks and cannot overflow.
                _, classes = np.unique(2 * classes + presence_of(box, holdings.num_ranks), return_inverse=True)
    return classes


def first_members(classes: np.ndarray) -> np.ndarray:
    """The first rank of every class."""
    return np.unique(classes, return_index=True)[1]


class Interned:
    """Makes equal arrays of ranks one object, and equal tuples of owners."""

    def __init__(self) -> None:
        self._ranks: dict[bytes, np.ndarray] = {}
        self._owners: dict[object, TensorOwners] = {}

    def ranks(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        """These ranks, sorted."""
        found = np.sort(np.asarray(ranks, dtype=np.int64))
        return self._ranks.setdefault(found.tobytes(), found)

    def owners(self, boxes: Iterable[BoxOwners]) -> TensorOwners:
        """These boxes, sorted, the owners of one box joined."""
        by_box: dict[Box, list[np.ndarray]] = {}
        for box in boxes:
            by_box.setdefault((box.offsets, box.lengths), []).append(box.ranks)
        joined = [
            (box, parts[0] if len(parts) == 1 else self.ranks(np.concatenate(parts)))
            for box, parts in sorted(by_box.items())
        ]
        key = tuple((box, ranks.tobytes()) for box, ranks in joined)
        if key not in self._owners:
            self._owners[key] = tuple(BoxOwners(*box, ranks) for box, ranks in joined)
        return self._owners[key]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBox:
    """A box that lies at the same place of a buffer on several ranks.

    Attributes:
        owners: the box and the ranks.
        buffer: name pattern of the buffer, with `{layer}`, `{expert}` or `{name}`.
        numel: of the buffer.
        start, strides: where the box lies in it; elements.
    """

    owners: BoxOwners
    buffer: str
    numel: int
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBoxes:
    """Boxes of one tensor; `indices` are the values of the names in their buffers' patterns."""

    boxes: tuple[PlacedBox, ...]
    indices: Mapping[str, int | str]
    group: str


@dataclass(frozen=True, eq=False)
class PlacedHoldings:
    """All ranks of one side: the holdings, and where each box of them lies.

    Attributes:
        holdings: who holds what.
        placed: tensor -> its boxes.
    """

    holdings: Holdings
    placed: Mapping[str, tuple[PlacedBoxes, ...]]

    def shards_of(self, rank: int, tensor: str) -> Iterator[tuple[Shard, Buffer]]:
        """One rank's records of one tensor, with their buffers."""
        for placed in self.placed.get(tensor, ()):
            for box in placed.boxes:
                if contains(box.owners.ranks, rank):
                    buffer_id = BufferId(rank, box.buffer.format(**placed.indices))
                    region = Region(tensor, box.owners.offsets, box.owners.lengths)
                    shard = Shard(region, Place(buffer_id, box.start, box.strides))
                    yield shard, Buffer(box.numel, self.holdings.dtypes[tensor], placed.group)


class PlaceIndex:
    """Finds where a rank has a part of a box, without going through all boxes of the tensor."""

    def __init__(self, side: PlacedHoldings) -> None:
        self._side = side
        self._by_box: dict[int, dict[Box, list[PlacedBox]]] = {}  # by identity of a tuple of boxes

    def places(self, tensor: str, owners: BoxOwners, rank: int, part: Region) -> list[Place]:
        """One for every place in which `rank` has exactly this box, in order of place; `part` lies inside the box."""
        found = []
        for placed in self._side.placed[tensor]:
            for box in self._boxes(placed.boxes).get((owners.offsets, owners.lengths), ()):
                if contains(box.owners.ranks, rank):
                    buffer_id = BufferId(rank, box.buffer.format(**placed.indices))
                    start = zip(part.offsets, owners.offsets, strict=True)
                    found.append(Place(buffer_id, box.start, box.strides).at(low - base for low, base in start))
        return sorted(found, key=lambda place: (place.buffer, place.offset)) if len(found) > 1 else found

    def _boxes(self, boxes: tuple[PlacedBox, ...]) -> dict[Box, list[PlacedBox]]:
        index = self._by_box.get(id(boxes))
        if index is None:
            index = self._by_box[id(boxes)] = {}
            for box in boxes:
                index.setdefault((box.owners.offsets, box.owners.lengths), []).append(box)
        return index


def placed_holdings(layout: Layout, num_ranks: int, alike: Mapping[int, np.ndarray] | None = None) -> PlacedHoldings:
    """The compact form of explicit records, e.g. of live engines; padding and exports are left out.

    `alike`: for each rank of `layout`, all ranks that hold the same in the same places; default: it alone.
    Raises PlanError naming every tensor that is held in several dtypes.
    """
    interned = Interned()

    @cache
    def all_of(ranks: tuple[int, ...]) -> np.ndarray:
        return interned.ranks(ranks if alike is None else np.concatenate([alike[rank] for rank in ranks]))

    dtypes: dict[str, str] = {}
    owners: dict[str, TensorOwners] = {}
    placed: dict[str, tuple[PlacedBoxes, ...]] = {}
    shards_by_tensor = layout.shards_by_tensor()
    if faults := dtype_faults(layout):
        raise PlanError(faults)
    for name in (name for name in layout.tensors if name in shards_by_tensor):
        by_buffer: dict[tuple[str, str], dict[tuple[Box, int, int, tuple[int, ...]], list[int]]] = {}
        for shard in shards_by_tensor[name]:
            region, place_in = shard.region, shard.place
            buffer_id = place_in.buffer
            buffer = layout.buffers[buffer_id]
            same_place = (region.offsets, region.lengths), buffer.numel, place_in.offset, place_in.strides
            by_place = by_buffer.setdefault((buffer_id.name, buffer.group), {})
            by_place.setdefault(same_place, []).append(buffer_id.rank)
            dtypes[name] = buffer.dtype
        placed[name] = tuple(
            PlacedBoxes(
                tuple(
                    PlacedBox(BoxOwners(*box, all_of(tuple(ranks))), "{name}", numel, start, strides)
                    for (box, numel, start, strides), ranks in by_place.items()
                ),
                {"name": buffer_name},
                group,
            )
            for (buffer_name, group), by_place in by_buffer.items()
        )
        owners[name] = interned.owners(box.owners for part in placed[name] for box in part.boxes)
    return PlacedHoldings(Holdings(num_ranks, layout.tensors, dtypes, owners), placed)


@dataclass(frozen=True, eq=False)
class SideLayout(PlacedHoldings):
    """All ranks of one side, computed from sizes.

    Attributes:
        num_elements: elements of the parameters that each rank stores, padding and copies included; int array by rank.
        num_expert_elements: those of them that belong to experts.
        is_offered_all: a rank's layout names all tensors of this side (inference), not only those it holds (training).
    """

    num_elements: np.ndarray
    num_expert_elements: np.ndarray
    is_offered_all: bool

    def layout_of(self, *ranks: int) -> Layout:
        """The explicit records of some ranks."""
        shards: list[Shard] = []
        buffers: dict[BufferId, Buffer] = {}
        for tensor in self.placed:
            for rank in ranks:
                for shard, buffer in self.shards_of(rank, tensor):
                    shards.append(shard)
                    buffers[shard.place.buffer] = buffer
        held = {shard.region.tensor for shard in shards}
        shapes = self.holdings.shapes
        tensors = {name: shape for name, shape in shapes.items() if self.is_offered_all or name in held}
        return Layout(tensors, buffers, tuple(shards))

    def layout(self) -> Layout:
        """The explicit records of all ranks."""
        return self.layout_of(*range(self.holdings.num_ranks))


class SideBuilder:
    """Collects the boxes of one side.

    Args:
        num_ranks: of the world.
        shapes: canonical tensors in the model's order.
        dtype: of the weights; `dtypes`: of the tensors that have another one.
        is_offered_all: see `SideLayout`.

    Tensors that lie alike are recognised by the identity of their tuples of boxes: make such a tuple once.
    """

    def __init__(
        self,
        num_ranks: int,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        dtypes: Mapping[str, str],
        *,
        is_offered_all: bool,
    ) -> None:
        self._num_ranks = num_ranks
        self._is_offered_all = is_offered_all
        self._shapes = shapes
        self._dtype, self._dtypes = dtype, dtypes
        self._placed: dict[str, list[PlacedBoxes]] = {}
        self._elements: dict[tuple[int, bool], tuple[np.ndarray, int]] = {}

    def add(self, tensor: str, placed: PlacedBoxes) -> None:
        """More boxes of `tensor`."""
        self._placed.setdefault(tensor, []).append(placed)

    def add_elements(self, ranks: np.ndarray, numel: int, *, of_expert: bool) -> None:
        """Each of `ranks` stores a parameter of `numel` elements. Arrays are told apart by identity."""
        _, before = self._elements.get((id(ranks), of_expert), (ranks, 0))
        self._elements[id(ranks), of_expert] = ranks, before + numel

    def build(self) -> SideLayout:
        """The finished layout."""
        interned = Interned()
        placed = {name: tuple(self._placed[name]) for name in self._shapes if name in self._placed}
        dtypes = {name: self._dtypes.get(name, self._dtype) for name in placed}
        by_boxes: dict[tuple[int, ...], TensorOwners] = {}
        owners: dict[str, TensorOwners] = {}
        for name, parts in placed.items():
            key = tuple(id(part.boxes) for part in parts)
            if key not in by_boxes:
                by_boxes[key] = interned.owners(box.owners for part in parts for box in part.boxes)
            owners[name] = by_boxes[key]
        counts = {of_expert: np.zeros(self._num_ranks, dtype=np.int64) for of_expert in (False, True)}
        for (_, of_expert), (ranks, numel) in self._elements.items():
            np.add.at(counts[of_expert], ranks, numel)
        holdings = Holdings(self._num_ranks, self._shapes, dtypes, owners)
        return SideLayout(holdings, placed, counts[False] + counts[True], counts[True], self._is_offered_all)
