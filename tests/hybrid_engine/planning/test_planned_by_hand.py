"""Plans of a few tensors, with what they must be: who sends how much, what comes over relay buffers, which buckets."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest

from hybrid_engine.planning.plan import Link, Transfer, wire_dtype
from hybrid_engine.planning.planner import plan
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from tests.hybrid_engine.planning.cases import network_lower_bound, whole


def sent_by_rank(transfers: Iterable[Transfer]) -> Counter[int]:
    sent: Counter[int] = Counter()
    for transfer in transfers:
        sent[transfer.src_rank] += transfer.nbytes
    return sent


@pytest.mark.parametrize("num_readers", [1, 2, 4, 5])
def test_replicas_share_the_sending(num_readers: int) -> None:
    """Four ranks of one host hold everything; readers elsewhere ask one after another."""
    tensors = [f"t{number}" for number in range(12)]
    source = Layout.merge(whole(name, (8,), rank, name) for name in tensors for rank in range(4))
    readers = range(4, 4 + num_readers)
    destination = Layout.merge(whole(name, (8,), rank, name, group=name) for name in tensors for rank in readers)
    result = plan(source, destination, ["a"] * 4 + ["b"] * num_readers, bucket_nbytes=1)
    for last in range(1, len(result.buckets) + 1):  # at any time, not only in the end
        sent = sent_by_rank(itertools.chain.from_iterable(bucket.transfers for bucket in result.buckets[:last]))
        loads = [sent[rank] for rank in range(4)]
        assert max(loads) - min(loads) <= 16, "more than one transfer apart"


@pytest.mark.parametrize("num_readers", [2, 3])
def test_readers_take_turns_as_relay_ranks(num_readers: int) -> None:
    """Two ranks send to hosts of two or three that all want everything: everybody relays, and sends, an equal part."""
    tensors = [f"t{number}" for number in range(12)]
    hosts = ["a"] * 2 + [host for host in "bc" for _ in range(num_readers)]
    source = Layout.merge(whole(name, (8,), rank, name) for name in tensors for rank in range(2))
    readers = range(2, len(hosts))
    destination = Layout.merge(whole(name, (8,), rank, name, group=name) for name in tensors for rank in readers)
    result = plan(source, destination, hosts, relaying_hosts="bc")
    (bucket,) = result.buckets
    carried = Counter(transfer.dst_rank for transfer in bucket.transfers)
    assert carried == dict.fromkeys(readers, 12 // num_readers)
    assert sent_by_rank(bucket.transfers) == {0: 12 * 16, 1: 12 * 16}
    assert len(bucket.fan_out) == 2 * 12 * num_readers


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


def test_a_box_that_one_rank_wants_twice_comes_once() -> None:
    layouts = [whole("t", (4,), 1, name) for name in ("one", "two")]
    destination = Layout.merge(layouts)
    result = plan(whole("t", (4,), 0, "src"), destination, ["a", "b"], relaying_hosts="b")
    (bucket,) = result.buckets
    assert len(bucket.transfers) == 1
    assert [t.link for t in bucket.fan_out] == [Link.SELF] * 2
    count = result.bytes_by_rank[1]
    assert (count.own, count.host, count.network, count.lower_bound) == (0, 0, 8, 8)


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
