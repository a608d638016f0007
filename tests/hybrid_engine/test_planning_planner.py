"""Plans of random layouts, carried out element by element and compared with brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.planning.plan import Link, ReshardPlan, Transfer
from hybrid_engine.planning.planner import plan
from hybrid_engine.planning.regions import Region, contiguous_strides
from tests.hybrid_engine.planning_cases import NOT_WRITTEN, Case, carry_out, cases, elements_of, filled_buffers


def plan_of(case: Case) -> ReshardPlan:
    return plan(case.source, case.destination, case.hosts, case.bucket_nbytes)


def held_by(layout: Layout) -> dict[tuple[str, tuple[int, ...]], set[int]]:
    """(tensor, index) -> the ranks that hold the element."""
    ranks: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for shard in layout.shards:
        for index, _ in elements_of(shard):
            ranks.setdefault((shard.region.tensor, index), set()).add(shard.place.buffer.rank)
    return ranks


@given(cases())
def test_every_element_arrives_exactly_once(case: Case) -> None:
    found, counts = carry_out(plan_of(case), case)
    for buffer_id, expected in filled_buffers(case.destination).items():
        np.testing.assert_array_equal(found[buffer_id], expected)
        np.testing.assert_array_equal(counts[buffer_id], (expected != NOT_WRITTEN).astype(int))


@given(cases())
def test_elements_come_from_the_nearest_rank(case: Case) -> None:
    """Self before same host before anyone else, element by element."""
    holders = held_by(case.source)
    canonical = {
        (shard.place.buffer, position): (shard.region.tensor, index)
        for shard in case.destination.shards
        for index, position in elements_of(shard)
    }
    for transfer in plan_of(case).transfers():
        src, dst = transfer.src_rank, transfer.dst_rank
        same_host = case.hosts[src] == case.hosts[dst]
        assert transfer.link is (Link.SELF if src == dst else Link.HOST if same_host else Link.NETWORK)
        assert transfer.nbytes == transfer.numel * 2  # bfloat16 crosses the link, whatever the destination stores
        whole = Shard(Region(transfer.tensor, (0,) * len(transfer.lengths), transfer.lengths), transfer.dst)
        for _, position in elements_of(whole):
            ranks = holders[canonical[transfer.dst.buffer, position]]
            if dst in ranks:
                assert src == dst
            elif any(case.hosts[rank] == case.hosts[dst] for rank in ranks):
                assert same_host


@given(cases())
def test_bytes_are_counted_and_least(case: Case) -> None:
    result = plan_of(case)
    holders = held_by(case.source)
    wanted: dict[int, Counter[tuple[str, tuple[int, ...]]]] = {}
    for shard in case.destination.shards:
        elements = ((shard.region.tensor, index) for index, _ in elements_of(shard))
        wanted.setdefault(shard.place.buffer.rank, Counter()).update(elements)
    assert result.bytes_by_rank.keys() == wanted.keys()
    for rank, elements in wanted.items():
        count = result.bytes_by_rank[rank]
        by_link = Counter()
        for transfer in result.transfers():
            if transfer.dst_rank == rank:
                by_link[transfer.link] += transfer.nbytes
        assert (count.own, count.host, count.network) == tuple(by_link[link] for link in Link)
        assert count.least == 2 * sum(rank not in holders[element] for element in elements)
        if max(elements.values()) == 1:
            assert count.received == count.least
        else:
            assert count.received >= count.least
        assert count.own + count.received == 2 * elements.total()


@given(cases(), st.randoms(use_true_random=False))
def test_plans_do_not_depend_on_the_order_of_records(case: Case, shuffler: random.Random) -> None:
    def shuffled(layout: Layout) -> Layout:
        shards, buffers = list(layout.shards), list(layout.buffers.items())
        shuffler.shuffle(shards)
        shuffler.shuffle(buffers)
        return Layout(layout.tensors, dict(buffers), tuple(shards))

    again = replace(case, source=shuffled(case.source), destination=shuffled(case.destination))
    assert plan_of(case) == plan_of(again)


@given(cases(), st.data())
def test_a_ranks_plan_is_its_part_of_everybodys(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.hosts) - 1))
    everybody = plan_of(case)
    own = plan(case.source, case.destination, case.hosts, case.bucket_nbytes, rank=rank)
    assert (own.fingerprint, own.unread) == (everybody.fingerprint, everybody.unread)
    assert own.bytes_by_rank == {key: count for key, count in everybody.bytes_by_rank.items() if key == rank}
    assert own.buckets == tuple(
        replace(bucket, transfers=tuple(each for each in bucket.transfers if rank in (each.src_rank, each.dst_rank)))
        for bucket in everybody.buckets
    )


@given(cases())
def test_fingerprints_know_everything(case: Case) -> None:
    fingerprint = plan_of(case).fingerprint
    hosts = (*case.hosts[:-1], "another")
    assert plan(case.source, case.destination, hosts).fingerprint != fingerprint
    layout = case.destination
    buffer_id = min(layout.buffers)
    moved = replace(layout.shards[0], place=replace(layout.shards[0].place, offset=10**6))
    others = [
        replace(layout, shards=(moved, *layout.shards[1:])),
        replace(layout, shards=layout.shards[1:]),
        replace(layout, tensors={**layout.tensors, "more": (2,)}),
        replace(layout, tensors={"more": (2,), **layout.tensors}),
        replace(layout, buffers={**layout.buffers, buffer_id: replace(layout.buffers[buffer_id], dtype="int8")}),
        replace(layout, buffers={**layout.buffers, buffer_id: replace(layout.buffers[buffer_id], group="other")}),
    ]
    assert len({layout.fingerprint(), *(other.fingerprint() for other in others)}) == len(others) + 1


@given(cases())
def test_buckets_keep_groups_and_tensors_whole(case: Case) -> None:
    buckets = plan_of(case).buckets
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    group_of = {buffer_id: buffer.group for buffer_id, buffer in case.destination.buffers.items()}
    bucket_of_group = {group: bucket.index for bucket in buckets for group in bucket.groups}
    assert sum(len(bucket.groups) for bucket in buckets) == len(bucket_of_group), "a group is spread over two"
    assert bucket_of_group.keys() == set(group_of.values())
    itemsize = next(iter(case.destination.buffers.values())).itemsize
    for bucket in buckets:
        received = Counter()
        for transfer in bucket.transfers:
            assert bucket_of_group[group_of[transfer.dst.buffer]] == bucket.index
            received[transfer.dst_rank] += transfer.numel * itemsize
        held = Counter()
        for shard in case.source.shards:
            if shard.region.tensor in bucket.tensors:
                held[shard.place.buffer.rank] += shard.region.numel * 2  # bfloat16
        assert bucket.nbytes == max(*received.values(), *held.values(), 0)
    for bucket in buckets[:-1]:
        assert bucket.nbytes >= case.bucket_nbytes, "closed too early"
    wanted = {shard.region.tensor for shard in case.destination.shards}
    assert sorted(tensor for bucket in buckets for tensor in bucket.tensors) == sorted(wanted)
    assert all(transfer.tensor in bucket.tensors for bucket in buckets for transfer in bucket.transfers)


# -- made by hand --------------------------------------------------------------------------------------------------


def whole(tensor: str, shape: tuple[int, ...], rank: int, name: str, group: str = "") -> Layout:
    """One tensor in a buffer of its own."""
    buffer_id = BufferId(rank, name)
    shard = Shard(Region(tensor, (0,) * len(shape), shape), Place(buffer_id, 0, contiguous_strides(shape)))
    return Layout({tensor: shape}, {buffer_id: Buffer(math.prod(shape), "bfloat16", group)}, (shard,))


def sent_by_rank(transfers: itertools.chain[Transfer]) -> Counter[int]:
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


def test_only_groups_that_share_tensors_are_joined() -> None:
    """Groups of tensors that alternate still make buckets of their own."""
    layouts = [
        whole(f"t{number}", (4,), 0, f"b{number}", group="even" if number % 2 == 0 else "odd") for number in range(6)
    ]
    layout = Layout.merge(layouts)
    buckets = plan(layout, layout, ["a"], bucket_nbytes=1).buckets
    assert [bucket.groups for bucket in buckets] == [("even",), ("odd",)]
    assert [[t.tensor for t in bucket.transfers] for bucket in buckets] == [["t0", "t2", "t4"], ["t1", "t3", "t5"]]
    shared = Layout.merge([layout, whole("t0", (4,), 0, "again", group="odd")])
    (bucket,) = plan(layout, shared, ["a"], bucket_nbytes=1).buckets
    assert [t.tensor for t in bucket.transfers] == ["t0", "t0", "t1", "t2", "t3", "t4", "t5"]


def test_tensors_that_nobody_reads() -> None:
    source = Layout.merge([whole("read", (4,), 0, "read"), whole("tied", (4,), 0, "tied")])
    destination = whole("read", (4,), 0, "weight")
    result = plan(source, destination, ["a"], may_stay_unread=["tied", "unheard of"])
    assert result.unread == ("tied",)
    with pytest.raises(PlanError, match="tied: a training parameter that no inference rank reads"):
        plan(source, destination, ["a"])
    with pytest.raises(PlanError, match=r"'tied' on rank 0, but no training rank holds them"):
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
        ("short", "shard [(4,), (12,)) on rank 1 lies outside of shape (8,)"),
        ("'d.overlap' on rank 1", "element 12 is written more than once"),
        ("'d.short' on rank 1", "9 elements, but 8 are written and 0 are padding"),
        ("reshaped", "shape (4, 4) in training, (2, 8) in inference"),
        ("flattened", "shape (16,) in training, (4, 4) in inference"),
        ("half", "elements [(5,), (10,)) are wanted by 'd.half' on rank 1, but no training rank holds them"),
        ("unknown", "elements [(0,), (7,)) are wanted by 'd.unknown' on rank 1, but no training rank holds them"),
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


def test_ranks_that_disagree_are_all_named() -> None:
    one, other = whole("t", (4,), 0, "b"), whole("t", (5,), 0, "b")
    with pytest.raises(PlanError) as caught:
        Layout.merge([one, other])
    assert "t: shape (4,) on one rank, (5,) on another" in str(caught.value)
    assert "described twice" in str(caught.value) and len(caught.value.findings) == 2


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2)])
def test_an_extent_is_an_interval(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="is no interval"):
        Extent(start, stop)


def test_records_and_buffers_check_themselves() -> None:
    with pytest.raises(ValueError, match=r"my\.tensor: 1 strides for 2 dims"):
        Shard(Region("my.tensor", (0, 0), (2, 2)), Place(BufferId(0, "b"), 0, (1,)))
    with pytest.raises(ValueError, match="'int3' is not one of float64"):
        Buffer(4, "int3")
    with pytest.raises(ValueError, match="is empty; leave it out"):
        Buffer(4, "int8", padding=(Extent(2, 2),))
