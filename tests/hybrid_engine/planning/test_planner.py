"""Plans of random layouts, carried out element by element and compared with brute force."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.planning.coalescing import coalesce
from hybrid_engine.planning.plan import Link, ReshardPlan
from hybrid_engine.records.layout import BufferId, Layout
from hybrid_engine.records.sides import Side
from tests.hybrid_engine.planning.cases import (
    NOT_WRITTEN,
    Case,
    box_transfers,
    carry_out,
    cases,
    elements_of,
    filled_buffers,
    itemsizes,
    network_lower_bound,
    plan,
    positions_of,
    wire_itemsizes,
)


def plan_of(case: Case) -> ReshardPlan:
    return plan(case.source, case.destination, case.hosts, case.bucket_nbytes, relaying_hosts=case.relaying)


Element = tuple[str, tuple[int, ...]]
"""Tensor and index."""


def held_by(layout: Layout) -> dict[Element, set[int]]:
    """The ranks that hold each element."""
    ranks: dict[Element, set[int]] = {}
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


@dataclass(frozen=True)
class Journey:
    """How one element came to one place: from `src` by `link`, maybe over a relay buffer on `relay_rank`."""

    element: Element
    src: int
    dst: int
    link: Link
    relay_rank: int | None = None


def journeys_of(result: ReshardPlan, case: Case) -> Iterator[Journey]:
    """Of every element that is written anywhere."""
    canonical = {
        (shard.place.buffer, position): (shard.region.tensor, index)
        for shard in case.destination.shards
        for index, position in elements_of(shard)
    }
    for bucket in result.buckets:
        came: dict[tuple[BufferId, int], int] = {}
        for transfer in bucket.transfers:
            for position in positions_of(transfer, transfer.dst).flat:
                key = transfer.dst.buffer, position
                if transfer.dst.buffer in result.relays:
                    assert transfer.link is Link.NETWORK
                    came[key] = transfer.src_rank
                else:
                    yield Journey(canonical[key], transfer.src_rank, transfer.dst_rank, transfer.link)
        for transfer in bucket.fan_out:
            assert transfer.link is (Link.SELF if transfer.src_rank == transfer.dst_rank else Link.HOST)
            pairs = zip(positions_of(transfer, transfer.src), positions_of(transfer, transfer.dst), strict=True)
            for src, dst in pairs:
                element, sender = canonical[transfer.dst.buffer, dst], came[transfer.src.buffer, src]
                yield Journey(element, sender, transfer.dst_rank, Link.NETWORK, transfer.src_rank)


@given(cases())
def test_elements_come_from_the_nearest_rank(case: Case) -> None:
    """Self before same host before anyone else, element by element; over a relay only from elsewhere."""
    holders = held_by(case.source)
    result = plan_of(case)
    for journey in journeys_of(result, case):
        src, dst, ranks = journey.src, journey.dst, holders[journey.element]
        same_host = case.hosts[src] == case.hosts[dst]
        assert src in ranks
        assert journey.link is (Link.SELF if src == dst else Link.HOST if same_host else Link.NETWORK)
        if dst in ranks:
            assert src == dst
        elif any(case.hosts[rank] == case.hosts[dst] for rank in ranks):
            assert same_host
        if journey.relay_rank is not None:
            assert case.hosts[journey.relay_rank] == case.hosts[dst]
            assert case.hosts[dst] in case.relaying
    for transfer in result.transfers():
        src = (result.relays | case.source.buffers)[transfer.src.buffer]
        dst = (result.relays | case.destination.buffers)[transfer.dst.buffer]
        assert transfer.nbytes == transfer.numel * min(src.itemsize, dst.itemsize), "the narrower crosses the link"


@given(cases())
def test_an_element_enters_a_host_once(case: Case) -> None:
    """Where its ranks relay: as often as it must, to a rank that needs it; elsewhere once for every place."""
    result, itemsize = plan_of(case), wire_itemsizes(case)
    holders, wanted = held_by(case.source), held_by(case.destination)
    entered: Counter[str] = Counter()
    for transfer in result.transfers():
        if transfer.link is Link.NETWORK:
            entered[case.hosts[transfer.dst_rank]] += transfer.nbytes
    least = {
        host: sum(
            itemsize[element[0]]
            for element, ranks in wanted.items()
            if any(case.hosts[rank] == host for rank in ranks)
            and all(case.hosts[rank] != host for rank in holders[element])
        )
        for host in dict.fromkeys(case.hosts)
    }
    assert network_lower_bound(case.source, case.destination, case.hosts) == least
    for host, nbytes in least.items():
        assert entered[host] == nbytes if host in case.relaying else entered[host] >= nbytes
    for journey in journeys_of(result, case):
        assert journey.relay_rank is None or journey.relay_rank in wanted[journey.element]


@given(cases())
def test_relay_buffers_belong_to_a_bucket_and_are_filled(case: Case) -> None:
    result = plan_of(case)
    filled_to: dict[BufferId, int] = {}
    for bucket in result.buckets:
        filled: Counter[BufferId] = Counter()
        readers: dict[BufferId, set[int]] = {}
        senders: dict[BufferId, set[int]] = {}
        for transfer in bucket.transfers:
            if transfer.dst.buffer in result.relays:
                filled[transfer.dst.buffer] += transfer.numel
                senders.setdefault(transfer.dst.buffer, set()).add(transfer.src_rank)
        for transfer in bucket.fan_out:
            readers.setdefault(transfer.src.buffer, set()).add(transfer.dst_rank)
        assert all(len(ranks) == 1 for ranks in senders.values())
        assert readers.keys() == senders.keys()
        for buffer_id, numel in filled.items():
            assert buffer_id not in filled_to, "in two buckets"
            filled_to[buffer_id] = numel
            assert buffer_id.rank in readers[buffer_id]
            assert result.relays[buffer_id].group == str(bucket.index)
    assert filled_to == {buffer_id: buffer.numel for buffer_id, buffer in result.relays.items()}
    assert all(buffer.exported for buffer in result.relays.values())


@given(cases())
def test_bytes_are_counted_and_least(case: Case) -> None:
    result, itemsize = plan_of(case), wire_itemsizes(case)
    holders = held_by(case.source)
    wanted: dict[int, Counter[Element]] = {}
    for shard in case.destination.shards:
        elements = ((shard.region.tensor, index) for index, _ in elements_of(shard))
        wanted.setdefault(shard.place.buffer.rank, Counter()).update(elements)
    assert result.bytes_by_rank.keys() == wanted.keys()
    for rank, elements in wanted.items():
        count = result.bytes_by_rank[rank]
        by_link = Counter()
        for transfer in itertools.chain.from_iterable(bucket.counted() for bucket in result.buckets):
            if transfer.dst_rank == rank:
                by_link[transfer.link] += transfer.nbytes
        assert (count.own, count.host, count.network) == tuple(by_link[link] for link in Link)
        least = sum(itemsize[element[0]] for element in elements if rank not in holders[element])
        total = sum(itemsize[element[0]] * times for element, times in elements.items())
        assert count.lower_bound == least
        if max(elements.values()) == 1:
            assert count.received == least
            assert count.own + count.received == total
        else:
            assert count.received >= least
            assert count.own + count.received <= total


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
    own = plan(case.source, case.destination, case.hosts, case.bucket_nbytes, rank=rank, relaying_hosts=case.relaying)
    assert (own.fingerprint, own.unread) == (everybody.fingerprint, everybody.unread)
    assert own.bytes_by_rank == {key: count for key, count in everybody.bytes_by_rank.items() if key == rank}
    assert own.buckets == tuple(bucket.of_rank(rank) for bucket in everybody.buckets)
    transfers = [each for bucket in own.buckets for each in (*bucket.transfers, *bucket.fan_out)]
    concerned = {place.buffer for each in transfers for place in (each.src, each.dst)} & everybody.relays.keys()
    assert own.relays.items() >= {buffer_id: everybody.relays[buffer_id] for buffer_id in concerned}.items()


@given(cases(), st.data())
def test_boxes_for_files_are_the_plans_before_they_are_coalesced(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.hosts) - 1))
    boxes = box_transfers(case.source, case.destination, case.hosts, rank)
    planned = plan(case.source, case.destination, case.hosts, rank=rank)
    assert coalesce(boxes) == coalesce(transfer for bucket in planned.buckets for transfer in bucket.transfers)
    for transfer in boxes:
        assert len(transfer.lengths) == len(case.destination.tensors[transfer.tensor])
        for place in (transfer.src, transfer.dst):
            assert len(place.strides) == len(transfer.lengths)


@given(cases())
def test_fingerprints_know_everything(case: Case) -> None:
    fingerprint = plan(case.source, case.destination, case.hosts).fingerprint
    relayed = plan(case.source, case.destination, case.hosts, relaying_hosts=case.hosts).fingerprint
    hosts = (*case.hosts[:-1], "another")
    assert relayed != fingerprint
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
    assert len({Side.split(each, len(hosts)).fingerprint for each in (layout, *others)}) == len(others) + 1


@given(cases())
def test_buckets_keep_groups_and_tensors_whole(case: Case) -> None:
    result = plan_of(case)
    buckets = result.buckets
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    group_of = {buffer_id: buffer.group for buffer_id, buffer in case.destination.buffers.items()}
    bucket_of_group = {group: bucket.index for bucket in buckets for group in bucket.groups}
    assert sum(len(bucket.groups) for bucket in buckets) == len(bucket_of_group), "a group is spread over two"
    assert bucket_of_group.keys() == set(group_of.values())
    freed = itemsizes(case.source)
    for bucket in buckets:
        received = Counter()
        for transfer in (*bucket.transfers, *bucket.fan_out):
            if transfer.dst.buffer in result.relays:
                continue
            assert bucket_of_group[group_of[transfer.dst.buffer]] == bucket.index
            received[transfer.dst_rank] += transfer.numel * case.destination.buffers[transfer.dst.buffer].itemsize
        held = Counter()
        for shard in case.source.shards:
            if shard.region.tensor in bucket.tensors:
                held[shard.place.buffer.rank] += shard.region.numel * freed[shard.region.tensor]
        assert bucket.nbytes == max(*received.values(), *held.values(), 0)
    for bucket in buckets[:-1]:
        assert bucket.nbytes >= case.bucket_nbytes, "closed too early"
    wanted = {shard.region.tensor for shard in case.destination.shards}
    assert sorted(tensor for bucket in buckets for tensor in bucket.tensors) == sorted(wanted)
    for bucket in buckets:
        named = {name for transfer in bucket.transfers for name in transfer.tensor.split(" … ")}
        assert named <= set(bucket.tensors)
