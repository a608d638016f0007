"""Sets of byte ranges against sets of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.memory.spans import Spans

SIZE = 40
RANGES = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: (min(pair), max(pair)))


def numbers(ranges: list[tuple[int, int]]) -> set[int]:
    return {number for start, stop in ranges for number in range(start, stop)}


@given(st.lists(RANGES, max_size=12), RANGES)
def test_spans_are_sets_of_numbers(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    spans, model = Spans(), set()
    for start, stop in added:
        first, last = spans.add(start, stop)
        model |= numbers([(start, stop)])
        assert numbers([(start, stop)]) <= numbers([(first, last)]) <= model
    ranges = list(spans)
    assert numbers(ranges) == model
    assert spans.nbytes == len(model)
    assert all(start < stop for start, stop in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges)), "not joined"
    missing = spans.missing(*asked)
    assert numbers(missing) == numbers([asked]) - model
    assert all(start < stop for start, stop in missing)
    spans.clear()
    assert list(spans) == []
    assert spans.nbytes == 0
    assert spans.missing(0, 3) == [(0, 3)]


def test_a_range_that_ends_before_it_starts_is_empty() -> None:
    spans = Spans()
    spans.add(4, 8)
    assert spans.missing(7, 5) == []
    assert spans.missing(20, 3) == []
