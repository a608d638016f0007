"""Which rank takes which inference position, so that as much as possible of its shard is there already.

    gain[rank, position]    bytes of what the position needs that the rank holds; ranks that hold the same are one row,
                            positions that need the same one column
    whole hosts             the positions that a host has in sequential order go to one host together: the best place
                            of each within a host, then the best host for each such set
    tensor parallel groups  likewise for groups one by one, where every host has whole groups in sequential order

Both are assignment problems, and neither takes a tensor parallel group apart that is on one host in sequential order.
The better of them and of sequential order is taken; of equals sequential order, so that nothing moves without need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hybrid_engine.errors import DependencyError
from hybrid_engine.planning.routes import Hosts, TensorClass, tensor_classes
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


def rank_order(kind: Kind, source: Holdings, positions: Holdings, hosts: Sequence[object], tensor: int) -> Order:
    """The global rank at each inference position.

    Args:
        kind: "sequential", rank r at position r; or "auto", the order in which ranks hold most of what they need. It
            never holds less than sequential order, and keeps a tensor parallel group on one host where that one does.
        source: what training ranks hold.
        positions: what inference positions need; by position in place of rank.
        hosts: of every rank.
        tensor: inference tensor parallel size; consecutive positions are a group.

    Raises DependencyError without scipy, PlanError for tensors that nobody holds.
    """
    sequential = tuple(range(positions.num_ranks))
    if kind == "sequential":
        return sequential
    gain = _Gain(source, positions)
    hosts_of = Hosts(hosts)
    candidates = [sequential, _by_hosts(gain, hosts_of)]
    if (units := _tensor_groups(hosts_of, tensor)) is not None:
        candidates.append(_by_tensor_groups(gain, hosts_of, units))
    return max(candidates, key=gain.total)  # the first of equals


class _Gain:
    """Bytes that a rank holds of what a position needs, by classes of ranks and positions.

    Attributes:
        rank_class, position_class: class numbers.
        matrix: bytes, int64 [rank classes, position classes].
    """

    def __init__(self, source: Holdings, positions: Holdings) -> None:
        sets = list(tensor_classes(source, positions))
        self.rank_class = rank_classes(source)
        self.position_class = rank_classes(positions)
        ranks, places = (first_members(classes) for classes in (self.rank_class, self.position_class))
        self.matrix = np.zeros((len(ranks), len(places)), dtype=np.int64)
        self._inner: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, np.ndarray]] = {}
        for tensors in sets:
            self._add(tensors, ranks, places)

    def total(self, order: Sequence[int]) -> int:
        """Bytes held in an order."""
        return int(self.matrix[self.rank_class[list(order)], self.position_class].sum())

    def best(self, ranks: np.ndarray, positions: np.ndarray) -> tuple[int, np.ndarray]:
        """(bytes held, index into `positions` for each of `ranks`) of the best assignment; as many of both."""
        rows, columns = self.rank_class[ranks], self.position_class[positions]
        key = tuple(rows.tolist()), tuple(columns.tolist())
        if key not in self._inner:
            gains = self.matrix[np.ix_(rows, columns)]
            chosen = _assign(gains)
            self._inner[key] = int(gains[np.arange(len(chosen)), chosen].sum()), chosen
        return self._inner[key]

    def _add(self, tensors: TensorClass, ranks: np.ndarray, places: np.ndarray) -> None:
        """Add what one set of tensors gives; only for classes that hold, and need, anything of it."""
        holders, needers = _having(tensors.sources, ranks), _having(tensors.destinations, places)
        weight = int(tensors.itemsizes.sum())
        for rows, held in holders:
            for columns, needed in needers:
                wanted = union(box.region for box in needed)
                common = sum(box.numel for box in wanted)
                common -= sum(box.numel for box in subtract_all(wanted, [box.region for box in held]))
                self.matrix[np.ix_(rows, columns)] += common * weight


def _having(owners: TensorOwners, members: np.ndarray) -> list[tuple[np.ndarray, list[BoxOwners]]]:
    """(indices into `members`, the boxes they own) for every combination of boxes that some own."""
    num_ranks = int(max(members.max(), max(box.ranks.max() for box in owners))) + 1
    columns = [presence_of(box, num_ranks)[members] for box in owners]
    groups = []
    for indices in groups_of_columns(columns, len(members)):
        own = [box for box, column in zip(owners, columns, strict=True) if column[indices[0]]]
        if own:
            groups.append((indices, own))
    return groups


def _by_hosts(gain: _Gain, hosts: Hosts) -> Order:
    """Positions of a host in sequential order stay together; hosts of one size exchange them."""
    members = [np.flatnonzero(hosts.numbers == number) for number in range(hosts.count)]
    order = np.empty(len(hosts.numbers), dtype=np.int64)
    for size in {len(ranks) for ranks in members}:
        _exchange(gain, [ranks for ranks in members if len(ranks) == size], order)
    return tuple(order.tolist())


def _by_tensor_groups(gain: _Gain, hosts: Hosts, units: list[np.ndarray]) -> Order:
    """Tensor parallel groups go to parts of hosts that are as large."""
    kinds = {tuple(gain.position_class[unit].tolist()): unit for unit in units}
    slots: list[np.ndarray] = []
    for number in range(hosts.count):
        ranks = np.flatnonzero(hosts.numbers == number)
        # The host is cut as would be best if it had but one kind of group, for the kind of which it holds most.
        copies = len(ranks) // len(units[0])
        cuts = [gain.best(ranks, np.tile(unit, copies)) for unit in kinds.values()]
        _, chosen = max(cuts, key=lambda cut: cut[0])
        slots += [ranks[chosen // len(units[0]) == copy] for copy in range(copies)]
    order = np.empty(len(hosts.numbers), dtype=np.int64)
    _exchange(gain, slots, order, units)
    return tuple(order.tolist())


def _exchange(gain: _Gain, parts: list[np.ndarray], order: np.ndarray, blocks: list[np.ndarray] | None = None) -> None:
    """Give every block of positions a part of the ranks; without `blocks`, position r belongs to rank r's part."""
    blocks = parts if blocks is None else blocks
    part_kinds, kind_of_part = _kinds(gain.rank_class, parts)
    block_kinds, kind_of_block = _kinds(gain.position_class, blocks)
    gains = np.array([[gain.best(ranks, block)[0] for block in block_kinds] for ranks in part_kinds])
    for ranks, number in zip(parts, _assign(gains[np.ix_(kind_of_part, kind_of_block)]), strict=True):
        block = blocks[number]
        order[block[gain.best(ranks, block)[1]]] = ranks


