"""Checks of shards, buffers and layouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import PlanError
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides
from hybrid_engine.records.validation import layout_faults
from tests.hybrid_engine.planning.cases import Case, cases, elements_of, whole


def test_all_disagreements_of_ranks_are_named() -> None:
    first = whole("t", (4,), 0, "b")
    second = whole("t", (5,), 0, "b")
    with pytest.raises(PlanError) as caught:
        Layout.merge([first, second])
    assert "t: shape (4,) on one rank, (5,) on another" in str(caught.value)
    assert "described twice" in str(caught.value)
    assert len(caught.value.findings) == 2


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2)])
def test_an_invalid_extent_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="invalid interval"):
        Extent(start, stop)


def test_invalid_shards_and_buffers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"my\.tensor: 1 strides for 2 dims"):
        Shard(Region("my.tensor", (0, 0), (2, 2)), Place(BufferId(0, "b"), 0, (1,)))
    with pytest.raises(ValueError, match="unknown dtype 'int3'; known are float64"):
        Buffer(4, "int3")
    with pytest.raises(ValueError, match="padding must not be empty"):
        Buffer(4, "int8", padding=(Extent(2, 2),))


BUFFER = BufferId(3, "weight")


@st.composite
def layouts_of_one_buffer(draw: st.DrawFn) -> Layout:
    """Draw a buffer with random shards and padding, which need not fit."""
    tensors = {}
    shards = []
    for number in range(draw(st.integers(0, 3))):
        shape = draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
        dense = draw(st.permutations(contiguous_strides(shape)))
        anything = draw(st.tuples(*[st.integers(0, 6)] * len(shape)))
        strides = tuple(dense) if draw(st.booleans()) else anything
        tensors[f"t{number}"] = shape
        region = Region(f"t{number}", (0,) * len(shape), shape)
        shards.append(Shard(region, Place(BUFFER, draw(st.integers(0, 12)), strides)))
    numel = draw(st.sampled_from([sum(map(math.prod, tensors.values())), draw(st.integers(0, 24))]))
    padding = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, 12))
        padding.append(Extent(start, start + draw(st.integers(1, 4))))
    return Layout(
        tensors, {BUFFER: Buffer(numel, "float32", padding=tuple(padding))}, tuple(shards)
    )


@given(layouts_of_one_buffer())
def test_coverage_is_exact(layout: Layout) -> None:
    buffer = layout.buffers[BUFFER]
    counts = np.zeros(200, int)  # writes of each element, also beyond the buffer's end
    for shard in layout.shards:
        for _, position in elements_of(shard):
            counts[position] += 1
    inside = not counts[buffer.numel :].any()
    for extent in buffer.padding:
        counts[extent.start : extent.stop] += 1
    faults = layout_faults(layout, exact=True)
    covered_once = bool((counts[: buffer.numel] == 1).all())
    assert (faults == []) == (covered_once and not counts[buffer.numel :].any())
    assert all("'weight' on rank 3" in fault for fault in faults)
    if not counts[buffer.numel :].any():
        doubled = np.flatnonzero(counts > 1)
        named = [fault for fault in faults if "written more than once" in fault]
        assert len(named) == bool(doubled.size)
        assert all(f"element {doubled[0]} " in fault for fault in named)
    assert any(" of buffer " in fault for fault in layout_faults(layout, exact=False)) == (
        not inside
    )


@given(cases())
def test_valid_layouts_have_no_faults(case: Case) -> None:
    assert layout_faults(case.source, exact=False) == []
    assert layout_faults(case.destination, exact=True) == []


def test_negative_strides_within_the_buffer_are_accepted() -> None:
    shard = Shard(Region("t", (0,), (4,)), Place(BUFFER, 3, (-1,)))
    layout = Layout({"t": (4,)}, {BUFFER: Buffer(4, "int8")}, (shard,))
    assert layout_faults(layout, exact=True) == []
    below = Shard(Region("t", (0,), (4,)), Place(BUFFER, 2, (-1,)))
    (fault,) = layout_faults(Layout({"t": (4,)}, {BUFFER: Buffer(4, "int8")}, (below,)), exact=True)
    assert "elements [-1, 2]" in fault


def test_shards_of_unknown_tensors_and_buffers_are_faults() -> None:
    shards = (
        Shard(Region("unknown", (0,), (4,)), Place(BUFFER, 0, (1,))),
        Shard(Region("t", (2, 0), (3, 4)), Place(BUFFER, 0, (4, 1))),
        Shard(Region("t", (0,), (4,)), Place(BUFFER, 0, (1,))),
        Shard(Region("t", (0, 0), (4, 4)), Place(BufferId(3, "elsewhere"), 0, (4, 1))),
    )
    faults = layout_faults(Layout({"t": (4, 4)}, {BUFFER: Buffer(0, "int8")}, shards), exact=True)
    assert faults == [
        "unknown: rank 3 has a shard of it, but its layout does not declare the tensor",
        "t: shard [(2, 0), (5, 4)) on rank 3 is outside shape (4, 4)",
        "t: shard [(0,), (4,)) on rank 3 is outside shape (4, 4)",
        "t: its buffer 'elsewhere' on rank 3 is not declared",
    ]


def test_padding_beyond_the_end_does_not_cover_a_gap() -> None:
    buffer = Buffer(10, "int8", padding=(Extent(8, 13),))
    shard = Shard(Region("t", (0,), (5,)), Place(BUFFER, 0, (1,)))
    (fault,) = layout_faults(Layout({"t": (5,)}, {BUFFER: buffer}, (shard,)), exact=True)
    assert "padding [8, 13) reaches beyond its 10 elements" in fault


def test_only_finer_shapes_refine_a_layout() -> None:
    layout = Layout({"a": (4, 6), "b": (3,), "c": (2, 2)}, {})
    assert layout.refined({"a": (4, 3, 2), "d": (7,)}).tensors == {
        "a": (4, 3, 2),
        "b": (3,),
        "c": (2, 2),
    }
    with pytest.raises(PlanError) as caught:
        layout.refined({"a": (6, 4), "b": (1, 3), "c": (5,)})
    assert len(caught.value.findings) == 2
    assert "a: shape (4, 6) on one side, (6, 4) on the other" in caught.value.findings
