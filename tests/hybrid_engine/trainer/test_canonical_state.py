"""Boxes of canonical tensors in flat parts of parameters."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.trainer.canonical_state import boxes_between


@given(st.data())
def test_boxes_of_a_flat_part_are_its_elements(data: st.DataObject) -> None:
    """Few boxes, apart from each other, of a box in a dense tensor with its dims in any order."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    numel = math.prod(shape)
    strides = [1] * len(shape)
    step = 1
    for dim in data.draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step *= shape[dim]
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = tuple(data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, numel)] * 2)))

    def elements(lengths: tuple[int, ...], first: int) -> dict[tuple[int, ...], int]:
        return {
            index: first + sum(map(math.prod, zip(index, strides, strict=True)))
            for index in itertools.product(*map(range, lengths))
        }

    first = sum(map(math.prod, zip(offsets, strides, strict=True)))
    inside = {index: place for index, place in elements(lengths, first).items() if start <= place < stop}
    boxes = list(boxes_between(lengths, tuple(strides), first, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape))
    cut = [
        (tuple(map(sum, zip(index, offset, strict=True))), place)
        for offset, size, box_first in boxes
        for index, place in elements(size, box_first).items()
    ]
    assert dict(cut) == inside
    assert len(cut) == len(inside)
