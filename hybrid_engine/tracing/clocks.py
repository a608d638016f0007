"""What the clocks of ranks differ by, without a message of its own.

All ranks are inside an agreement at one moment, the arrival of the last. A rank that was inside from e to l by its
clock, and rank 0 from e0 to l0 by its own, so differ by something between e0 - l and l0 - e. Every agreement of a
switch narrows this down. Processes of one host read one clock: 0 is possible, and taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Meetings = Sequence[tuple[int, int]]
"""(entered, left) of moments at which all ranks were inside, by one rank's clock."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Nanoseconds to add to a rank's clock for rank 0's, and by how much they may be wrong."""

    nanoseconds: int
    error: int


def clock_offsets(meetings: Sequence[Meetings]) -> list[ClockOffset]:
    """By rank, from the same meetings on all ranks; without any, 0."""
    return [_offset(meetings[0], own) for own in meetings]


def _offset(first: Meetings, own: Meetings) -> ClockOffset:
    if own is first or not own:
        return ClockOffset(0, 0)
    pairs = list(zip(first, own, strict=True))
    least = max(entered - left for (entered, _), (_, left) in pairs)
    most = min(left - entered for (_, left), (entered, _) in pairs)
    if least <= 0 <= most:
        return ClockOffset(0, max(-least, most))
    return ClockOffset((least + most) // 2, abs(most - least) // 2)
