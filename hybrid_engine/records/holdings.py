"""Compact records of all ranks of one side, without an object per rank and record.

The `BoxOwners` of a tensor list which boxes of it are held, and by which ranks. Tensors with the
same owners (the experts of one stage, a projection in the layers of one stage) share one tuple of
`BoxOwners`, so work on owners is done once for all of them.

    Holdings      boxes of every tensor, the ranks that hold them, and their places in buffers
    SideLayout    the same of a side that is computed (layouts/), made by `SideBuilder`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

import numpy as np

from hybrid_engine.errors import PlanError
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Offsets, Region, Shape, Shapes, Strides
from hybrid_engine.records.validation import dtype_faults


@dataclass(frozen=True, slots=True, eq=False)
class BoxOwners:
    """A box of a tensor and the ranks that hold or need it.

    Attributes:
        offsets: start of the box, in elements per dim.
        lengths: size of the box, in elements per dim.
        ranks: sorted; a rank occurs once for every place in which it has the box.
    """

    offsets: Offsets
    lengths: Shape
    ranks: np.ndarray

    @property
    def region(self) -> Region:
        """The box, without a tensor's name: equal for all tensors with the same owners."""
        return Region("", self.offsets, self.lengths)


def contains(ranks: np.ndarray, rank: int) -> bool:
    """Return whether a rank is in a sorted array of ranks."""
    position = ranks.searchsorted(rank)
    return bool(position < len(ranks) and ranks[position] == rank)


def presence_of(box: BoxOwners, num_ranks: int) -> np.ndarray:
    """Return whether each rank owns the box, bool array by rank."""
    present = np.zeros(num_ranks, dtype=bool)
    present[box.ranks] = True
    return present


def groups_of_columns(rows: Sequence[np.ndarray], num_columns: int) -> list[np.ndarray]:
    """Return the indices of equal columns of a boolean matrix, as sorted groups in a fixed order.

    Args:
        rows: bool arrays of length `num_columns`. Without rows all columns are equal.
        num_columns: width of the matrix.
    """
    if num_columns == 0:
        return []
    if not rows:
        return [np.arange(num_columns)]
    # Pack eight rows into a byte, and view the bytes of a column as one opaque value, so that
    # `unique` compares whole columns.
    packed = np.ascontiguousarray(np.packbits(np.array(rows), axis=0).T)
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, group_of = np.unique(keys, return_inverse=True)
    # Sort columns by group, keeping their order within one (stable), and cut where groups end.
    order = np.argsort(group_of, kind="stable")
    ends = np.cumsum(np.bincount(group_of))
    return np.split(order, ends[:-1])


Boxes = Sequence[BoxOwners] | Sequence[Region]


def touching(sources: Boxes, destinations: Boxes) -> list[list[int]]:
    """Return, per destination box, the indices of the source boxes that share elements with it.

    All boxes are of one tensor.
    """
    if not sources or not destinations:
        return [[] for _ in destinations]
    # Boxes share elements if in every dim the later start is before the earlier end:
    # [destination, source, dim]. A scalar has no dims, and `all` of nothing is true: its single
    # element is common.
    source_starts, source_ends = _bounds(sources)
    starts, ends = _bounds(destinations)
    latest_start = np.maximum(source_starts, starts[:, None])
    earliest_end = np.minimum(source_ends, ends[:, None])
    common = np.all(latest_start < earliest_end, axis=2)
    return [np.flatnonzero(row).tolist() for row in common]


