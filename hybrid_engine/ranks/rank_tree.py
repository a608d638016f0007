"""Tree of small groups that connects all ranks of a job.

    level 0    0 1 … 7   8 9 … 15   16 … 23   …     hosts, or parts of larger hosts
    level 1    0 8 16 …           64 72 …           at most MAX_TOGETHER ranks each
    level 2    0 64 …                               the last level is one group

Data for all ranks goes up, from each group to its first rank, and comes down the same way. A rank
is connected only with the ranks of its groups: with 2,048 ranks on hosts of 8, most have 7
connections and one has 24. A single group would give each rank 2,047 connections, and gloo's ring
would send twice as many messages, one after the other, for a single number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.ranks.groups import RankGroup, ranks_by_host
from hybrid_engine.ranks.world import World

MAX_TOGETHER = 8
"""Limit of ranks in one group: the usual number on a host."""

_PART = 2**28
"""Bytes sent at once. Data on its way down waits for at most one part at each level."""


@dataclass(frozen=True)
class TreeGroup:
    """One group of a tree.

    Attributes:
        level: from 0, the bottom.
        ranks: members; data goes up to the first one.
        spans: for each member, the positions in `TreeShape.order` of the ranks that it represents.
    """

    level: int
    ranks: tuple[int, ...]
    spans: tuple[range, ...]


class TreeShape:
    """Groups of a tree, without connections.

    Args:
        hosts: host of each rank, by rank. Few ranks form one group, even on several hosts.

    Attributes:
        order: all ranks; ranks with the same representative are adjacent.
        groups: all groups, bottom up.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        is_small = len(hosts) <= MAX_TOGETHER
        near = [list(range(len(hosts)))] if is_small else ranks_by_host(hosts)
        parts = [part for ranks in near for part in _blocks(ranks)]
        self.order = list(itertools.chain.from_iterable(parts))
        self.groups: list[TreeGroup] = []
        spans = {rank: range(position, position + 1) for position, rank in enumerate(self.order)}
        for level in itertools.count():
            for part in parts:
                spans_of_part = tuple(spans[rank] for rank in part)
                self.groups.append(TreeGroup(level, part, spans_of_part))
            if len(parts) == 1:
                break
            # On the next level, the first rank of each part represents all of it.
            joined = {}
            for part in parts:
                first = spans[part[0]]
                last = spans[part[-1]]
                joined[part[0]] = range(first.start, last.stop)
            spans = joined
            parts = _blocks(list(spans))

    def of_rank(self, rank: int) -> list[TreeGroup]:
        """Return the groups in which `rank` has peers, bottom up."""
        return [group for group in self.groups if rank in group.ranks and len(group.ranks) > 1]

    def received_nbytes(self, rank: int, sizes: Sequence[int]) -> int:
        """Return the bytes that `rank` receives in a gather; `sizes`: of each rank's message."""
        starts = self.starts(sizes)
        nbytes = 0
        comes_down = False
        for group in self.of_rank(rank):
            if group.ranks[0] == rank:
                for span in group.spans[1:]:
                    nbytes += starts[span.stop] - starts[span.start]
            else:
                # Not the first of this group: everything comes from above, once.
                comes_down = True
        # All messages come down from the first rank of one of its groups.
        return nbytes + starts[-1] if comes_down else nbytes

    def starts(self, sizes: Sequence[int]) -> list[int]:
        """Return the offset of each position's message in all messages joined, and their end."""
        return list(itertools.accumulate((sizes[rank] for rank in self.order), initial=0))


def _blocks(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    starts = range(0, len(ranks), MAX_TOGETHER)
    return [tuple(ranks[start : start + MAX_TOGETHER]) for start in starts]


def _parts(values: torch.Tensor) -> list[torch.Tensor]:
    """Split `values` into parts to send; none if empty, because gloo sends no empty tensors."""
    return [part for part in values.split(_PART) if part.numel()]


class RankTree:
    """Connections of one rank in the tree.

    Creation and all methods but `close` are collective, and raise the errors of torch.distributed
    if a rank is lost.

    Args:
        world: the ranks.
        shape: groups of the tree.
        timeout_seconds: longest wait for another rank.
        ended: returns the ranks that are known to have ended, as text; "" if none. A maximum does
            not wait any longer once there are some.
    """

    def __init__(
        self,
        world: World,
        shape: TreeShape,
        timeout_seconds: float,
        ended: Callable[[], str] = lambda: "",
    ) -> None:
        self._rank = world.rank
        self._shape = shape
        self._ended = ended
        # Taken first: if a connection fails on one rank alone, all ranks still count the same.
        number = world.next_number()
        self._groups: list[tuple[TreeGroup, RankGroup]] = []
        try:
            for group in shape.of_rank(world.rank):
                name = f"tree {number}/{group.level}/{group.ranks[0]}"
                connections = RankGroup(world, name, group.ranks, timeout_seconds)
                self._groups.append((group, connections))
            # A rank that continued at once might close its connections before others have theirs.
            self.maximum(torch.zeros(1))
        except BaseException:
            # The traceback of the error would keep the connections open, and ranks beyond them
            # wait.
            self.close()
            raise

    def maximum(self, values: torch.Tensor) -> None:
        """Replace every element by its largest value on any rank, in place."""
        # Upwards each group's members learn the largest value of all that its members represent;
        # only the topmost group knows that of all ranks.
        for _, connections in self._groups:
            connections.end_maximum(connections.begin_maximum(values), self._ended)
        for group, connections in self._groups[::-1]:
            # In the last group every member has the final values from the way up.
            if group is not self._shape.groups[-1]:
                connections.broadcast(values)

    def gather(
        self,
        message: bytes,
        sizes: Sequence[int],
        room: torch.Tensor | None = None,
    ) -> list[memoryview]:
        """Return the messages of all ranks, by rank.

        Args:
            message: of this rank.
            sizes: bytes of each rank's message, by rank; equal on all ranks.
            room: memory for all messages, [sum of sizes] uint8; default: allocated here. The result
                consists of views of it.
        """
        starts = self._shape.starts(sizes)
        if room is None:
            room = torch.empty(starts[-1], dtype=torch.uint8)
        places = {}
        for rank, (start, stop) in zip(self._shape.order, itertools.pairwise(starts), strict=True):
            places[rank] = slice(start, stop)
        if message:
            # torch.frombuffer warns of read-only memory, and raises for an empty buffer.
            values = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            room[places[self._rank]] = values
        for group, connections in self._groups:
            first = group.ranks[0]
            for rank, span in zip(group.ranks[1:], group.spans[1:], strict=True):
                # Messages of the ranks that this member represents are adjacent.
                for part in _parts(room[starts[span.start] : starts[span.stop]]):
                    if self._rank == rank:
                        connections.begin_send(part, first).wait()
                    elif self._rank == first:
                        connections.begin_receive(part, rank).wait()
        # Part by part over all levels, so that a lower level forwards one part while the next
        # arrives above.
        for part in _parts(room):
            for _, connections in self._groups[::-1]:
                connections.broadcast(part)
        view = room.numpy().data
        return [view[places[rank]] for rank in range(len(sizes))]

    def close(self) -> None:
        """Close the connections; idempotent."""
        for _, connections in self._groups:
            connections.close()
