"""Memory, other systems' formulas, and the picture of a job, on sizes that can be counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from hybrid_engine.advisor.cluster_plan import GIB, Cluster, JobPlan, plan_job
from hybrid_engine.advisor.memory_peaks import memory_peaks
from hybrid_engine.advisor.other_systems import peers
from hybrid_engine.advisor.picture import picture_of, rows_of
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.summary import summarize
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS, JOBS, LayoutCase, layout_cases


def job(train: TrainParallelism, infer: InferenceParallelism, cluster: Cluster | None = None) -> JobPlan:
    return plan_job(table_for(EXPERTS), train, infer, cluster or Cluster(), dtype="bfloat16", bucket_nbytes=100)


def test_memory_is_counted_with_padding_and_shards() -> None:
    """Two tensor parallel ranks x two replicas; experts whole on two ranks."""
    table = table_for(EXPERTS)
    hidden, vocab = 3, 152  # 150 up to a multiple of 4 * 2
    attention = 4 * 24 * hidden // 2 + 2 * 2  # q, k, v, o cut in two; norms of query and key
    norms = 2 * hidden
    router, expert = 6 * hidden, 3 * 12 * hidden
    dense = 2 * vocab * hidden // 2 + hidden + 4 * (attention + norms) + 3 * router + 3 * 12 * hidden // 2
    experts = 3 * 3 * expert
    train = TrainParallelism(4, tensor=2, expert=2, expert_tensor=1, make_vocab_size_divisible_by=4)
    infer = InferenceParallelism(4, tensor=2)
    source, destination = training_side(table, train), inference_side(table, infer)
    assert source.num_elements.tolist() == [dense + experts] * 4
    peaks = memory_peaks(source, destination, train, "bfloat16", bucket_nbytes=100)
    assert peaks.params.tolist() == [2 * (dense + experts)] * 4
    assert peaks.grads.tolist() == [4 * (dense + experts)] * 4
    shards = math.ceil(dense / 2) + math.ceil(experts / 2)
    assert peaks.optimizer.tolist() == [12 * shards] * 4
    served = 2 * 192 * hidden // 2 + dense - 2 * vocab * hidden // 2 + 3 * 6 * expert // 2  # vLLM pads to 192
    assert peaks.inference.tolist() == [2 * served] * 4
    assert (peaks.switch == peaks.params + peaks.inference).all()
    assert (peaks.interleaved_switch == np.maximum(peaks.params, peaks.inference) + 200).all()
    assert (peaks.device == np.maximum(peaks.training, peaks.switch)).all()
    assert (peaks.host == peaks.params + peaks.optimizer).all()
    in_float32 = memory_peaks(source, destination, train, "float32", bucket_nbytes=100)
    assert in_float32.optimizer.tolist() == [8 * shards] * 4, "no main copy"


def test_fit_and_time() -> None:
    rates = {Link.SELF: 1e-3, Link.HOST: 1e-6, Link.NETWORK: 1e-9}
    train, infer = TrainParallelism(4, tensor=2), InferenceParallelism(4)
    small = job(train, infer, Cluster(ranks_per_host=2, device_gib=1e-6, host_gib=1e-6, link_gbps=rates))
    assert (small.fits_device, small.fits_host) == (False, False)
    moved = small.bytes
    expected = moved.own / 1e6 + np.maximum(moved.host, moved.sent_host) / 1e3
    assert moved.network.sum() == 0
    np.testing.assert_allclose(small.seconds, expected)
    exact = Cluster(
        ranks_per_host=2, device_gib=small.memory.device.max() / GIB, host_gib=small.host_nbytes.max() / GIB
    )
    assert (job(train, infer, exact).fits_device, job(train, infer, exact).fits_host) == (True, True)
    assert small.host_nbytes.tolist() == [small.memory.host[:2].sum(), small.memory.host[2:].sum()]


def test_an_order_that_saves_is_kept() -> None:
    train, infer = TrainParallelism(8, tensor=4), InferenceParallelism(8, tensor=2)
    plan = job(train, infer)
    assert plan.infer.rank_order is not None
    assert plan.bytes.own.sum() > plan.sequential.own.sum()
    same = job(TrainParallelism(8, tensor=2, make_vocab_size_divisible_by=96), infer)  # 192 rows on both sides
    assert same.infer.rank_order is None
    assert same.bytes is same.sequential
    assert same.bytes.received.sum() == 0


# -- others' formulas --------------------------------------------------------------------------------------------------


def reasons(train: TrainParallelism, infer: InferenceParallelism) -> dict[str, str]:
    table = table_for(EXPERTS)
    found = peers(training_side(table, train).holdings, inference_side(table, infer).holdings, train, infer)
    assert all((peer.nbytes is None) == bool(peer.reason) for peer in found)
    return {peer.system.partition(":")[0]: peer.reason for peer in found}


def test_formulas_are_used_where_they_apply() -> None:
    mindspeed, hybridflow = "MindSpeed-RL", "HybridFlow"
    assert set(reasons(TrainParallelism(4, tensor=2), InferenceParallelism(4)).values()) == {""}
    found = reasons(TrainParallelism(4, expert=2), InferenceParallelism(4))
    assert "experts" in found[mindspeed]
    assert "expert parallelism" in found[hybridflow]
    found = reasons(TrainParallelism(4), InferenceParallelism(4, tensor=2, pipeline=2))
    assert "inference pipeline" in found[mindspeed]
    assert "inference pipeline" in found[hybridflow]
    assert "2 does not divide 1" in found[hybridflow]
    assert "neither" in reasons(TrainParallelism(6, tensor=2), InferenceParallelism(6, tensor=3))[mindspeed]
    virtual = TrainParallelism(4, pipeline=2, virtual_pipeline=2)
    assert "virtual" in reasons(virtual, InferenceParallelism(4))[hybridflow]


@JOBS
@given(layout_cases())
def test_gathering_everything_moves_what_a_rank_does_not_hold(case: LayoutCase) -> None:
    source, destination = case.source.holdings, case.destination.holdings
    everything, *_ = peers(source, destination, case.train, case.infer)
    whole = inference_side(case.table, InferenceParallelism(len(case.hosts))).holdings
    assert everything.nbytes == summarize(source, whole, case.hosts).received.mean()


# -- the picture -------------------------------------------------------------------------------------------------------


@JOBS
@given(layout_cases())
def test_bars_are_where_something_is_held(case: LayoutCase) -> None:
    picture = picture_of(case.table, case.source.holdings, case.destination.holdings)
    assert sorted(rank for column in picture.columns for rank in column.ranks) == list(range(len(case.hosts)))
    assert sorted(name for row in picture.rows for name in row.tensors) == sorted(case.table.shapes)
    drawn = {
        (bar.column, row, bar.side): bar
        for bar in picture.bars
        for row in range(bar.first_row, bar.first_row + bar.num_rows)
    }
    assert len(drawn) == sum(bar.num_rows for bar in picture.bars), "no two bars in one place"
    for column, ranks in enumerate(picture.columns):
        for rank in ranks.ranks:
            sides = {"train": case.source.layout_of(rank), "infer": case.destination.layout_of(rank)}
            for side, layout in sides.items():
                held = {shard.region.tensor for shard in layout.shards}
                for number, row in enumerate(picture.rows):
                    assert ((column, number, side) in drawn) == bool(held & set(row.tensors))


def test_bars_are_slices() -> None:
    table = table_for(DENSE)
    source = training_side(table, TrainParallelism(2, tensor=2)).holdings
    destination = inference_side(table, InferenceParallelism(2)).holdings
    picture = picture_of(table, source, destination)
    layers = {(bar.column, bar.side): bar for bar in picture.bars if bar.num_rows == 4}
    assert layers[0, "train"].extents == layers[0, "both"].extents == ((0.0, 0.5),)
    assert layers[1, "train"].extents == ((0.5, 1.0),)
    assert layers[1, "infer"].extents == ((0.0, 1.0),)
    text = picture.texts[layers[1, "train"].text]
    assert "self_attn.q_proj.weight [12:24, :]\n" in text
    assert "self_attn.o_proj.weight [:, 12:24]\n" in text
    experts = table_for(EXPERTS)
    sides = (
        training_side(experts, TrainParallelism(6, tensor=2, expert=3, expert_tensor=2)),
        inference_side(experts, InferenceParallelism(6, tensor=3)),
    )
    picture = picture_of(experts, *(side.holdings for side in sides))
    first = len([row for row in rows_of(experts) if row.experts is None])
    bars = {bar.side: bar for bar in picture.bars if bar.column == 0 and bar.first_row == first}
    assert bars["train"].extents == ((0.0, pytest.approx(1 / 3)),)
    assert bars["train"].share == 0.5
    assert bars["infer"].extents == ((0.0, 1.0),)
    assert bars["infer"].share == pytest.approx(1 / 3)
    assert bars["both"].extents == bars["train"].extents
    assert picture.texts[bars["train"].text].startswith("experts 0-1, of each\ngate_proj.weight [0:6, :]")


def test_too_many_columns_are_said() -> None:
    table = table_for(DENSE)
    source = training_side(table, TrainParallelism(6, tensor=6)).holdings
    picture = picture_of(table, source, source, max_columns=4)
    assert (len(picture.columns), picture.num_hidden) == (4, 2)
