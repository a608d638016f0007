"""Assignment of ranks to inference positions, so that most of each shard is already in place.

    gain[rank, position]    bytes that the position needs and the rank holds; ranks that hold the
                            same share a row, positions that need the same share a column
    whole hosts             positions that share a host in sequential order stay together: find
                            the best place of each within a host, then the best host for each set
    tensor parallel groups  the same for single groups, if every host has whole groups in
                            sequential order

Both are assignment problems. Neither splits a tensor parallel group that is on one host in
sequential order. The best of the two and sequential order is chosen. Sequential order wins ties,
so that nothing moves without need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hybrid_engine.errors import needing_package
from hybrid_engine.planning.routes import Hosts
from hybrid_engine.planning.tensor_classes import TensorClass, tensor_classes
from hybrid_engine.records.holdings import (
    BoxOwners,
    Holdings,
    TensorOwners,
    first_members,
    groups_of_columns,
    presence_of,
    rank_classes,
)
from hybrid_engine.records.regions import subtract_all, union

Order = tuple[int, ...]
Kind = Literal["auto", "sequential"]


def rank_order(
    kind: Kind,
    source: Holdings,
    positions: Holdings,
    hosts: Sequence[object],
    tensor: int,
) -> Order:
    """Return the global rank at each inference position.

    Args:
        kind: "sequential" puts rank r at position r. "auto" searches for the order in which ranks
            hold the most bytes of their shards. It never holds less than sequential order, and it
            keeps a tensor parallel group on one host if sequential order does.
        source: holdings of the training ranks.
        positions: holdings that inference needs, with positions in place of ranks.
        hosts: host of every rank.
        tensor: tensor parallel size of inference; consecutive positions form a group.

    Raises:
        DependencyError: "auto" needs scipy, which is not installed.
        PlanError: lists tensors that inference needs and no rank holds.
    """
    sequential = tuple(range(positions.num_ranks))
    if kind == "sequential":
        return sequential
    gain = _Gain(source, positions)
    numbered = Hosts(hosts)
    candidates = [sequential, _by_hosts(gain, numbered)]
    groups = _tensor_groups(numbered, tensor)
    if groups is not None:
        candidates.append(_by_tensor_groups(gain, numbered, groups))
    # `max` returns the first of equals, which is sequential order.
    return max(candidates, key=gain.total)


class _Gain:
    """Bytes that a rank holds of a position's shard, by classes of ranks and positions.

    Attributes:
        rank_class: class of each rank.
        position_class: class of each position.
        matrix: bytes, int64 [rank classes, position classes].
    """

    def __init__(self, source: Holdings, positions: Holdings) -> None:
        # First, because it raises PlanError for holdings that do not fit together.
        classes = tensor_classes(source, positions)
        self.rank_class = rank_classes(source)
        self.position_class = rank_classes(positions)
        ranks = first_members(self.rank_class)
        places = first_members(self.position_class)
        self.matrix = np.zeros((len(ranks), len(places)), dtype=np.int64)
        self._best: dict[tuple[bytes, bytes], tuple[int, np.ndarray]] = {}
        for tensors in classes:
            self._add(tensors, ranks, places)

    def total(self, order: Sequence[int]) -> int:
        """Return the bytes that are in place in an order."""
        return int(self.matrix[self.rank_class[list(order)], self.position_class].sum())

    def best(self, ranks: np.ndarray, positions: np.ndarray) -> tuple[int, np.ndarray]:
        """Find the best assignment of `ranks` to equally many `positions`.

        Returns:
            Bytes in place, and for each rank an index into `positions`.
        """
        rows = self.rank_class[ranks]
        columns = self.position_class[positions]
        key = (rows.tobytes(), columns.tobytes())
        if key not in self._best:
            gains = self.matrix[np.ix_(rows, columns)]
            chosen = _assign(gains)
            nbytes = int(gains[np.arange(len(chosen)), chosen].sum())
            self._best[key] = (nbytes, chosen)
        return self._best[key]

    def _add(self, tensors: TensorClass, ranks: np.ndarray, places: np.ndarray) -> None:
        """Add one tensor class to the matrix."""
        holders = _having(tensors.sources, ranks)
        needers = _having(tensors.destinations, places)
        itemsize = int(tensors.itemsizes.sum())
        for rows, held in holders:
            held_regions = [box.region for box in held]
            for columns, needed in needers:
                # Boxes that a position needs may overlap. |wanted and held| = |wanted| - |wanted
                # without held|.
                wanted = union(box.region for box in needed)
                missing = subtract_all(wanted, held_regions)
                common = sum(box.numel for box in wanted) - sum(box.numel for box in missing)
                self.matrix[np.ix_(rows, columns)] += common * itemsize


def _having(
    owners: TensorOwners,
    members: np.ndarray,
) -> list[tuple[np.ndarray, list[BoxOwners]]]:
    """Return (indices into `members`, the boxes that these own) for each set of boxes owned.

    Members that own no box are left out.
    """
    last_owner = max(box.ranks.max() for box in owners)
    num_ranks = int(max(members.max(), last_owner)) + 1
    columns = [presence_of(box, num_ranks)[members] for box in owners]
    groups = []
    for indices in groups_of_columns(columns, len(members)):
        first = indices[0]
        boxes = [box for box, column in zip(owners, columns, strict=True) if column[first]]
        if boxes:
            groups.append((indices, boxes))
    return groups


def _by_hosts(gain: _Gain, hosts: Hosts) -> Order:
    """Return the best order that keeps together the positions that share a host sequentially.

    Only hosts of one size exchange their positions.
    """
    members = [np.flatnonzero(hosts.numbers == number) for number in range(hosts.count)]
    order = np.empty(len(hosts.numbers), dtype=np.int64)
    # Sets of positions and of ranks are exchanged whole, which needs equal sizes.
    for size in {len(ranks) for ranks in members}:
        same_size = [ranks for ranks in members if len(ranks) == size]
        _exchange(gain, same_size, same_size, order)
    return tuple(order.tolist())


def _by_tensor_groups(gain: _Gain, hosts: Hosts, groups: list[np.ndarray]) -> Order:
    """Return the best order that keeps tensor parallel groups whole, on parts of hosts."""
    group_size = len(groups[0])
    kinds = {tuple(gain.position_class[group].tolist()): group for group in groups}
    slots: list[np.ndarray] = []
    for number in range(hosts.count):
        ranks = np.flatnonzero(hosts.numbers == number)
        # Every group lies on one host (`_tensor_groups`), so this divides evenly and `gain.best`
        # gets as many positions as ranks.
        num_slots = len(ranks) // group_size
        # Cut the host as is best if all its groups were of one kind: the kind of which it holds
        # most. The joint optimum over all kinds would not be an assignment problem.
        cuts = [gain.best(ranks, np.tile(group, num_slots)) for group in kinds.values()]
        _, chosen = max(cuts, key=lambda cut: cut[0])
        # `chosen` indexes the repeated positions. With groups of 4 on a host of 8, indices 0 to 3
        # are slot 0 and 4 to 7 slot 1.
        slot_of = chosen // group_size
        slots += [ranks[slot_of == slot] for slot in range(num_slots)]
    order = np.empty(len(hosts.numbers), dtype=np.int64)
    _exchange(gain, slots, groups, order)
    return tuple(order.tolist())


def _exchange(
    gain: _Gain,
    parts: list[np.ndarray],
    blocks: list[np.ndarray],
    order: np.ndarray,
) -> None:
    """Assign every block of positions the best part of the ranks, and write it into `order`."""
    part_kinds, kind_of_part = _kinds(gain.rank_class, parts)
    block_kinds, kind_of_block = _kinds(gain.position_class, blocks)
    # Bytes in place for the best order within a part, of each kind of part and of block.
    gains = np.array(
        [[gain.best(ranks, block)[0] for block in block_kinds] for ranks in part_kinds],
    )
    # [parts, blocks], by their kinds: 512 hosts of one kind need a single call of `gain.best`, not
    # 512 squared.
    block_of_part = _assign(gains[np.ix_(kind_of_part, kind_of_block)])
    for ranks, number in zip(parts, block_of_part, strict=True):
        block = blocks[number]
        _, chosen = gain.best(ranks, block)
        # Rank i of the part takes position `block[chosen[i]]`.
        order[block[chosen]] = ranks


def _kinds(classes: np.ndarray, parts: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return one part for each sequence of classes, and the index of that part for every part.

    Parts with the same sequence of classes have the same gain everywhere.
    """
    numbers: dict[bytes, int] = {}
    kind_of = np.array(
        [numbers.setdefault(classes[part].tobytes(), len(numbers)) for part in parts],
    )
    _, firsts = np.unique(kind_of, return_index=True)
    return [parts[index] for index in firsts], kind_of


