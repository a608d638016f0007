"""Sets of byte ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Spans:
    """Byte ranges [start, stop), sorted, disjoint and joined where they touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes in all ranges."""
        return sum(self._stops) - sum(self._starts)

    def add(self, start: int, stop: int) -> tuple[int, int]:
        """Add a range; return the range of the set in which it now lies. An empty one changes nothing."""
        if start >= stop:
            return start, start
        low = bisect_left(self._stops, start)  # the first that ends at `start` or after it
        high = bisect_right(self._starts, stop)  # the first that begins after `stop`
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]
        return start, stop

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of [start, stop) that are in no range, in order."""
        gaps: list[tuple[int, int]] = []
        for index in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            if start < self._starts[index]:
                gaps.append((start, self._starts[index]))
            start = self._stops[index]
        if start < stop:
            gaps.append((start, stop))
        return gaps

    def clear(self) -> None:
        """Remove all ranges."""
        self._starts.clear()
        self._stops.clear()
