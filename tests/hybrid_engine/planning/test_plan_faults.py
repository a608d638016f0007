"""What cannot be planned is said in full."""

from __future__ import annotations

import pytest

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.planner import plan
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from tests.hybrid_engine.planning.cases import whole


def test_tensors_that_nobody_reads() -> None:
    source = Layout.merge([whole("read", (4,), 0, "read"), whole("tied", (4,), 0, "tied")])
    destination = whole("read", (4,), 0, "weight")
    result = plan(source, destination, ["a"], may_stay_unread=["tied", "unheard of"])
    assert result.unread == ("tied",)
    with pytest.raises(PlanError, match="tied: a training parameter that no inference rank reads"):
        plan(source, destination, ["a"])
    with pytest.raises(PlanError, match=r"tied: .* needed by rank 0, but no training rank holds them"):
        plan(destination, source, ["a"])


def test_every_fault_is_in_one_error() -> None:
    source = Layout.merge(
        [
            whole("sound", (4, 4), 0, "s.sound"),
            whole("reshaped", (4, 4), 0, "s.reshaped"),
            whole("flattened", (16,), 0, "s.flattened"),
            whole("never read", (4,), 0, "s.never"),
            whole("short", (8,), 0, "s.short"),
        ]
    )
    wrong = BufferId(1, "s.too small")
    half = Shard(Region("half", (0,), (5,)), Place(BufferId(1, "s.half"), 0, (1,)))
    source = Layout(
        {**source.tensors, "half": (10,), "beyond": (3,), "undeclared": (3,)},
        {**source.buffers, wrong: Buffer(2, "bfloat16"), BufferId(1, "s.half"): Buffer(5, "bfloat16")},
        (
            *source.shards,
            half,
            Shard(Region("beyond", (0,), (3,)), Place(wrong, 0, (1,))),
            Shard(Region("undeclared", (0,), (3,)), Place(BufferId(1, "s.undeclared"), 0, (1,))),
        ),
    )
    overlap = BufferId(1, "d.overlap")
    destination = Layout.merge(
        [
            whole("reshaped", (2, 8), 0, "d.reshaped"),
            whole("flattened", (4, 4), 0, "d.flattened"),
            whole("half", (10,), 1, "d.half"),
            whole("unknown", (7,), 1, "d.unknown"),
            Layout(
                {"sound": (4, 4), "short": (8,)},
                {overlap: Buffer(24, "bfloat16"), BufferId(1, "d.short"): Buffer(9, "bfloat16")},
                (
                    Shard(Region("sound", (0, 0), (4, 4)), Place(overlap, 0, (4, 1))),
                    Shard(Region("short", (0,), (8,)), Place(overlap, 12, (1,))),  # as much as the gap behind it
                    Shard(Region("short", (0,), (8,)), Place(BufferId(1, "d.short"), 0, (1,))),
                    Shard(Region("short", (4,), (8,)), Place(BufferId(1, "d.short"), 0, (1,))),
                ),
            ),
        ]
    )
    with pytest.raises(PlanError) as caught:
        plan(source, destination, ["a", "b"])
    expected = [
        ("undeclared", "buffer 's.undeclared' on rank 1 is not declared"),
        ("beyond", "elements [0, 2] of buffer 's.too small' on rank 1, which has 2"),
        ("short", "shard [(4,), (12,)) on rank 1 is outside shape (8,)"),
        ("'d.overlap' on rank 1", "element 12 is written more than once"),
        ("'d.short' on rank 1", "9 elements, but 8 are written and 0 are padding"),
        ("reshaped", "shape (4, 4) in training, (2, 8) in inference"),
        ("flattened", "shape (16,) in training, (4, 4) in inference"),
        ("half", "elements [(5,), (10,)) are needed by rank 1, but no training rank holds them"),
        ("unknown", "elements [(0,), (7,)) are needed by rank 1, but no training rank holds them"),
        ("never read", "a training parameter that no inference rank reads"),
        ("beyond", "a training parameter that no inference rank reads"),
        ("undeclared", "a training parameter that no inference rank reads"),
    ]
    findings = caught.value.findings
    for name, text in expected:
        assert any(name in finding and text in finding for finding in findings), (name, text, findings)
    # the overlapping buffer also has the wrong volume: 24 written of 24, so only the overlap is said of it
    assert len(findings) == len(expected), findings
    assert f"({len(findings)})" in str(caught.value)


def test_an_overlap_beside_a_gap_of_its_size_is_found() -> None:
    buffer_id = BufferId(0, "weight")
    layout = Layout(
        {"a": (4,), "b": (4,)},
        {buffer_id: Buffer(8, "bfloat16")},
        (
            Shard(Region("a", (0,), (4,)), Place(buffer_id, 0, (1,))),
            Shard(Region("b", (0,), (4,)), Place(buffer_id, 2, (1,))),
        ),
    )
    source = Layout.merge([whole("a", (4,), 0, "a"), whole("b", (4,), 0, "b")])
    with pytest.raises(PlanError, match="buffer 'weight' on rank 0: element 2 is written more than once"):
        plan(source, layout, ["a"])