def _tensor_groups(hosts: Hosts, tensor: int) -> list[np.ndarray] | None:
    """Return the positions of every tensor parallel group, sorted by host.

    None if sequential order spreads any group over several hosts.
    """
    # Sizes of 8 ranks and tensor parallel 4: rows [0, 1, 2, 3] and [4, 5, 6, 7].
    groups = np.arange(len(hosts.numbers)).reshape(-1, tensor)
    host_of = hosts.numbers[groups]
    if (host_of != host_of[:, :1]).any():
        return None
    by_host = np.argsort(host_of[:, 0], kind="stable")
    return [groups[index] for index in by_host]


def _assign(gains: np.ndarray) -> np.ndarray:
    """Return the column of each row in the assignment of highest gain.

    Among assignments of equal gain, the one with most rows i in column i.
    """
    message = "infer_rank_order auto needs scipy: pip install scipy, or choose sequential"
    with needing_package(message):
        from scipy.optimize import linear_sum_assignment
    # The solver takes one number per pair, so both criteria go into one weight. Gains are multiples
    # of `unit`: counted in units, assignments of different gain differ by at least 1. Times n + 1,
    # that outweighs the bonus of at most n ones on the diagonal. So the diagonal only decides
    # between assignments of equal gain: ranks stay where they are unless moving them gains bytes.
    unit = max(int(np.gcd.reduce(gains, axis=None)), 1)
    bonus = np.eye(len(gains), dtype=np.int64)
    weights = (gains // unit) * (len(gains) + 1) + bonus
    _, columns = linear_sum_assignment(weights, maximize=True)
    return columns
