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


def presence_of(box: BoxOwners, num_ranks: int) -> np.ndarray:
    present = np.zeros(num_ranks, dtype=bool)
    present[box.ranks] = True
    return present


def groups_of_columns(rows: Sequence[np.ndarray], num_columns: int) -> list[np.ndarray]:
    """Indices of equal columns of a boolean matrix, as groups in a fixed order; each group is sorted."""
    if num_columns == 0:
        return []
    if not rows:
        return [np.arange(num_columns)]
    packed = np.ascontiguousarray(np.packbits(np.array(rows), axis=0).T)
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, group_of = np.unique(keys, return_inverse=True)
    order = np.argsort(group_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group_of))[:-1])
