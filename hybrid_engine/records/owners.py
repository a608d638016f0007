"""Which ranks hold a box of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.records.regions import Region


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
