"""Plans of a few tensors, with what they must be: relay buffers, buckets, and everything that cannot be planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.plan import Transfer, wire_dtype
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from tests.hybrid_engine.planning.cases import network_lower_bound, plan, whole


def sent_by_rank(transfers: Iterable[Transfer]) -> Counter[int]:
    sent: Counter[int] = Counter()
    for transfer in transfers:
        sent[transfer.src_rank] += transfer.nbytes
    return sent


def test_windows_that_overlap_are_cut() -> None:
    """Rank 1 needs rows 0 to 5, rank 2 rows 4 to 9: 4 and 5 come once, the others straight."""
    source = whole("t", (10, 3), 0, "src")
    windows = [(1, 0), (2, 4)]
    destination = Layout(
        {"t": (10, 3)},
        {BufferId(rank, "dst"): Buffer(18, "bfloat16") for rank, _ in windows},
        tuple(
            Shard(Region("t", (start, 0), (6, 3)), Place(BufferId(rank, "dst"), 0, (3, 1))) for rank, start in windows
        ),
    )
    result = plan(source, destination, ["a", "b", "b"], relaying_hosts="b")
    (bucket,) = result.buckets
    (relay,) = result.relays
    assert sorted((t.lengths, t.dst.buffer == relay) for t in bucket.transfers) == [
        ((6,), True),
        ((12,), False),
        ((12,), False),
    ]
    assert [(t.lengths, t.dst.offset, t.dst_rank) for t in bucket.fan_out] == [((6,), 12, 1), ((6,), 0, 2)]
    assert [result.bytes_by_rank[rank].received for rank in (1, 2)] == [36, 36]
    assert network_lower_bound(source, destination, ["a", "b", "b"]) == {"a": 0, "b": 60}


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "float32", "float32"),
    ],
)
def test_the_narrower_dtype_crosses_the_link(source: str, destination: str, expected: str) -> None:
    assert wire_dtype(source, destination) == expected


def test_only_groups_that_share_tensors_are_joined() -> None:
    """Groups of tensors that alternate still make buckets of their own."""
    layouts = [
        whole(f"t{number}", (4,), 0, f"b{number}", group="even" if number % 2 == 0 else "odd") for number in range(6)
    ]
    layout = Layout.merge(layouts)
    buckets = plan(layout, layout, ["a"], bucket_nbytes=1).buckets
    assert [bucket.groups for bucket in buckets] == [("even",), ("odd",)]
    assert [bucket.tensors for bucket in buckets] == [("t0", "t2", "t4"), ("t1", "t3", "t5")]
    shared = Layout.merge([layout, whole("t0", (4,), 0, "again", group="odd")])
    (bucket,) = plan(layout, shared, ["a"], bucket_nbytes=1).buckets
    assert bucket.tensors == ("t0", "t1", "t2", "t3", "t4", "t5")
    assert len(bucket.transfers) == 7


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
        {**source.tensors, "half": (10,), "beyond": (3,)},
        {**source.buffers, wrong: Buffer(2, "bfloat16"), BufferId(1, "s.half"): Buffer(5, "bfloat16")},
        (
            *source.shards,
            half,
            Shard(Region("beyond", (0,), (3,)), Place(wrong, 0, (1,))),
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
    ]
    findings = caught.value.findings
    for name, text in expected:
        assert any(name in finding and text in finding for finding in findings), (name, text, findings)
    # the overlapping buffer also has the wrong volume: 24 written of 24, so only the overlap is said of it
    assert len(findings) == len(expected), findings
    assert f"({len(findings)})" in str(caught.value)
