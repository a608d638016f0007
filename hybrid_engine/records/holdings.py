"""The layout of all ranks of one side in compact form: no object per rank and record.

A tensor's `BoxOwners` say which boxes of it are held and by which ranks. Tensors with the same owners (the experts of
one stage, a projection in the layers of one stage) share one tuple of them, so whoever works on the owners works once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.owners import BoxOwners, presence_of
from hybrid_engine.records.regions import Region, union

TensorOwners = tuple[BoxOwners, ...]


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who holds which boxes of every tensor.

    Attributes:
        num_ranks: of the world.
        shapes: of all tensors that this side knows, in the model's order, held or not.
        itemsizes: bytes per element of the tensors that are held.
        owners: of the tensors that are held. Boxes are sorted and differ; equal tuples are one object.
    """

    num_ranks: int
    shapes: Mapping[str, tuple[int, ...]]
    itemsizes: Mapping[str, int]
    owners: Mapping[str, TensorOwners]

    def nbytes_by_rank(self) -> np.ndarray:
        """Bytes of canonical tensors that each rank holds; int array. Padding and copies count as they are held."""
        total = np.zeros(self.num_ranks, dtype=np.int64)
        weights: dict[int, int] = {}
        known: dict[int, TensorOwners] = {}
        for name, owners in self.owners.items():
            known[id(owners)] = owners
            weights[id(owners)] = weights.get(id(owners), 0) + self.itemsizes[name]
        for key, owners in known.items():
            for box in owners:
                np.add.at(total, box.ranks, box.region.numel * weights[key])
        return total


def rank_classes(holdings: Holdings) -> np.ndarray:
    """Number of its class for each rank; ranks of one class hold the same boxes of everything."""
    classes = np.zeros(holdings.num_ranks, dtype=np.int64)
    seen: set[int] = set()
    for owners in holdings.owners.values():
        for box in owners:
            if id(box.ranks) not in seen:
                seen.add(id(box.ranks))
                _, classes = np.unique(2 * classes + presence_of(box, holdings.num_ranks), return_inverse=True)
    return classes


def first_members(classes: np.ndarray) -> np.ndarray:
    """The first rank of every class."""
    return np.unique(classes, return_index=True)[1]


class Interned:
    """Makes equal tuples of owners one object."""

    def __init__(self) -> None:
        self._known: dict[object, TensorOwners] = {}

    def of(self, owners: Iterable[BoxOwners]) -> TensorOwners:
        """These owners, sorted, those of one box joined."""
        by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[np.ndarray]] = {}
        for box in owners:
            by_box.setdefault((box.offsets, box.lengths), []).append(box.ranks)
        merged = [(box, np.sort(np.concatenate(ranks))) for box, ranks in sorted(by_box.items())]
        key = tuple((box, ranks.tobytes()) for box, ranks in merged)
        if key not in self._known:
            self._known[key] = tuple(BoxOwners(*box, ranks) for box, ranks in merged)
        return self._known[key]


def holdings_of(layout: Layout, num_ranks: int) -> Holdings:
    """The compact form of explicit records, e.g. of live engines.

    Raises ValueError for a tensor whose buffers have elements of different sizes.
    """
    interned = Interned()
    itemsizes: dict[str, int] = {}
    owners: dict[str, TensorOwners] = {}
    for name, shards in layout.shards_by_tensor().items():
        sizes = {layout.buffers[shard.place.buffer].itemsize for shard in shards}
        if len(sizes) > 1:
            raise ValueError(f"{name}: elements of {sorted(sizes)} bytes on different ranks or buffers")
        itemsizes[name] = sizes.pop()
        owners[name] = interned.of(
            BoxOwners(shard.region.offsets, shard.region.lengths, np.array([shard.place.buffer.rank]))
            for shard in shards
        )
    in_order = {name: owners[name] for name in layout.tensors if name in owners}
    return Holdings(num_ranks, layout.tensors, itemsizes, in_order)


def regions_by_tensor(layout: Layout) -> dict[str, list[Region]]:
    """Tensor -> what a layout has of it, in as few boxes as joining neighbours gives; sorted, each element once.

    Equal for layouts of one rank that hold the same, however they cut it: rows that follow one another are one box.
    """
    regions: dict[str, set[Region]] = {}
    for shard in layout.shards:
        regions.setdefault(shard.region.tensor, set()).add(shard.region)
    return {tensor: joined(union(sorted(found))) for tensor, found in sorted(regions.items())}


