"""A rank's part of a tensor packed in a sharded parameter, compared element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.layouts.sharded import held_boxes
from hybrid_engine.records.regions import LocalBox, StridedView, contiguous_strides


@st.composite
def packed_views(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray]:
    """Draw a parameter's shape, and a view of its element numbers as conversions make them."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    view = np.arange(int(np.prod(shape))).reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.ndim - 1))
        change = draw(st.sampled_from(["chunk", "select", "transpose", "steps"]))
        if change == "chunk":
            first = draw(st.integers(0, view.shape[dim] - 1))
            view = np.moveaxis(
                np.moveaxis(view, dim, 0)[first : draw(st.integers(first + 1, view.shape[dim]))],
                0,
                dim,
            )
        elif change == "select" and view.ndim > 1:
            view = np.take(
                np.moveaxis(view, dim, 0), draw(st.integers(0, view.shape[dim] - 1)), axis=0
            )
        elif change == "transpose":
            view = np.swapaxes(view, 0, dim)
        elif change == "steps":
            view = np.moveaxis(np.moveaxis(view, dim, 0)[::2], 0, dim)
    return shape, view


@given(packed_views(), st.data())
def test_every_element_of_the_part_is_held_once(
    packed: tuple[tuple[int, ...], np.ndarray], data: st.DataObject
) -> None:
    shape, numbers = packed
    low = tuple(data.draw(st.integers(0, size)) for size in shape)
    lengths = tuple(
        data.draw(st.integers(0, size - first)) for first, size in zip(low, shape, strict=True)
    )
    base = data.draw(st.integers(0, 5))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    local = whole[
        tuple(slice(first, first + size) for first, size in zip(low, lengths, strict=True))
    ]
    buffer = np.concatenate([np.full(base, -1), local.ravel()])

    view = StridedView(int(numbers.ravel()[0]), numbers.shape, _strides(numbers, shape))
    elements: dict[tuple[int, ...], int] = {}
    for box in held_boxes(view, shape, LocalBox(low, lengths, base, contiguous_strides(lengths))):
        for index in itertools.product(*map(range, box.lengths)):
            canonical = tuple(offset + i for offset, i in zip(box.offsets, index, strict=True))
            assert canonical not in elements
            elements[canonical] = buffer[
                box.start + sum(i * step for i, step in zip(index, box.strides, strict=True))
            ]

    held = set(local.ravel().tolist())
    assert elements == {
        index: number for index, number in np.ndenumerate(numbers) if number in held
    }


def _strides(numbers: np.ndarray, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distances of neighbours along each dim in the parameter.

    Numbers are positions in it.
    """
    steps = []
    for dim, size in enumerate(numbers.shape):
        first = np.moveaxis(numbers, dim, 0).reshape(size, -1)[:, 0]
        steps.append(int(first[1] - first[0]) if size > 1 else 1)
    return tuple(steps)


def test_rows_split_into_two_dims_are_refused() -> None:
    """Some conversions split heads so; a region of them need not be a region of the parameter."""
    with pytest.raises(
        ValueError, match=r"dim 0 of parameter shape \(6,\) holds several dims of the tensor"
    ):
        list(held_boxes(StridedView(0, (2, 3), (3, 1)), (6,), LocalBox((0,), (6,), 0, (1,))))