def _kinds(classes: np.ndarray, parts: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """(one part of each sequence of classes, its index for every part): parts of one kind gain the same anywhere."""
    kinds: dict[bytes, int] = {}
    kind_of = np.array([kinds.setdefault(classes[part].tobytes(), len(kinds)) for part in parts])
    return [parts[index] for index in np.unique(kind_of, return_index=True)[1]], kind_of


def _tensor_groups(hosts: Hosts, tensor: int) -> list[np.ndarray] | None:
    """Positions of every tensor parallel group, host by host; None unless each is on one host in sequential order."""
    groups = np.arange(len(hosts.numbers)).reshape(-1, tensor)
    host_of = hosts.numbers[groups]
    if (host_of != host_of[:, :1]).any():
        return None
    return [groups[index] for index in np.argsort(host_of[:, 0], kind="stable")]


def _assign(gains: np.ndarray) -> np.ndarray:
    """Column of each row of the best assignment; row i in column i counts as the smallest possible gain more."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise DependencyError("infer_rank_order auto needs scipy: pip install scipy, or choose sequential") from error
    # The solver knows one number for each pair. Gains are multiples of `unit`, so counted in units two assignments of
    # different gain differ by at least 1; times (n + 1) that outweighs the n ones at most that the diagonal adds. So
    # the diagonal decides between assignments of equal gain only: ranks stay where they are unless moving gains.
    unit = max(int(np.gcd.reduce(gains, axis=None)), 1)
    weights = (gains // unit) * (len(gains) + 1) + np.eye(len(gains), dtype=np.int64)
    return linear_sum_assignment(weights, maximize=True)[1]
