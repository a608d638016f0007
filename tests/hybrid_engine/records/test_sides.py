"""Holdings of all ranks and their messages: lossless, without repetition, and safe to decode."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from hybrid_engine.errors import MessageError, PlanError
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.records.holdings import Holdings, first_members, rank_classes
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side, layout_messages, refined_alike
from tests.hybrid_engine.layouts.cases import EXPERTS
from tests.hybrid_engine.planning.cases import Case, cases, holdings_by_rank, whole


def sorted_records(layout: Layout) -> object:
    return layout.tensors, layout.buffers, sorted(layout.shards, key=repr)


def contents_of(holdings: Holdings) -> object:
    """Return the contents of all tensors' holdings, without identities."""
    owners = {
        name: [(box.offsets, box.lengths, box.ranks.tolist()) for box in boxes]
        for name, boxes in holdings.owners.items()
    }
    placed = {
        name: [
            (
                part.indices,
                part.group,
                box.owners.offsets,
                box.owners.ranks.tolist(),
                box.numel,
                box.start,
                box.strides,
            )
            for part in parts
            for box in part.boxes
        ]
        for name, parts in holdings.placed.items()
    }
    return holdings.num_ranks, holdings.shapes, holdings.dtypes, owners, placed


@given(cases())
def test_a_side_equals_the_layouts_of_its_ranks(case: Case) -> None:
    for layout in (case.source, case.destination):
        num_ranks = len(case.hosts)
        side = Side.split(layout, num_ranks)
        ranks = [side.of_rank(rank) for rank in range(num_ranks)]
        assert sorted_records(Layout.merge(ranks)) == sorted_records(layout)
        assert contents_of(side.holdings) == contents_of(holdings_by_rank(layout, num_ranks))
        assert dict(side.buffers) == dict(layout.buffers)
        assert len(side.buffers) == len(layout.buffers)


def test_ranks_with_the_same_holdings_are_stored_once() -> None:
    """Kinds depend on tensor, pipeline and expert parallel positions, not on replicas."""
    table = table_for(EXPERTS)
    counts = []
    for num_ranks in (8, 32):
        computed = training_side(
            table, TrainParallelism(num_ranks, tensor=2, pipeline=2, expert=2, expert_tensor=1)
        )
        side = Side.of([computed.layout_of(rank) for rank in range(num_ranks)])
        assert len(side.kinds) == len(first_members(rank_classes(computed)))
        counts.append(len(side.kinds))
    assert counts[0] == counts[1] < 8  # 32 ranks have more replicas, not more kinds


def test_the_fingerprint_ignores_the_order_of_buffers_and_shards() -> None:
    layouts = [whole("t", (4,), rank, "b") for rank in range(2)]
    fingerprint = Side.of(layouts).fingerprint
    two = Layout.merge([layouts[0], whole("u", (2,), 0, "c")])
    turned = replace(two, buffers=dict(reversed(two.buffers.items())), shards=two.shards[::-1])
    renamed = replace(two, tensors=dict(reversed(two.tensors.items())))
    assert Side.of([two]).fingerprint == Side.of([turned]).fingerprint
    others = [[two], [renamed], layouts[:1], [layouts[0], whole("t", (4,), 1, "c")]]
    assert len({fingerprint, *(Side.of(other).fingerprint for other in others)}) == 5


def test_shards_of_undeclared_tensors_and_buffers_are_refused() -> None:
    layout = whole("t", (4,), 0, "b")
    with pytest.raises(PlanError) as caught:
        Side.of([replace(layout, buffers={}), replace(layout, tensors={})])
    assert len(caught.value.findings) == 1
    with pytest.raises(KeyError):
        Side.of([layout]).buffers[BufferId(1, "b")]


def test_ten_thousand_mutated_messages_raise_only_message_errors() -> None:
    table = table_for(EXPERTS)
    side = training_side(table, TrainParallelism(4, tensor=2, expert=2, expert_tensor=1))
    messages = layout_messages(side.layout_of(0))
    random_numbers = random.Random(0)
    refused = 0
    for _ in range(10_000):
        mutated = [bytearray(message) for message in messages]
        data = random_numbers.choice(mutated)
        for _ in range(random_numbers.randint(1, 4)):
            at = random_numbers.randrange(len(data))
            match random_numbers.randrange(4):
                case 0:
                    data[at] = random_numbers.randrange(256)
                case 1:
                    data[at] ^= 1 << random_numbers.randrange(8)
                case 2:
                    del data[at : at + random_numbers.randint(1, 20)]
                case 3:
                    data[at:at] = random_numbers.randbytes(random_numbers.randint(1, 20))
        try:
            Side.from_messages([[0, 1]], list(map(bytes, mutated)))
        except MessageError:
            refused += 1
    assert refused > 8_000  # some mutations leave a valid message


def test_padding_and_exports_are_in_messages() -> None:
    buffer_id = BufferId(0, "b")
    buffer = Buffer(6, "int8", "group", (Extent(4, 6),), exported=True)
    layout = Layout(
        {"t": (4,)},
        {buffer_id: buffer},
        (Shard(Region("t", (0,), (4,)), Place(buffer_id, 0, (1,))),),
    )
    assert Side.of([layout]).of_rank(0) == layout


def test_two_sides_have_the_finer_of_both_shapes() -> None:
    def held(shape: tuple[int, ...], region: Region, strides: tuple[int, ...]) -> Side:
        buffer = BufferId(0, "b")
        whole = Layout(
            {"t": shape},
            {buffer: Buffer(24, "float32")},
            (Shard(region, Place(buffer, 0, strides)),),
        )
        return Side.split(whole, 1)

    coarse = held((4, 6), Region("t", (0, 2), (4, 2)), (6, 1))
    fine = held((4, 3, 2), Region("t", (0, 0, 1), (4, 3, 1)), (3, 1, 0))
    for pair in ((coarse, fine), (fine, coarse)):
        for side, refined in zip(pair, refined_alike(*pair), strict=True):
            assert refined.layout.tensors == {"t": (4, 3, 2)}
            (shard,) = refined.layout.shards
            expected = fine.layout.shards[0]
            if side is coarse:
                expected = replace(
                    expected,
                    region=Region("t", (0, 1, 0), (4, 1, 2)),
                    place=replace(expected.place, strides=(6, 2, 1)),
                )
            assert shard == expected
    other = held((8, 3), Region("t", (0, 0), (8, 3)), (3, 1))
    assert refined_alike(coarse, other) == (coarse, other), (
        "no refinement: the plan reports the shapes"
    )
