"""One planner: bytes of all ranks, plans of single ranks and the plan of everything agree, with casts and without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import PlanError
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import ByteCount, Link, ReshardPlan
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import placed_holdings
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.validation import layout_faults
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS, JOBS, LayoutCase, layout_cases, sharded_cases
from tests.hybrid_engine.planning.cases import Case, carry_out, cases, filled_buffers, plan, whole


def full_plan(case: LayoutCase, rank: int | None = None) -> ReshardPlan:
    source, destination = case.source.layout(), case.destination.layout()
    hosts = [str(host) for host in case.hosts]
    return plan(source, destination, hosts, 700, case.unserved, rank, relaying_hosts=list(map(str, case.relaying)))


@JOBS
@given(st.one_of(layout_cases(), sharded_cases()))
def test_every_element_arrives_where_vllm_has_it(case: LayoutCase) -> None:
    source, destination = case.source.layout(), case.destination.layout()
    assert layout_faults(source, exact=False) == []
    pair = Case(source, destination, tuple(map(str, case.hosts)), 700)
    found, counts = carry_out(full_plan(case), pair)
    for buffer_id, expected in filled_buffers(destination).items():
        np.testing.assert_array_equal(found[buffer_id], expected)
        assert (counts[buffer_id] == 1).all()


@JOBS
@given(st.one_of(layout_cases(), sharded_cases()))
def test_the_summary_is_the_plans(case: LayoutCase) -> None:
    summary = summarize(case.source.holdings, case.destination.holdings, case.hosts, case.relaying)
    assert_same_bytes(full_plan(case), summary)


@JOBS
@given(st.one_of(layout_cases(), sharded_cases()))
def test_no_rank_receives_more_than_the_least(case: LayoutCase) -> None:
    summary = summarize(case.source.holdings, case.destination.holdings, case.hosts, case.relaying)
    np.testing.assert_array_equal(summary.received, summary.lower_bound)
    if DTYPE_NBYTES[case.infer_dtype] <= DTYPE_NBYTES[case.train_dtype]:
        np.testing.assert_array_equal(summary.own + summary.received, case.destination.holdings.nbytes_by_rank())
    for host, least in zip(dict.fromkeys(case.hosts), summary.network_lower_bound, strict=True):
        entered = summary.network[np.array(case.hosts) == host].sum()
        assert entered == least if host in case.relaying else entered >= least


@given(cases())
def test_the_summary_is_the_plans_for_any_records(case: Case) -> None:
    """Boxes that overlap, ranks that hold a box twice, tensors that are cut in several dims."""
    holdings = (placed_holdings(layout, len(case.hosts)).holdings for layout in (case.source, case.destination))
    summary = summarize(*holdings, case.hosts, case.relaying)
    assert_same_bytes(plan(case.source, case.destination, case.hosts, relaying_hosts=case.relaying), summary)


def assert_same_bytes(expected: ReshardPlan, summary: ByteSummary) -> None:
    sent: Counter[tuple[int, Link]] = Counter()
    for transfer in expected.transfers():
        sent[transfer.src_rank, transfer.link] += transfer.nbytes
    for rank in range(len(summary.own)):
        count = expected.bytes_by_rank.get(rank, ByteCount(0, 0, 0, 0))
        found = summary.own[rank], summary.host[rank], summary.network[rank], summary.lower_bound[rank]
        assert found == (count.own, count.host, count.network, count.lower_bound)
        sent_by_rank = sent[rank, Link.HOST], sent[rank, Link.NETWORK]
        assert (summary.sent_host[rank], summary.sent_network[rank]) == sent_by_rank


@JOBS
@given(layout_cases())
def test_holdings_are_those_of_the_records(case: LayoutCase) -> None:
    for side in (case.source, case.destination):
        expected = placed_holdings(side.layout(), len(case.hosts)).holdings
        assert side.holdings.dtypes == expected.dtypes
        assert list(side.holdings.owners) == list(expected.owners)
        for name, owners in side.holdings.owners.items():
            pairs = zip(owners, expected.owners[name], strict=True)
            assert all(found.region == other.region and (found.ranks == other.ranks).all() for found, other in pairs)


def test_a_tensor_has_one_dtype_on_each_side() -> None:
    mixed = Layout.merge([whole("t", (4,), 0, "a"), whole("u", (4,), 0, "u")])
    other = BufferId(1, "b")
    mixed = Layout(
        mixed.tensors,
        {**mixed.buffers, other: Buffer(4, "float32")},
        (*mixed.shards, Shard(Region("t", (0,), (4,)), Place(other, 0, (1,)))),
    )
    text = "t: held as bfloat16 and as float32; a tensor has one dtype on each side"
    needed = Layout.merge([whole("t", (4,), 0, "t"), whole("u", (4,), 0, "u")])
    for attempt in (lambda: placed_holdings(mixed, 2), lambda: plan(mixed, needed, ["a", "a"])):
        with pytest.raises(PlanError) as caught:
            attempt()
        assert caught.value.findings == (text,)


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
