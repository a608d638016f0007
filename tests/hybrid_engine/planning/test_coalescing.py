"""Combined transfers copy the same elements to the same places, whatever the two layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given

from hybrid_engine.planning.coalescing import coalesce
from hybrid_engine.planning.plan import Link, ReshardPlan, Transfer
from hybrid_engine.planning.planner import plan
from hybrid_engine.records.layout import BufferId, Place
from tests.hybrid_engine.planning.cases import Case, carry_out, cases

SOURCE, DESTINATION = BufferId(0, "source"), BufferId(1, "destination")


def combined(whole: ReshardPlan) -> ReshardPlan:
    return replace(
        whole, buckets=tuple(replace(one, transfers=tuple(coalesce(one.transfers))) for one in whole.buckets)
    )


@given(cases())
def test_the_same_elements_arrive_once(case: Case) -> None:
    whole = plan(case.source, case.destination, case.hosts, case.bucket_nbytes)
    expected, counts = carry_out(whole, case)
    found, counts_found = carry_out(combined(whole), case)
    for buffer_id in expected:
        np.testing.assert_array_equal(found[buffer_id], expected[buffer_id])
        np.testing.assert_array_equal(counts_found[buffer_id], counts[buffer_id])


@given(cases())
def test_bytes_stay_and_both_ends_derive_the_same(case: Case) -> None:
    for bucket in plan(case.source, case.destination, case.hosts, case.bucket_nbytes).buckets:
        everything = coalesce(bucket.transfers)
        assert sum(one.nbytes for one in everything) == sum(one.nbytes for one in bucket.transfers)
        assert all(stride >= 0 for one in everything for stride in (*one.src.strides, *one.dst.strides))
        for src in range(len(case.hosts)):
            for dst in range(len(case.hosts)):
                own = [one for one in bucket.transfers if (one.src_rank, one.dst_rank) == (src, dst)]
                seen_by_src = coalesce(one for one in bucket.transfers if src in (one.src_rank, one.dst_rank))
                pair = [one for one in seen_by_src if (one.src_rank, one.dst_rank) == (src, dst)]
                assert pair == coalesce(own)


def box(tensor: str, lengths: tuple[int, ...], src: int, dst: int, src_strides: tuple[int, ...]) -> Transfer:
    strides = (lengths[1], 1)
    src_place, dst_place = Place(SOURCE, src, src_strides), Place(DESTINATION, dst, strides)
    return Transfer(tensor, lengths, src_place, dst_place, 2 * lengths[0] * lengths[1], Link.HOST)


def test_experts_of_a_layer_are_one_copy() -> None:
    experts = [box(f"experts.{e}.down", (4, 8), 100 * e, 32 * e, (8, 1)) for e in range(6)]
    (one,) = coalesce(experts)
    assert (one.lengths, one.src.strides, one.dst.strides) == ((6, 32), (100, 1), (32, 1))
    assert one.tensor == "experts.0.down … experts.5.down"


def test_regular_groups_of_regular_boxes_are_one_copy() -> None:
    """Heads within experts, say: two levels of distances."""
    boxes = [box(f"{a}.{b}", (3, 5), 1000 * a + 40 * b, 300 * a + 60 * b, (7, 1)) for a in range(3) for b in range(4)]
    (one,) = coalesce(boxes)
    assert one.lengths == (3, 4, 3, 5)


def test_contiguous_pieces_are_one_flat_copy() -> None:
    (one,) = coalesce([box(str(n), (2, 8), 16 * n, 16 * n, (8, 1)) for n in range(10)])
    assert (one.lengths, one.src.strides, one.dst.strides) == ((160,), (1,), (1,))


def test_a_source_that_runs_backwards_stays_apart() -> None:
    assert len(coalesce([box("a", (2, 8), 50, 0, (8, 1)), box("b", (2, 8), 0, 16, (8, 1))])) == 2


def test_an_odd_box_does_not_break_the_run_after_it() -> None:
    boxes = [
        box(str(n), (2, 8), src, dst, (8, 1)) for n, (src, dst) in enumerate([(0, 0), (90, 16), (130, 80), (170, 144)])
    ]
    assert sorted(len(one.lengths) for one in coalesce(boxes)) == [1, 2]
