"""All ranks of a job meet in groups of few: those of a host, then the first rank of each group below, up to one group.

    level 0    0 1 … 7   8 9 … 15   16 … 23   …     hosts, or parts of larger ones
    level 1    0 8 16 …           64 72 …           at most MOST_TOGETHER each
    level 2    0 64 …                               the last is one group

What is to be known by all goes up, from each group to its first rank, and comes down the same way. A rank is connected
with those of its groups alone: 2,048 ranks on hosts of 8 give most of them 7 connections, and one of them 24. One group
of all would give each of them 2,047, and gloo's ring twice as many messages one after the other for a single number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.ranks.groups import RankGroup, ranks_by_host
from hybrid_engine.ranks.world import World

MOST_TOGETHER = 8
"""Ranks of one group: as many as a host usually has."""

_PART = 2**28
"""Bytes that are sent at once: what comes down waits for no more than so many at each level."""


@dataclass(frozen=True)
class Meeting:
    """One group of a tree.

    Attributes:
        level: from 0.
        ranks: that meet; what goes up goes to the first.
        spans: for each of them, what it speaks for: the ranks at these positions of `TreeShape.order`.
    """

    level: int
    ranks: tuple[int, ...]
    spans: tuple[range, ...]


class TreeShape:
    """Who meets whom.

    Attributes:
        order: all ranks, those that one rank speaks for next to each other.
        meetings: bottom up.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: by rank. Few ranks meet in one group, wherever they are."""
        near = ranks_by_host(hosts) if len(hosts) > MOST_TOGETHER else [list(range(len(hosts)))]
        parts = [part for ranks in near for part in _blocks(ranks)]
        self.order = list(itertools.chain.from_iterable(parts))
        self.meetings: list[Meeting] = []
        spans = {rank: range(position, position + 1) for position, rank in enumerate(self.order)}
        for level in itertools.count():
            self.meetings += (Meeting(level, part, tuple(spans[rank] for rank in part)) for part in parts)
            if len(parts) == 1:
                break
            spans = {part[0]: range(spans[part[0]].start, spans[part[-1]].stop) for part in parts}
            parts = _blocks(list(spans))

    def of_rank(self, rank: int) -> list[Meeting]:
        """Those in which a rank meets others, bottom up."""
        return [each for each in self.meetings if rank in each.ranks and len(each.ranks) > 1]

    def received_nbytes(self, rank: int, sizes: Sequence[int]) -> int:
        """What a rank receives where each has so many bytes (by rank) to say to all."""
        starts = self.starts(sizes)
        meetings = self.of_rank(rank)
        going_up = sum(
            starts[span.stop] - starts[span.start]
            for each in meetings
            for span in (each.spans[1:] if each.ranks[0] == rank else ())
        )
        comes_down = any(each.ranks[0] != rank for each in meetings)
        return going_up + comes_down * starts[-1]

    def starts(self, sizes: Sequence[int]) -> list[int]:
        """Where in all that is said each position begins, and the end."""
        return list(itertools.accumulate((sizes[rank] for rank in self.order), initial=0))


def _blocks(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ranks[start : start + MOST_TOGETHER]) for start in range(0, len(ranks), MOST_TOGETHER)]


def _parts(values: torch.Tensor) -> list[torch.Tensor]:
    """Gloo sends no empty tensors."""
    return [part for part in values.split(_PART) if part.numel()]


class RankTree:
    """One rank's connections. All of it is collective, and raises as torch.distributed does where a rank is lost."""

    def __init__(
        self, world: World, shape: TreeShape, timeout_seconds: float, ended: Callable[[], str] = lambda: ""
    ) -> None:
        """`ended`: which ranks are known to have, in words; no maximum is waited for once there are some."""
        self._rank, self._shape, self._ended = world.rank, shape, ended
        number = world.next_number()  # first: where a connection fails on one rank alone, all still count the same
        self._meetings: list[tuple[Meeting, RankGroup]] = []
        try:
            for each in self._shape.of_rank(world.rank):
                name = f"tree {number}/{each.level}/{each.ranks[0]}"
                self._meetings.append((each, RankGroup(world, name, each.ranks, timeout_seconds)))
            # whoever is through first may close its connections before others have made theirs
            self.maximum(torch.zeros(1))
        except BaseException:
            self.close()  # the error's traceback would keep the connections, and those beyond them would wait
            raise

    def maximum(self, values: torch.Tensor) -> None:
        """Let every element be the largest of all ranks', in place."""
        for _, group in self._meetings:
            group.end_maximum(group.begin_maximum(values), self._ended)
        for meeting, group in self._meetings[::-1]:
            if meeting is not self._shape.meetings[-1]:  # where each has heard all others
                group.tell(values)

    def gather(self, message: bytes, sizes: Sequence[int], room: torch.Tensor | None = None) -> list[memoryview]:
        """The messages of all ranks, by rank; all ranks know how long each is.

        `room`: memory for all of them, uint8, of which what is returned are parts; default: it is taken here.
        """
        starts = self._shape.starts(sizes)
        joined = torch.empty(starts[-1], dtype=torch.uint8) if room is None else room
        places = {rank: slice(*starts[position : position + 2]) for position, rank in enumerate(self._shape.order)}
        if message:
            joined[places[self._rank]] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for meeting, group in self._meetings:
            first = meeting.ranks[0]
            for rank, span in zip(meeting.ranks[1:], meeting.spans[1:], strict=True):
                for part in _parts(joined[starts[span.start] : starts[span.stop]]):
                    if self._rank == rank:
                        group.begin_send(part, first).wait()
                    elif self._rank == first:
                        group.begin_receive(part, rank).wait()
        for part in _parts(joined):
            for _, group in self._meetings[::-1]:
                group.tell(part)
        told = joined.numpy().data
        return [told[places[rank]] for rank in range(len(sizes))]

    def close(self) -> None:
        """End the connections; idempotent."""
        for _, group in self._meetings:
            group.close()