def joined(regions: Iterable[Region]) -> list[Region]:
    """Join boxes that differ in one dim only and touch, dim by dim."""
    boxes = sorted(regions)
    for dim in range(len(boxes[0].lengths)):
        ordered = sorted(boxes, key=lambda box, dim=dim: (_without(box, dim), box.offsets[dim]))
        boxes = ordered[:1]
        for box in ordered[1:]:
            last = boxes[-1]
            if _without(last, dim) == _without(box, dim) and last.ends[dim] == box.offsets[dim]:
                lengths = list(last.lengths)
                lengths[dim] += box.lengths[dim]
                boxes[-1] = Region(last.tensor, last.offsets, tuple(lengths))
            else:
                boxes.append(box)
    return sorted(boxes)


def _without(box: Region, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A box's bounds in the other dims."""
    return box.offsets[:dim] + box.offsets[dim + 1 :], box.lengths[:dim] + box.lengths[dim + 1 :]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBox:
    """A box that lies at the same place of a buffer on several ranks.

    Attributes:
        owners: the box and the ranks.
        buffer: name pattern of the buffer, with `{layer}` and `{expert}`.
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
    """Pieces of one tensor; `indices` are the values of the numbers in their names."""

    pieces: tuple[PlacedBox, ...]
    indices: Mapping[str, int | str]
    group: str


@dataclass(frozen=True, eq=False)
class SideLayout:
    """All ranks of one side: the holdings, and where each piece of them lies.

    Attributes:
        holdings: who holds what.
        placed: tensor -> its pieces.
        dtypes: tensor -> dtype.
        num_elements: elements of the parameters that each rank stores, padding and copies included; int array by rank.
        num_expert_elements: those of them that belong to experts.
        is_offered_all: a rank's layout names all tensors of this side (inference), not only those it holds (training).
    """

    holdings: Holdings
    placed: Mapping[str, tuple[PlacedBoxes, ...]]
    dtypes: Mapping[str, str]
    num_elements: np.ndarray
    num_expert_elements: np.ndarray
    is_offered_all: bool

    def shards_of(self, rank: int, tensor: str) -> Iterator[tuple[Shard, Buffer]]:
        """One rank's records of one tensor, with their buffers."""
        for placed in self.placed.get(tensor, ()):
            for piece in placed.pieces:
                position = np.searchsorted(piece.owners.ranks, rank)
                if position == len(piece.owners.ranks) or piece.owners.ranks[position] != rank:
                    continue
                buffer_id = BufferId(rank, piece.buffer.format(**placed.indices))
                region = Region(tensor, piece.owners.offsets, piece.owners.lengths)
                shard = Shard(region, Place(buffer_id, piece.start, piece.strides))
                yield shard, Buffer(piece.numel, self.dtypes[tensor], placed.group)

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
    """Collects the pieces of one side.

    Args:
        num_ranks: of the world.
        shapes: canonical tensors in the model's order.
        dtype: of the weights; `dtypes`: of the tensors that have another one.
        is_offered_all: see `SideLayout`.

    Tensors that lie alike are recognised by the identity of their tuples of pieces: make such a tuple once.
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
        """More pieces of `tensor`."""
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
        by_pieces: dict[tuple[int, ...], TensorOwners] = {}
        owners: dict[str, TensorOwners] = {}
        for name, parts in placed.items():
            key = tuple(id(part.pieces) for part in parts)
            if key not in by_pieces:
                by_pieces[key] = interned.of(piece.owners for part in parts for piece in part.pieces)
            owners[name] = by_pieces[key]
        counts = {of_expert: np.zeros(self._num_ranks, dtype=np.int64) for of_expert in (False, True)}
        for (_, of_expert), (ranks, numel) in self._elements.items():
            np.add.at(counts[of_expert], ranks, numel)
        itemsizes = {name: DTYPE_NBYTES[dtype] for name, dtype in dtypes.items()}
        holdings = Holdings(self._num_ranks, self._shapes, itemsizes, owners)
        return SideLayout(holdings, placed, dtypes, counts[False] + counts[True], counts[True], self._is_offered_all)
