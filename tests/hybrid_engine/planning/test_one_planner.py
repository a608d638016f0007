"""Bytes of all ranks, plans of single ranks and the full plan agree, with and without casts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.plan import Link, ReshardPlan
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.validation import layout_faults
from tests.hybrid_engine.layouts.cases import JOBS, LayoutCase, layout_cases, sharded_cases
from tests.hybrid_engine.planning.cases import (
    ByteCount,
    Case,
    bytes_read,
    cases,
    filled_buffers,
    holdings_by_rank,
    plan,
    run_plan,
    whole,
)


def full_plan(case: LayoutCase, rank: int | None = None) -> ReshardPlan:
    sides = (case.source.layout(), case.destination.layout())
    hosts = [str(host) for host in case.hosts]
    relaying = [str(host) for host in case.relaying]
    return plan(*sides, hosts, 700, case.unserved, rank, relaying_hosts=relaying)


@JOBS
@given(st.one_of(layout_cases(), sharded_cases()))
def test_every_element_arrives_where_vllm_has_it(case: LayoutCase) -> None:
    source = case.source.layout()
    destination = case.destination.layout()
    assert layout_faults(source, exact=False) == []
    pair = Case(source, destination, tuple(map(str, case.hosts)), 700)
    contents, counts = run_plan(full_plan(case), pair)
    for buffer_id, expected in filled_buffers(destination).items():
        np.testing.assert_array_equal(contents[buffer_id], expected)
        assert (counts[buffer_id] == 1).all()


@JOBS
@given(st.one_of(layout_cases(), sharded_cases()))
def test_every_rank_receives_the_minimum(case: LayoutCase) -> None:
    summary = summarize(case.source, case.destination, case.hosts, case.relaying)
    np.testing.assert_array_equal(summary.received, summary.lower_bound)
    if DTYPE_NBYTES[case.infer_dtype] <= DTYPE_NBYTES[case.train_dtype]:
        np.testing.assert_array_equal(
            summary.own + summary.received, case.destination.nbytes_by_rank()
        )
    for host, least in zip(dict.fromkeys(case.hosts), summary.network_lower_bound, strict=True):
        entered = summary.network[np.array(case.hosts) == host].sum()
        assert entered == least if host in case.relaying else entered >= least


@given(cases())
def test_the_summary_matches_plans_of_any_records(case: Case) -> None:
    """Boxes overlap, ranks hold a box twice, and tensors are cut in several dims."""
    holdings = (
        holdings_by_rank(layout, len(case.hosts)) for layout in (case.source, case.destination)
    )
    summary = summarize(*holdings, case.hosts, case.relaying)
    assert_same_bytes(
        plan(case.source, case.destination, case.hosts, relaying_hosts=case.relaying), summary
    )


def assert_same_bytes(expected: ReshardPlan, summary: ByteSummary) -> None:
    sent: Counter[tuple[int, Link]] = Counter()
    for transfer in expected.transfers():
        sent[transfer.src_rank, transfer.link] += transfer.nbytes
    for rank in range(len(summary.own)):
        count = bytes_read(expected).get(rank, ByteCount(0, 0, 0, 0))
        assert summary.own[rank] == count.device
        assert summary.host[rank] == count.host
        assert summary.network[rank] == count.network
        assert summary.lower_bound[rank] == count.lower_bound
        assert summary.sent_host[rank] == sent[rank, Link.HOST]
        assert summary.sent_network[rank] == sent[rank, Link.NETWORK]


@JOBS
@given(layout_cases())
def test_holdings_match_the_records(case: LayoutCase) -> None:
    for side in (case.source, case.destination):
        expected = holdings_by_rank(side.layout(), len(case.hosts))
        assert side.dtypes == expected.dtypes
        assert list(side.owners) == list(expected.owners)
        for name, owners in side.owners.items():
            for box, other in zip(owners, expected.owners[name], strict=True):
                assert box.region == other.region
                assert (box.ranks == other.ranks).all()


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
    for attempt in (lambda: holdings_by_rank(mixed, 2), lambda: plan(mixed, needed, ["a", "a"])):
        with pytest.raises(PlanError) as caught:
            attempt()
        assert caught.value.findings == (text,)
