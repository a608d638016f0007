"""Bytes of all ranks and the plan of one, against the plan of everything, and that one against single elements."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_engine.errors import PlanError
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import Link, ReshardPlan
from hybrid_engine.planning.planner import plan
from hybrid_engine.planning.rank_plan import plan_of_rank
from hybrid_engine.planning.summary import summarize
from hybrid_engine.records.holdings import Holdings, holdings_of
from hybrid_engine.records.validation import layout_faults
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS, LayoutCase, layout_cases
from tests.hybrid_engine.planning.cases import Case, carry_out, cases, filled_buffers

# most random sizes are impossible
JOBS = settings(
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    deadline=None,
)


def full_plan(case: LayoutCase, rank: int | None = None) -> ReshardPlan:
    source, destination = case.source.layout(), case.destination.layout()
    hosts = [str(host) for host in case.hosts]
    return plan(source, destination, hosts, 700, case.unserved, rank, relaying_hosts=list(map(str, case.relaying)))


@JOBS
@given(layout_cases())
def test_every_element_arrives_where_vllm_has_it(case: LayoutCase) -> None:
    source, destination = case.source.layout(), case.destination.layout()
    assert layout_faults(source, exact=False) == []
    pair = Case(source, destination, tuple(map(str, case.hosts)), 700)
    found, counts = carry_out(full_plan(case), pair)
    for buffer_id, expected in filled_buffers(destination).items():
        np.testing.assert_array_equal(found[buffer_id], expected)
        assert (counts[buffer_id] == 1).all()


@JOBS
@given(layout_cases())
def test_the_summary_is_the_plans(case: LayoutCase) -> None:
    assert_same_bytes(full_plan(case), case.source.holdings, case.destination.holdings, case.hosts, case.relaying)


@JOBS
@given(layout_cases())
def test_no_rank_receives_more_than_the_least(case: LayoutCase) -> None:
    summary = summarize(case.source.holdings, case.destination.holdings, case.hosts, case.relaying)
    np.testing.assert_array_equal(summary.received, summary.lower_bound)
    np.testing.assert_array_equal(summary.own + summary.received, case.destination.holdings.nbytes_by_rank())
    for host, least in zip(dict.fromkeys(case.hosts), summary.network_lower_bound, strict=True):
        entered = summary.network[np.array(case.hosts) == host].sum()
        assert entered == least if host in case.relaying else entered >= least


@given(cases())
def test_the_summary_is_the_plans_for_any_records(case: Case) -> None:
    """Boxes that overlap, ranks that hold a box twice, tensors that are cut in several dims."""
    num_ranks = len(case.hosts)
    holdings = (holdings_of(layout, num_ranks) for layout in (case.source, case.destination))
    assert_same_bytes(
        plan(case.source, case.destination, case.hosts, relaying_hosts=case.relaying),
        *holdings,
        case.hosts,
        case.relaying,
    )


def assert_same_bytes(
    expected: ReshardPlan,
    source: Holdings,
    destination: Holdings,
    hosts: tuple[object, ...],
    relaying: tuple[object, ...],
) -> None:
    summary = summarize(source, destination, hosts, relaying)
    assert expected.network_lower_bound == dict(
        zip(dict.fromkeys(map(str, hosts)), summary.network_lower_bound.tolist(), strict=True)
    )
    sent: Counter[tuple[int, Link]] = Counter()
    for transfer in expected.transfers():
        sent[transfer.src_rank, transfer.link] += transfer.nbytes
    for rank in range(len(hosts)):
        count = expected.bytes_by_rank.get(rank)
        found = (summary.own[rank], summary.host[rank], summary.network[rank], summary.lower_bound[rank])
        assert found == ((count.own, count.host, count.network, count.lower_bound) if count else (0, 0, 0, 0))
        assert (summary.sent_host[rank], summary.sent_network[rank]) == (
            sent[rank, Link.HOST],
            sent[rank, Link.NETWORK],
        )


@JOBS
@given(layout_cases(), st.data())
def test_one_ranks_plan_is_its_part_of_everybodys(case: LayoutCase, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.hosts) - 1))
    everybody, own = full_plan(case), full_plan(case, rank)
    found = plan_of_rank(case.source, case.destination, case.hosts, rank, 700, case.unserved, case.relaying)
    assert found.buckets == own.buckets
    assert found.relays == own.relays
    assert len(everybody.buckets) == len(own.buckets)
    for whole, part in zip(everybody.buckets, own.buckets, strict=True):
        assert part == whole.of_rank(rank)
    assert own.bytes_by_rank == {key: count for key, count in everybody.bytes_by_rank.items() if key == rank}
    count = everybody.bytes_by_rank[rank]
    assert [found.received(link) for link in Link] == [count.own, count.host, count.network]


@JOBS
@given(layout_cases())
def test_holdings_are_those_of_the_records(case: LayoutCase) -> None:
    for side in (case.source, case.destination):
        expected = holdings_of(side.layout(), len(case.hosts))
        assert side.holdings.itemsizes == expected.itemsizes
        assert list(side.holdings.owners) == list(expected.owners)
        for name, owners in side.holdings.owners.items():
            pairs = zip(owners, expected.owners[name], strict=True)
            assert all(found.region == other.region and (found.ranks == other.ranks).all() for found, other in pairs)


def test_what_nobody_holds_is_named() -> None:
    from tests.hybrid_engine.planning.test_planner import whole

    source, destination = (whole("t", (4,), 0, name) for name in ("src", "dst"))
    other = holdings_of(whole("u", (4,), 0, "dst"), 1)
    with pytest.raises(PlanError, match="u: wanted, but no training rank holds it"):
        summarize(holdings_of(source, 1), other, ["a"])
    half = holdings_of(whole("t", (2,), 0, "src"), 1)
    with pytest.raises(PlanError, match=r"t: shape \(2,\) in training, \(4,\) in inference"):
        summarize(half, holdings_of(destination, 1), ["a"])
    part = Holdings(1, {"t": (4,)}, half.itemsizes, half.owners)
    with pytest.raises(PlanError, match=r"t: elements \[\(2,\), \(4,\)\) are wanted by rank 0"):
        summarize(part, holdings_of(destination, 1), ["a"])


BALANCED = [
    # training tp, pp, ep; inference tp, ep; ranks, ranks of a host
    ((4, 4, 1), (2, 1), 64, 8),
    ((6, 1, 1), (2, 1), 48, 12),
    ((2, 1, 1), (6, 1), 48, 6),
    ((2, 2, 6), (2, 6), 96, 8),
    ((2, 2, 3), (1, 3), 96, 8),
]


@pytest.mark.parametrize(("train", "infer", "num_ranks", "per_host"), BALANCED)
def test_ranks_that_hold_the_same_send_as_much(
    train: tuple[int, int, int], infer: tuple[int, int], num_ranks: int, per_host: int
) -> None:
    """But for those that need a part of what they hold, and so are not asked by themselves. The vocabulary is left out:
    the first ranks hold more of it."""
    table = table_for(EXPERTS if train[2] > 1 else DENSE)
    tensor, pipeline, expert = train
    sizes = TrainParallelism(num_ranks, tensor, pipeline, expert=expert, expert_tensor=1 if expert > 1 else None)
    source = training_side(table, sizes).holdings
    destination = inference_side(table, InferenceParallelism(num_ranks, infer[0], expert=infer[1])).holdings
    source, destination = (
        replace(side, owners={name: owners for name, owners in side.owners.items() if ".layers." in name})
        for side in (source, destination)
    )
    sent = summarize(source, destination, [rank // per_host for rank in range(num_ranks)]).sent
    by_stage = sent.reshape(pipeline, -1)
    assert (by_stage.max(axis=1) <= 1.3 * by_stage.mean(axis=1)).all(), by_stage.max(axis=1) / by_stage.mean(axis=1)
