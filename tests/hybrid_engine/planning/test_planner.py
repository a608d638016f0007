"""Plans of random layouts, executed element by element and compared with brute force."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.coalescing import coalesce
from hybrid_engine.planning.plan import Link, ReshardPlan, Transfer, rounding_faults, wire_dtype
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.planning.routes import HostIngress, Hosts, Routes
from hybrid_engine.planning.tensor_classes import TensorClass
from hybrid_engine.records.holdings import BoxOwners, TensorOwners, groups_of_columns
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from tests.hybrid_engine.planning.cases import (
    NOT_WRITTEN,
    Case,
    box_transfers,
    bytes_read,
    cases,
    elements_of,
    filled_buffers,
    itemsizes,
    network_lower_bound,
    plan,
    positions_of,
    run_plan,
    whole,
    wire_itemsizes,
)


def plan_of(case: Case, rank: int | None = None) -> ReshardPlan:
    keys = {"rank": rank, "relaying_hosts": case.relaying, "devices": case.devices}
    return plan(case.source, case.destination, case.hosts, case.bucket_nbytes, **keys)


Element = tuple[str, tuple[int, ...]]
"""Tensor name and index."""


def ranks_by_element(layout: Layout) -> dict[Element, set[int]]:
    ranks: dict[Element, set[int]] = {}
    for shard in layout.shards:
        for index, _ in elements_of(shard):
            ranks.setdefault((shard.region.tensor, index), set()).add(shard.place.buffer.rank)
    return ranks


@given(cases())
def test_every_element_arrives_exactly_once(case: Case) -> None:
    contents, counts = run_plan(plan_of(case), case)
    for buffer_id, expected in filled_buffers(case.destination).items():
        np.testing.assert_array_equal(contents[buffer_id], expected)
        np.testing.assert_array_equal(counts[buffer_id], (expected != NOT_WRITTEN).astype(int))


@dataclass(frozen=True)
class Journey:
    """Path of one element to one place: from `src` by `link`, optionally through a relay buffer."""

    element: Element
    src: int
    dst: int
    link: Link
    relay_rank: int | None = None


def journeys_of(result: ReshardPlan, case: Case) -> Iterator[Journey]:
    canonical = {
        (shard.place.buffer, position): (shard.region.tensor, index)
        for shard in case.destination.shards
        for index, position in elements_of(shard)
    }
    for bucket in result.buckets:
        senders: dict[tuple[BufferId, int], int] = {}
        for transfer in bucket.transfers:
            for position in positions_of(transfer, transfer.dst).flat:
                key = transfer.dst.buffer, position
                if transfer.dst.buffer in result.relays:
                    assert transfer.link is Link.NETWORK
                    senders[key] = transfer.src_rank
                else:
                    yield Journey(
                        canonical[key], transfer.src_rank, transfer.dst_rank, transfer.link
                    )
        for transfer in bucket.fan_out:
            assert transfer.link is (
                Link.SELF if transfer.src_rank == transfer.dst_rank else Link.HOST
            )
            pairs = zip(
                positions_of(transfer, transfer.src),
                positions_of(transfer, transfer.dst),
                strict=True,
            )
            for src, dst in pairs:
                element = canonical[transfer.dst.buffer, dst]
                sender = senders[transfer.src.buffer, src]
                yield Journey(element, sender, transfer.dst_rank, Link.NETWORK, transfer.src_rank)


@given(cases())
def test_elements_come_from_the_nearest_rank_and_enter_a_host_once(case: Case) -> None:
    """Prefer self, then the device, then the host. Relays serve only elements of other hosts.

    A relaying host receives the minimum; other hosts may receive an element several times.
    """
    holders = ranks_by_element(case.source)
    wanted = ranks_by_element(case.destination)
    itemsize = wire_itemsizes(case)
    result = plan_of(case)
    for journey in journeys_of(result, case):
        src = journey.src
        dst = journey.dst
        ranks = holders[journey.element]
        same_host = case.hosts[src] == case.hosts[dst]
        same_device = case.share_a_device(src, dst)
        assert src in ranks
        if src == dst:
            assert journey.link is Link.SELF
        elif same_device:
            assert journey.link is Link.DEVICE
        else:
            assert journey.link is (Link.HOST if same_host else Link.NETWORK)
        if dst in ranks:
            assert src == dst
        elif any(case.share_a_device(rank, dst) for rank in ranks):
            assert same_device
        elif any(case.hosts[rank] == case.hosts[dst] for rank in ranks):
            assert same_host
        if journey.relay_rank is not None:
            assert case.hosts[journey.relay_rank] == case.hosts[dst]
            assert case.hosts[dst] in case.relaying
            assert journey.relay_rank in wanted[journey.element]
    entered: Counter[str] = Counter()
    for transfer in result.transfers():
        src = (result.relays | case.source.buffers)[transfer.src.buffer]
        dst = (result.relays | case.destination.buffers)[transfer.dst.buffer]
        assert transfer.nbytes == transfer.numel * min(src.itemsize, dst.itemsize)  # the narrower
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
            assert buffer_id not in filled_to, "relay buffer is in two buckets"
            filled_to[buffer_id] = numel
            assert buffer_id.rank in readers[buffer_id]
            assert result.relays[buffer_id].group == str(bucket.index)
    assert filled_to == {buffer_id: buffer.numel for buffer_id, buffer in result.relays.items()}
    assert all(buffer.exported for buffer in result.relays.values())


@given(cases())
def test_counted_bytes_match_the_transfers_and_the_lower_bound(case: Case) -> None:
    result = plan_of(case)
    itemsize = wire_itemsizes(case)
    holders = ranks_by_element(case.source)
    wanted: dict[int, Counter[Element]] = {}
    for shard in case.destination.shards:
        elements = ((shard.region.tensor, index) for index, _ in elements_of(shard))
        wanted.setdefault(shard.place.buffer.rank, Counter()).update(elements)
    assert bytes_read(result).keys() == wanted.keys()
    for rank, elements in wanted.items():
        count = bytes_read(result)[rank]
        by_link = Counter()
        for transfer in itertools.chain.from_iterable(
            bucket.counted() for bucket in result.buckets
        ):
            if transfer.dst_rank == rank:
                by_link[transfer.link] += transfer.nbytes
        assert count.device == by_link[Link.SELF] + by_link[Link.DEVICE]
        assert (count.host, count.network) == (by_link[Link.HOST], by_link[Link.NETWORK])
        on_device = {other for other in range(len(case.hosts)) if case.share_a_device(other, rank)}
        least = sum(
            itemsize[element[0]] for element in elements if not on_device & {*holders[element]}
        )
        total = sum(itemsize[element[0]] * times for element, times in elements.items())
        assert count.lower_bound == least
        if max(elements.values()) == 1:
            assert count.received == least
            assert count.device + count.received == total
        else:
            assert count.received >= least
            assert count.device + count.received <= total


def test_staging_holds_the_messages_of_two_buckets() -> None:
    sizes = {"a": 5, "b": 6, "c": 7}
    sides = [
        Layout.merge(whole(name, (numel,), rank, name, name) for name, numel in sizes.items())
        for rank in (0, 1)
    ]
    result = plan(*sides, "xy", 1)
    assert [staging_nbytes(result.buckets, result.relays, rank) for rank in (0, 1)] == [
        2 * (6 + 7)
    ] * 2
    parts = ((0, "0", 5), (0, "0", 6), (0, "1", 3), (0, "2", 4), (1, "0", 9))
    relays = {BufferId(rank, f"{n}"): Buffer(n, "bfloat16", bucket) for rank, bucket, n in parts}
    assert staging_nbytes(result.buckets, relays, 0) == 2 * (6 + 7) + 2 * (5 + 6)


@given(cases(), st.randoms(use_true_random=False))
def test_plans_do_not_depend_on_the_order_of_records(case: Case, shuffler: random.Random) -> None:
    def shuffled(layout: Layout) -> Layout:
        shards = list(layout.shards)
        buffers = list(layout.buffers.items())
        shuffler.shuffle(shards)
        shuffler.shuffle(buffers)
        return Layout(layout.tensors, dict(buffers), tuple(shards))

    again = replace(case, source=shuffled(case.source), destination=shuffled(case.destination))
    assert plan_of(case) == plan_of(again)


@given(cases(), st.data())
def test_a_ranks_plan_is_its_part_of_the_full_plan(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.hosts) - 1))
    full = plan_of(case)
    part = plan_of(case, rank)
    assert (part.fingerprint, part.unread) == (full.fingerprint, full.unread)
    assert bytes_read(part) == {
        key: count for key, count in bytes_read(full).items() if key == rank
    }
    assert part.buckets == tuple(bucket.of_rank(rank) for bucket in full.buckets)
    used: set[BufferId] = set()
    for bucket in part.buckets:
        for transfer in (*bucket.transfers, *bucket.fan_out):
            used |= {transfer.src.buffer, transfer.dst.buffer}
    relays = {buffer_id: full.relays[buffer_id] for buffer_id in used & full.relays.keys()}
    assert part.relays.items() >= relays.items()


@given(cases())
def test_fingerprints_depend_on_every_input(case: Case) -> None:
    def fingerprint_of(hosts: Sequence[str] = case.hosts, **settings: Any) -> str:
        return plan(case.source, case.destination, hosts, **settings).fingerprint

    fingerprint = fingerprint_of()
    hosts = (*case.hosts[:-1], "another")
    assert fingerprint_of(devices=[str(rank) for rank in range(len(hosts))]) == fingerprint
    if len(case.hosts) > len(set(case.hosts)):  # ranks of a host can share a device
        assert fingerprint_of(devices=["0"] * len(hosts)) != fingerprint
    assert fingerprint_of(relaying_hosts=case.hosts) != fingerprint
    assert fingerprint_of(hosts) != fingerprint
    layout = case.destination
    buffer_id, buffer = min(layout.buffers.items())
    first, *others = layout.shards
    moved = replace(first, place=replace(first.place, offset=10**6))
    retyped = structs.replace(buffer, dtype="int8")
    regrouped = structs.replace(buffer, group="other")
    variants = [
        replace(layout, shards=(moved, *others)),
        replace(layout, shards=tuple(others)),
        replace(layout, tensors={**layout.tensors, "more": (2,)}),
        replace(layout, tensors={"more": (2,), **layout.tensors}),
        replace(layout, buffers={**layout.buffers, buffer_id: retyped}),
        replace(layout, buffers={**layout.buffers, buffer_id: regrouped}),
    ]
    fingerprints = {Side.split(variant, len(hosts)).fingerprint for variant in (layout, *variants)}
    assert len(fingerprints) == len(variants) + 1


SOURCE = BufferId(0, "source")
DESTINATION = BufferId(1, "destination")


@given(cases())
def test_buckets_keep_groups_and_tensors_whole(case: Case) -> None:
    result = plan_of(case)
    buckets = result.buckets
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    group_of = {buffer_id: buffer.group for buffer_id, buffer in case.destination.buffers.items()}
    bucket_of_group = {group: bucket.index for bucket in buckets for group in bucket.groups}
    assert sum(len(bucket.groups) for bucket in buckets) == len(bucket_of_group), (
        "a group is in two buckets"
    )
    assert bucket_of_group.keys() == set(group_of.values())
    freed = itemsizes(case.source)
    for bucket in buckets:
        received = Counter()
        for transfer in (*bucket.transfers, *bucket.fan_out):
            if transfer.dst.buffer in result.relays:
                continue
            assert bucket_of_group[group_of[transfer.dst.buffer]] == bucket.index
            received[transfer.dst_rank] += (
                transfer.numel * case.destination.buffers[transfer.dst.buffer].itemsize
            )
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
        assert coalesce(bucket.transfers) == list(bucket.transfers), (
            "not coalesced as far as it can"
        )
        assert coalesce(bucket.fan_out) == list(bucket.fan_out)


@given(cases())
def test_box_transfers_are_coalesced_by_pairs_to_the_plan(case: Case) -> None:
    """Both ends derive the same transfers, as their plans share only those."""

    def between(transfers: Iterable[Transfer], pair: tuple[int, int]) -> list[Transfer]:
        return [
            transfer for transfer in transfers if (transfer.src_rank, transfer.dst_rank) == pair
        ]

    by_rank = [
        box_transfers(case.source, case.destination, case.hosts, rank)
        for rank in range(len(case.hosts))
    ]
    for rank, boxes in enumerate(by_rank):
        planned = plan(case.source, case.destination, case.hosts, rank=rank)
        assert coalesce(boxes) == coalesce(
            transfer for bucket in planned.buckets for transfer in bucket.transfers
        )
        for transfer in boxes:
            assert len(transfer.lengths) == len(case.destination.tensors[transfer.tensor])
            for place in (transfer.src, transfer.dst):
                assert len(place.strides) == len(transfer.lengths)
    boxes = list(dict.fromkeys(itertools.chain(*by_rank)))  # both ranks of a pair have its boxes
    coalesced = coalesce(boxes)
    assert sum(transfer.nbytes for transfer in coalesced) == sum(box.nbytes for box in boxes)
    for transfer in coalesced:
        assert min((*transfer.src.strides, *transfer.dst.strides), default=0) >= 0
    for pair in {(box.src_rank, box.dst_rank) for box in boxes}:
        assert coalesce(between(boxes, pair)) == between(coalesced, pair)


def box(
    tensor: str, lengths: tuple[int, ...], src: int, dst: int, src_strides: tuple[int, ...]
) -> Transfer:
    strides = (lengths[1], 1)
    src_place = Place(SOURCE, src, src_strides)
    dst_place = Place(DESTINATION, dst, strides)
    return Transfer(tensor, lengths, src_place, dst_place, 2 * lengths[0] * lengths[1], Link.HOST)


def test_experts_of_a_layer_become_one_copy() -> None:
    experts = [box(f"experts.{e}.down", (4, 8), 100 * e, 32 * e, (8, 1)) for e in range(6)]
    (transfer,) = coalesce(experts)
    assert transfer.lengths == (6, 32)
    assert transfer.src.strides == (100, 1)
    assert transfer.dst.strides == (32, 1)
    assert transfer.tensor == "experts.0.down … experts.5.down"


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ([(50, 0), (0, 16)], [(16,), (16,)]),  # backwards through the source
        ([(0, 0), (0, 16)], [(2, 16)]),
        ([(0, 0), (90, 16)], [(2, 16)]),
        ([(0, 0), (90, 16), (130, 80), (170, 144)], [(16,), (3, 16)]),
        ([(0, 0), (90, 16), (130, 80), (220, 96)], [(2, 2, 16)]),
    ],
)
def test_boxes_at_regular_distances_are_coalesced(
    offsets: list[tuple[int, int]], lengths: list[tuple[int, ...]]
) -> None:
    boxes = [box(str(n), (2, 8), src, dst, (8, 1)) for n, (src, dst) in enumerate(offsets)]
    assert [transfer.lengths for transfer in coalesce(boxes)] == lengths


def owners_of(layout: Layout, tensor: str) -> TensorOwners:
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for shard in layout.shards_by_tensor()[tensor]:
        box = shard.region.offsets, shard.region.lengths
        by_box.setdefault(box, []).append(shard.place.buffer.rank)
    return tuple(BoxOwners(*box, np.array(ranks)) for box, ranks in sorted(by_box.items()))


@given(cases(), st.integers(0, 50), st.integers(1, 9))
def test_holders_of_a_box_send_equal_shares(case: Case, first: int, num_tensors: int) -> None:
    """Shares are equal over any number of tensors of a class, and over each link."""
    for tensor in case.destination.tensors:
        sources = owners_of(case.source, tensor)
        tensors = TensorClass(
            sources, owners_of(case.destination, tensor), (tensor,), first, ("int8",)
        )
        routes = Routes(tensors, Hosts(case.hosts, case.relaying, case.devices))
        places = {
            Link.HOST: case.hosts,
            Link.DEVICE: [*zip(case.hosts, case.devices, strict=False)],
        }
        received: Counter[tuple[int, Link, object]] = Counter()
        sent: Counter[tuple[int, Link, object, int]] = Counter()
        for receivers in routes.receivers:
            for part in {part.source: part for part in receivers.parts}.values():
                for index in range(num_tensors):
                    senders = routes.senders(receivers, part, index)
                    for dst, src in zip(receivers.ranks.tolist(), senders.tolist(), strict=True):
                        place = places[part.link][dst] if part.link in places else None
                        received[part.source, part.link, place] += part.link is not Link.SELF
                        sent[part.source, part.link, place, src] += 1
        # all boxes of a source have the same sender to a host
        by_destination: dict[tuple[int, tuple[int, ...]], HostIngress] = {}
        for ingress in routes.ingress:
            by_destination.setdefault((ingress.source, tuple(ingress.positions.tolist())), ingress)
        for (number, _), ingress in by_destination.items():
            for index in range(num_tensors):
                for src in routes.ingress_senders(ingress, index).tolist():
                    received[number, Link.NETWORK, None] += 1
                    sent[number, Link.NETWORK, None, src] += 1
        for (number, link, place), count in received.items():
            ranks = set(sources[number].ranks.tolist())
            holders = [rank for rank in ranks if place is None or places[link][rank] == place]
            shares = (
                [sent[number, link, place, rank] for rank in holders]
                if link is not Link.SELF
                else []
            )
            assert sum(shares) == count
            assert max(shares, default=0) - min(shares, default=0) <= 1


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), max_size=20))
def test_equal_columns_form_one_group(rows: list[list[bool]]) -> None:
    groups = groups_of_columns([np.array(row) for row in rows], 7)
    columns = {tuple(row[number] for row in rows) for number in range(7)}
    assert len(groups) == len(columns)
    assert sorted(index for group in groups for index in group.tolist()) == list(range(7))
    for group in groups:
        assert group.tolist() == sorted(group.tolist())
        assert len({tuple(row[number] for row in rows) for number in group}) == 1


def test_overlapping_windows_are_relayed() -> None:
    """Rank 1 needs rows 0 to 5, rank 2 rows 4 to 9: the host receives rows 4 and 5 once."""
    source = whole("t", (10, 3), 0, "src")
    windows = [(1, 0), (2, 4)]
    destination = Layout(
        {"t": (10, 3)},
        {BufferId(rank, "dst"): Buffer(18, "bfloat16") for rank, _ in windows},
        tuple(
            Shard(Region("t", (start, 0), (6, 3)), Place(BufferId(rank, "dst"), 0, (3, 1)))
            for rank, start in windows
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
    assert [(t.lengths, t.dst.offset, t.dst_rank) for t in bucket.fan_out] == [
        ((6,), 12, 1),
        ((6,), 0, 2),
    ]
    assert [bytes_read(result)[rank].received for rank in (1, 2)] == [36, 36]
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
    """Groups of alternating tensors still get separate buckets."""
    layouts = [
        whole(f"t{number}", (4,), 0, f"b{number}", group="even" if number % 2 == 0 else "odd")
        for number in range(6)
    ]
    layout = Layout.merge(layouts)
    buckets = plan(layout, layout, ["a"], bucket_nbytes=1).buckets
    assert [bucket.groups for bucket in buckets] == [("even",), ("odd",)]
    assert [bucket.tensors for bucket in buckets] == [("t0", "t2", "t4"), ("t1", "t3", "t5")]
    shared = Layout.merge([layout, whole("t0", (4,), 0, "again", group="odd")])
    (bucket,) = plan(layout, shared, ["a"], bucket_nbytes=1).buckets
    assert bucket.tensors == ("t0", "t1", "t2", "t3", "t4", "t5")
    assert len(bucket.transfers) == 7


def test_unread_tensors_must_be_allowed() -> None:
    source = Layout.merge([whole("read", (4,), 0, "read"), whole("tied", (4,), 0, "tied")])
    destination = whole("read", (4,), 0, "weight")
    result = plan(source, destination, ["a"], may_stay_unread=["tied", "unheard of"])
    assert result.unread == ("tied",)
    with pytest.raises(PlanError, match="tied: a training parameter that no inference rank reads"):
        plan(source, destination, ["a"])
    with pytest.raises(
        PlanError, match=r"tied: .* needed by rank 0, but no training rank holds them"
    ):
        plan(destination, source, ["a"])


def test_all_faults_are_reported_at_once() -> None:
    """records/test_layout.py has the faults of a single layout."""
    half = Shard(Region("half", (0,), (5,)), Place(BufferId(1, "s.half"), 0, (1,)))
    source = Layout.merge(
        [
            whole("sound", (4, 4), 0, "s.sound"),
            whole("reshaped", (4, 4), 0, "s.reshaped"),
            whole("never read", (4,), 0, "s.never"),
            Layout({"half": (10,)}, {BufferId(1, "s.half"): Buffer(5, "bfloat16")}, (half,)),
        ]
    )
    gap = {BufferId(1, "d.sound"): Buffer(17, "bfloat16")}
    sound = Shard(Region("sound", (0, 0), (4, 4)), Place(BufferId(1, "d.sound"), 0, (4, 1)))
    destination = Layout.merge(
        [
            whole("reshaped", (2, 8), 0, "d.reshaped"),
            whole("half", (10,), 1, "d.half"),
            whole("unknown", (7,), 1, "d.unknown"),
            Layout({"sound": (4, 4)}, gap, (sound,)),
        ]
    )
    with pytest.raises(PlanError) as caught:
        plan(source, destination, ["a", "b"])
    names = ("'d.sound' on rank 1", "reshaped", "half", "unknown", "never read")
    findings = caught.value.findings
    assert len(findings) == len(names), findings
    assert all(any(name in finding for finding in findings) for name in names), findings


def boxes(*bounds_and_ranks: tuple[int, int, list[int]]) -> TensorOwners:
    return tuple(
        BoxOwners((start,), (stop - start,), np.array(ranks))
        for start, stop, ranks in bounds_and_ranks
    )


@pytest.mark.parametrize(
    ("sources", "destinations", "relaying"),
    [
        pytest.param(
            boxes((0, 76032, [0, 2]), (76032, 151936, [1, 3])),
            boxes((0, 75968, [8, 10]), (75968, 151936, [9, 11])),
            (),
            id="vocabulary padded by Megatron",
        ),
        pytest.param(
            boxes((0, 1000, [0, 1])),
            boxes((0, 900, [8, 16]), (900, 1000, [24, 32])),
            (),
            id="large and small part",
        ),
        pytest.param(
            boxes((0, 1000, [0, 1])),
            boxes((0, 900, [8, 9, 16, 17]), (900, 1000, [24, 25, 32, 33])),
            range(5),
            id="relaying hosts",
        ),
    ],
)
def test_senders_share_unequal_boxes_equally(
    sources: TensorOwners, destinations: TensorOwners, relaying: Collection[int]
) -> None:
    tensors = TensorClass(sources, destinations, ("t",) * 24, 0, ("int16",) * 24)
    sent = np.zeros(40)
    for flow in Routes(tensors, Hosts([rank // 8 for rank in range(40)], relaying)).flows():
        if flow.link is Link.NETWORK:
            np.add.at(sent, flow.senders, flow.nbytes)
    senders = sent[np.unique(np.concatenate([box.ranks for box in sources]))]
    assert senders.max() < 1.01 * senders.mean()


def test_narrowing_the_dtype_of_most_tensors_is_a_fault() -> None:
    held = {"a": "float32", "b": "float32", "c": "bfloat16"}
    assert rounding_faults(held, held) == []
    (fault,) = rounding_faults(held, dict.fromkeys(held, "bfloat16"))
    assert fault.startswith(
        "2 tensors, e.g. a, are float32 in training and bfloat16 in the servers"
    )
    halves = {**dict.fromkeys("abc", "bfloat16"), "bias": "float32"}
    assert rounding_faults(halves, dict.fromkeys(halves, "float32")) == []
    assert rounding_faults(halves, dict.fromkeys(halves, "bfloat16")) == []
    assert len(rounding_faults(halves, dict.fromkeys(halves, "float16"))) == 1
