"""Sets of byte ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import itemgetter

_start, _stop = itemgetter(0), itemgetter(1)


class Spans:
    """Byte ranges [start, stop), sorted, disjoint and joined where they touch."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # one list, changed in one step: an exception leaves no half of it

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans.copy())

    @property
    def nbytes(self) -> int:
        """Bytes in all ranges."""
        return sum(stop - start for start, stop in self._spans)

    def add(self, start: int, stop: int) -> tuple[int, int]:
        """Add a range; return the range of the set in which it now lies. An empty one changes nothing."""
        if start >= stop:
            return start, start
        low = bisect_left(self._spans, start, key=_stop)  # the first that ends at `start` or after it
        high = bisect_right(self._spans, stop, key=_start)  # the first that begins after `stop`
        if low < high:
            start, stop = min(start, self._spans[low][0]), max(stop, self._spans[high - 1][1])
        self._spans[low:high] = [(start, stop)]
        return start, stop

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of [start, stop) that are in no range, in order."""
        gaps: list[tuple[int, int]] = []
        first, end = bisect_right(self._spans, start, key=_stop), bisect_left(self._spans, stop, key=_start)
        for span_start, span_stop in self._spans[first:end]:
            if start < span_start:
                gaps.append((start, span_start))
            start = span_stop
        if start < stop:
            gaps.append((start, stop))
        return gaps

    def clear(self) -> None:
        """Remove all ranges."""
        self._spans.clear()