def _bounds(boxes: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of boxes, int arrays [box, dim]."""
    # `reshape` keeps the second axis of scalars, which have no dims.
    shape = (len(boxes), len(boxes[0].offsets))
    starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(shape)
    lengths = np.array([box.lengths for box in boxes], dtype=np.int64).reshape(shape)
    return starts, starts + lengths


TensorOwners = tuple[BoxOwners, ...]
Box = tuple[Offsets, Shape]
"""Offsets and lengths."""


def rank_classes(holdings: Holdings) -> np.ndarray:
    """Return the class number of each rank; ranks of one class hold the same boxes."""
    classes = np.zeros(holdings.num_ranks, dtype=np.int64)
    seen: set[int] = set()
    for owners in holdings.owners.values():
        for box in owners:
            if id(box.ranks) in seen:
                continue
            seen.add(id(box.ranks))
            # Each box splits a class into holders (odd) and others (even). `unique` renumbers the
            # halves, which keeps numbers below the number of ranks: they cannot overflow.
            halves = 2 * classes + presence_of(box, holdings.num_ranks)
            _, classes = np.unique(halves, return_inverse=True)
    return classes


def first_members(classes: np.ndarray) -> np.ndarray:
    """Return the first rank of every class."""
    return np.unique(classes, return_index=True)[1]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBox:
    """A box at the same place of a buffer on several ranks.

    Attributes:
        owners: the box and the ranks.
        buffer: name pattern of the buffer, with `{layer}`, `{expert}` or `{name}`.
        numel: elements of the buffer.
        start: position of the box's first element in the buffer.
        strides: elements per dim.
    """

    owners: BoxOwners
    buffer: str
    numel: int
    start: int
    strides: Strides


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBoxes:
    """Boxes of one tensor in buffers of one group.

    Attributes:
        boxes: the boxes. Tensors in equivalent places share the tuple.
        indices: values for the name patterns of the buffers.
        group: `Buffer.group`.
    """

    boxes: tuple[PlacedBox, ...]
    indices: Mapping[str, int | str]
    group: str


@dataclass(frozen=True, eq=False)
class Holdings:
    """Boxes of every tensor, the ranks that hold them, and the place of every box.

    Attributes:
        num_ranks: size of the world.
        shapes: all tensors known to this side, in the model's order, whether held or not.
        dtypes: dtype of each tensor that is held, the same on all ranks.
        placed: boxes with their places of each tensor that is held, in the order of `shapes`.
    """

    num_ranks: int
    shapes: Shapes
    dtypes: Mapping[str, str]
    placed: Mapping[str, tuple[PlacedBoxes, ...]]

    @cached_property
    def owners(self) -> Mapping[str, TensorOwners]:
        """Boxes of each tensor in `placed`, without places.

        The boxes of a tensor are sorted and distinct; equal tuples are one object.
        """
        distinct_ranks: dict[bytes, np.ndarray] = {}
        distinct_owners: dict[object, TensorOwners] = {}

        @cache
        def joined(*parts: tuple[PlacedBox, ...]) -> TensorOwners:
            """Return the boxes of a tensor, sorted, with the ranks of equal boxes joined."""
            by_box: dict[Box, list[np.ndarray]] = {}
            for placed in chain(*parts):
                box = (placed.owners.offsets, placed.owners.lengths)
                by_box.setdefault(box, []).append(placed.owners.ranks)
            boxes = []
            # Boxes are distinct, so sorting never gets to compare lists of arrays.
            for box, of_box in sorted(by_box.items()):
                # A single array is sorted already.
                ranks = of_box[0] if len(of_box) == 1 else np.sort(np.concatenate(of_box))
                boxes.append(BoxOwners(*box, distinct_ranks.setdefault(ranks.tobytes(), ranks)))
            # Equal ranks are one array, which `distinct_ranks` keeps alive.
            key = tuple((box.offsets, box.lengths, id(box.ranks)) for box in boxes)
            return distinct_owners.setdefault(key, tuple(boxes))

        return {
            name: joined(*(part.boxes for part in parts)) for name, parts in self.placed.items()
        }

    @property
    def model_nbytes(self) -> int:
        """Bytes of all tensors that are held, each counted once."""
        return sum(
            math.prod(self.shapes[name]) * DTYPE_NBYTES[dtype]
            for name, dtype in self.dtypes.items()
        )

    def nbytes_by_rank(self, tensors: Iterable[str] | None = None) -> np.ndarray:
        """Return the bytes that each rank holds, counting each place; int array by rank.

        Args:
            tensors: count these, which are held. Default: all that are held.
        """
        # Sum the item sizes of tensors with the same owners, and visit their boxes once.
        itemsizes: dict[int, int] = {}
        distinct: dict[int, TensorOwners] = {}
        for name in self.owners if tensors is None else tensors:
            owners = self.owners[name]
            key = id(owners)
            itemsizes[key] = itemsizes.get(key, 0) + DTYPE_NBYTES[self.dtypes[name]]
            distinct[key] = owners
        total = np.zeros(self.num_ranks, dtype=np.int64)
        for key, owners in distinct.items():
            for box in owners:
                # A rank occurs once per place, and `total[ranks] +=` would add it once only.
                np.add.at(total, box.ranks, box.region.numel * itemsizes[key])
        return total

    def shards_of(self, rank: int, tensor: str) -> Iterator[tuple[Shard, Buffer]]:
        """Yield one rank's records of one tensor, with their buffers."""
        for placed in self.placed.get(tensor, ()):
            for box in placed.boxes:
                if not contains(box.owners.ranks, rank):
                    continue
                buffer_id = BufferId(rank, box.buffer.format(**placed.indices))
                region = Region(tensor, box.owners.offsets, box.owners.lengths)
                shard = Shard(region, Place(buffer_id, box.start, box.strides))
                yield shard, Buffer(box.numel, self.dtypes[tensor], placed.group)

    def places(self, tensor: str, owners: BoxOwners, rank: int, part: Region) -> list[Place]:
        """Return the place of `part` in each copy that `rank` has of a box, sorted.

        It does not visit all boxes of the tensor.

        Args:
            tensor: canonical name.
            owners: the box.
            rank: the rank.
            part: a box inside the box of `owners`.
        """
        # A box [4, 8) and its part [6, 8): the part starts 2 rows into the box.
        shift = [low - base for low, base in zip(part.offsets, owners.offsets, strict=True)]
        places = []
        for placed in self.placed[tensor]:
            # The tuple of boxes is shared by equivalent tensors, so the index is made once for all
            # of them.
            index = self._placed_by_box.get(id(placed.boxes))
            if index is None:
                index = self._placed_by_box[id(placed.boxes)] = {}
                for box in placed.boxes:
                    index.setdefault((box.owners.offsets, box.owners.lengths), []).append(box)
            for box in index.get((owners.offsets, owners.lengths), ()):
                if contains(box.owners.ranks, rank):
                    buffer_id = BufferId(rank, box.buffer.format(**placed.indices))
                    places.append(Place(buffer_id, box.start, box.strides).at(shift))
        return sorted(places, key=lambda place: (place.buffer, place.offset))

    @cached_property
    def _placed_by_box(self) -> dict[int, dict[Box, list[PlacedBox]]]:
        """By identity of a tuple of boxes; filled by `places`."""
        return {}


def holdings_of(
    layout: Layout,
    num_ranks: int,
    alike: Mapping[int, np.ndarray],
) -> Holdings:
    """Return the compact form of explicit records, e.g. of live engines.

    Padding and exports are left out.

    Args:
        layout: the records.
        num_ranks: size of the world.
        alike: for each rank of `layout`, all ranks that hold the same in the same places.

    Raises:
        PlanError: lists every tensor that is held in several dtypes.
    """
    faults = dtype_faults(layout)
    if faults:
        raise PlanError(faults)

    @cache
    def all_ranks(ranks: tuple[int, ...]) -> np.ndarray:
        """Return the ranks that hold the same as any of `ranks`."""
        return np.sort(np.concatenate([alike[rank] for rank in ranks]))

    dtypes = {}
    placed = {}
    shards_by_tensor = layout.shards_by_tensor()
    for name in layout.tensors:
        if name not in shards_by_tensor:
            continue
        # (buffer, group) -> (box, numel of the buffer, offset, strides) -> ranks
        by_buffer: dict[
            tuple[str, str],
            dict[tuple[Box, int, int, Strides], list[int]],
        ] = {}
        for shard in shards_by_tensor[name]:
            region = shard.region
            place = shard.place
            buffer = layout.buffers[place.buffer]
            box = (region.offsets, region.lengths)
            same_place = (box, buffer.numel, place.offset, place.strides)
            by_place = by_buffer.setdefault((place.buffer.name, buffer.group), {})
            by_place.setdefault(same_place, []).append(place.buffer.rank)
            dtypes[name] = buffer.dtype
        parts = []
        for (buffer_name, group), by_place in by_buffer.items():
            boxes = []
            for (box, numel, start, strides), ranks in by_place.items():
                box_owners = BoxOwners(*box, all_ranks(tuple(ranks)))
                # The live name is the value of `{name}`, not the pattern: braces in it stay as they
                # are.
                boxes.append(PlacedBox(box_owners, "{name}", numel, start, strides))
            parts.append(PlacedBoxes(tuple(boxes), {"name": buffer_name}, group))
        placed[name] = tuple(parts)
    return Holdings(num_ranks, layout.tensors, dtypes, placed)


@dataclass(frozen=True, eq=False)
class SideLayout(Holdings):
    """Holdings of a side that is computed from sizes.

    Attributes:
        num_elements: elements of the parameters that each rank stores, padding and copies
            included; int array by rank.
        num_expert_elements: elements of these that belong to experts; int array by rank.
        is_offered_all: True if the layout of a rank names all tensors of the side (inference),
            False if only the tensors it holds (training).
    """

    num_elements: np.ndarray
    num_expert_elements: np.ndarray
    is_offered_all: bool

    def layout_of(self, *ranks: int) -> Layout:
        """Return the explicit records of some ranks."""
        shards: list[Shard] = []
        buffers: dict[BufferId, Buffer] = {}
        held: set[str] = set()
        for tensor in self.placed:
            for rank in ranks:
                for shard, buffer in self.shards_of(rank, tensor):
                    shards.append(shard)
                    buffers[shard.place.buffer] = buffer
                    held.add(tensor)
        tensors = {
            name: shape
            for name, shape in self.shapes.items()
            if self.is_offered_all or name in held
        }
        return Layout(tensors, buffers, tuple(shards))

    def layout(self) -> Layout:
        """Return the explicit records of all ranks."""
        return self.layout_of(*range(self.num_ranks))


class SideBuilder:
    """Builder of a `SideLayout`, box by box.

    Tensors in equivalent places are recognised by the identity of their tuples of boxes, so create
    each distinct tuple once.
    """

    def __init__(
        self,
        num_ranks: int,
        shapes: Shapes,
        dtype: str,
        dtypes: Mapping[str, str],
        *,
        is_offered_all: bool,
    ) -> None:
        """Start an empty side.

        Args:
            num_ranks: size of the world.
            shapes: canonical tensors in the model's order.
            dtype: dtype of the weights.
            dtypes: exceptions to `dtype`, by tensor.
            is_offered_all: see `SideLayout`.
        """
        self._num_ranks = num_ranks
        self._shapes = shapes
        self._dtype = dtype
        self._dtypes = dtypes
        self._is_offered_all = is_offered_all
        self._placed: dict[str, list[PlacedBoxes]] = {}
        # (id of ranks, whether of an expert) -> ranks and elements; keeping the array alive keeps
        # its id unique.
        self._elements: dict[tuple[int, bool], tuple[np.ndarray, int]] = {}

    def add(self, tensor: str, placed: PlacedBoxes) -> None:
        """Add boxes of `tensor`."""
        self._placed.setdefault(tensor, []).append(placed)

    def add_elements(self, ranks: np.ndarray, numel: int, *, of_expert: bool) -> None:
        """Count a parameter of `numel` elements that each of `ranks` stores.

        Counts are kept by the identity of `ranks`, so pass the same array for the same ranks.
        """
        key = (id(ranks), of_expert)
        _, before = self._elements.get(key, (ranks, 0))
        self._elements[key] = (ranks, before + numel)

    def build(self) -> SideLayout:
        """Return the finished side."""
        placed = {name: tuple(self._placed[name]) for name in self._shapes if name in self._placed}
        dtypes = {name: self._dtypes.get(name, self._dtype) for name in placed}
        num_elements = np.zeros(self._num_ranks, dtype=np.int64)
        num_expert_elements = np.zeros(self._num_ranks, dtype=np.int64)
        for (_, of_expert), (ranks, numel) in self._elements.items():
            np.add.at(num_elements, ranks, numel)
            if of_expert:
                np.add.at(num_expert_elements, ranks, numel)
        return SideLayout(
            self._num_ranks,
            self._shapes,
            dtypes,
            placed,
            num_elements=num_elements,
            num_expert_elements=num_expert_elements,
            is_offered_all=self._is_offered_all,
        )
