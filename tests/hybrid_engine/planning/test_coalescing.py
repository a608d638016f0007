"""Coalesced transfers: of pairs of ranks, and of boxes at regular distances. What they copy is seen in test_planner."""

from __future__ import annotations

import itertools

from hypothesis import given

from hybrid_engine.planning.coalescing import coalesce
from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Place
from tests.hybrid_engine.planning.cases import Case, box_transfers, cases, plan

SOURCE, DESTINATION = BufferId(0, "source"), BufferId(1, "destination")


@given(cases())
def test_what_a_pair_of_ranks_gets_depends_on_the_pair_alone(case: Case) -> None:
    """So both ends derive the same, whatever else is in their plans; bytes stay."""
    sides = case.source, case.destination
    of_ranks = [box_transfers(*sides, case.hosts, rank) for rank in range(len(case.hosts))]
    boxes = list(dict.fromkeys(itertools.chain(*of_ranks)))  # most are in those of two ranks
    everything = coalesce(boxes)
    assert sum(one.nbytes for one in everything) == sum(one.nbytes for one in boxes)
    assert all(stride >= 0 for one in everything for stride in (*one.src.strides, *one.dst.strides))
    for src, dst in {(one.src_rank, one.dst_rank) for one in boxes}:
        own = [one for one in boxes if (one.src_rank, one.dst_rank) == (src, dst)]
        assert coalesce(own) == [one for one in everything if (one.src_rank, one.dst_rank) == (src, dst)]


@given(cases())
def test_a_plan_is_coalesced_as_far_as_it_can_be(case: Case) -> None:
    for bucket in plan(case.source, case.destination, case.hosts, relaying_hosts=case.relaying).buckets:
        assert coalesce(bucket.transfers) == list(bucket.transfers)
        assert coalesce(bucket.fan_out) == list(bucket.fan_out)


def box(tensor: str, lengths: tuple[int, ...], src: int, dst: int, src_strides: tuple[int, ...]) -> Transfer:
    strides = (lengths[1], 1)
    src_place, dst_place = Place(SOURCE, src, src_strides), Place(DESTINATION, dst, strides)
    return Transfer(tensor, lengths, src_place, dst_place, 2 * lengths[0] * lengths[1], Link.HOST)


def test_experts_of_a_layer_are_one_copy() -> None:
    experts = [box(f"experts.{e}.down", (4, 8), 100 * e, 32 * e, (8, 1)) for e in range(6)]
    (one,) = coalesce(experts)
    assert (one.lengths, one.src.strides, one.dst.strides) == ((6, 32), (100, 1), (32, 1))
    assert one.tensor == "experts.0.down … experts.5.down"


def test_a_source_that_runs_backwards_stays_apart() -> None:
    assert len(coalesce([box("a", (2, 8), 50, 0, (8, 1)), box("b", (2, 8), 0, 16, (8, 1))])) == 2


def test_an_odd_box_does_not_break_the_run_after_it() -> None:
    boxes = [
        box(str(n), (2, 8), src, dst, (8, 1)) for n, (src, dst) in enumerate([(0, 0), (90, 16), (130, 80), (170, 144)])
    ]
    assert sorted(len(one.lengths) for one in coalesce(boxes)) == [1, 2]
