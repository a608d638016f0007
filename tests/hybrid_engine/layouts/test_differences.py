"""Layouts are compared by the elements that they hold, and a difference is said, not hidden."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.assembly import warn_of_differences
from hybrid_engine.layouts.differences import differences
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from tests.hybrid_engine.layouts.cases import DENSE

SHAPE = (3, 4)
BUFFER = BufferId(0, "buffer")


@st.composite
def boxes(draw: st.DrawFn) -> list[Region]:
    """Some boxes of a small matrix, which may overlap."""
    spans = [[(start, stop) for start in range(size) for stop in range(start + 1, size + 1)] for size in SHAPE]
    chosen = draw(st.lists(st.tuples(*map(st.sampled_from, spans)), max_size=4))
    return [Region("weight", (a, c), (b - a, d - c)) for (a, b), (c, d) in chosen]


def layout_of(regions: Iterable[Region]) -> Layout:
    shards = [Shard(region, Place(BUFFER, 0, (SHAPE[1], 1))) for region in regions]
    return Layout({"weight": SHAPE}, {BUFFER: Buffer(12, "float32", "")}, tuple(shards))


def elements(regions: Iterable[Region]) -> set[tuple[int, ...]]:
    return {element for region in regions for element in itertools.product(*map(range, region.offsets, region.ends))}


@given(boxes(), boxes())
def test_what_differs_differs_in_an_element(one: list[Region], other: list[Region]) -> None:
    expected = [] if elements(one) == elements(other) else ["weight"]
    assert differences(layout_of(one), layout_of(other)) == expected


def test_a_rank_that_holds_something_else_says_so(caplog: pytest.LogCaptureFixture) -> None:
    side = inference_side(table_for(DENSE), InferenceParallelism(2, tensor=2))
    own, others = side.layout_of(0), side.layout_of(1)
    lacking = replace(own, shards=own.shards[1:])
    with caplog.at_level(logging.WARNING, "hybrid_engine"):
        warn_of_differences(own, own, rank=0)
        assert not caplog.records
        warn_of_differences(own, lacking, rank=0)
        warn_of_differences(own, others, rank=1)
    missing, cut = (record.getMessage() for record in caplog.records)
    assert "rank 0: vLLM holds other parts of 1 tensors than layouts/inference.py computes" in missing
    assert f"e.g. {own.shards[0].region.tensor}: " in missing
    whole = {shard.region.tensor for shard in own.shards if shard.region.lengths == own.tensors[shard.region.tensor]}
    assert f"rank 1: vLLM holds other parts of {len(own.tensors) - len(whole)} tensors" in cut
