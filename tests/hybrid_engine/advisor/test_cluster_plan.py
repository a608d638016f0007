"""Memory, other systems' formulas, and the picture of a job, on sizes that can be counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from hybrid_engine.advisor.cluster_plan import GIB, Cluster, JobPlan, plan_job
from hybrid_engine.advisor.other_systems import megatron_peers
from hybrid_engine.advisor.overview import overview_of
from hybrid_engine.advisor.picture import picture_of
from hybrid_engine.advisor.trainers import Megatron
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.memory_peaks import MemoryPeaks, megatron_memory, sharded_memory
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.sharded import Packed, PackedModel, sharded_side
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.routes import Hosts
from hybrid_engine.planning.summary import group_traffic, summarize
from hybrid_engine.records.regions import StridedView, contiguous_strides
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS, JOBS, LayoutCase, layout_cases


def job(train: TrainParallelism, infer: InferenceParallelism, cluster: Cluster | None = None) -> JobPlan:
    cluster = cluster or Cluster()
    return plan_job(table_for(EXPERTS), Megatron(train), infer, cluster, dtype="bfloat16", bucket_nbytes=100)


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
    state = megatron_memory(source, train, "bfloat16")
    peaks = MemoryPeaks(state, 2 * destination.num_elements, bucket=100)
    assert state.params.tolist() == [2 * (dense + experts)] * 4
    assert state.grads.tolist() == [4 * (dense + experts)] * 4
    shards = math.ceil(dense / 2) + math.ceil(experts / 2)
    narrow = megatron_memory(source, train, "bfloat16", float32_grads=False).grads
    assert narrow.tolist() == [2 * (dense + experts) + 4 * shards] * 4, "those of the main parameters are converted"
    assert state.optimizer.tolist() == [12 * shards] * 4
    served = 2 * 192 * hidden // 2 + dense - 2 * vocab * hidden // 2 + 3 * 6 * expert // 2  # vLLM pads to 192
    assert peaks.inference.tolist() == [2 * served] * 4
    assert (peaks.switch == state.params + peaks.inference).all()
    assert (peaks.interleaved_switch == np.maximum(state.params, peaks.inference) + 200).all()
    assert (peaks.device == np.maximum(peaks.training, peaks.interleaved_switch)).all()
    assert (peaks.host == state.params + state.optimizer).all()
    assert megatron_memory(source, train, "float32").optimizer.tolist() == [8 * shards] * 4, "no main copy"


def test_memory_of_shards_is_padded_and_uneven_ones_leave_late() -> None:
    """Three ranks: 7 rows are 3 on each, 6 rows are 2; a router's bias is whole on all of them."""
    shapes = {"uneven": (7, 5), "even": (6, 2), "bias": (4,)}
    tensors = {name: Packed(name, StridedView(0, shape, contiguous_strides(shape))) for name, shape in shapes.items()}
    model = PackedModel(tensors, shapes, whole={"bias"})
    sizes = ShardedParallelism(3)
    source = sharded_side(replace(table_for(DENSE), shapes=shapes), model, sizes)
    assert source.num_elements.tolist() == [3 * 5 + 2 * 2 + 4] * 3
    state = sharded_memory(source, model, sizes, "float32")
    assert state.params.tolist() == state.grads.tolist() == [4 * 23] * 3
    assert state.optimizer.tolist() == [8 * 23, 8 * 23, 8 * (1 * 5 + 2 * 2 + 4)], "the last one has one row of 7"
    assert (state.copied == 2 * 92 + state.optimizer).all()
    assert state.inelastic is not None
    assert state.inelastic.tolist() == [4 * (3 * 5 + 4)] * 3
    peaks = MemoryPeaks(state, np.array([400, 10, 1]), bucket=1)
    assert peaks.interleaved_switch.tolist() == [76 + 400 + 2, 92 + 2, 92 + 1], "never more than both"


def test_what_stays_longer_adds_to_the_peak() -> None:
    train, infer, cluster = TrainParallelism(4, tensor=2), InferenceParallelism(4, tensor=4), Cluster(2)
    plain = job(train, infer, cluster)
    memory = plain.memory
    assert (memory.interleaved_switch < memory.switch).all()
    kept = plan_job(plain.table, plain.trainer, infer, cluster, bucket_nbytes=100, release_weights=False)
    assert (kept.memory.device == memory.training + memory.inference).all()
    assert (kept.memory.interleaved_switch == memory.switch).all()
    assert (kept.bytes.network == plain.bytes.network).all()
    whole = job(train, infer, replace(cluster, has_elastic_buffers=False))
    assert whole.memory.state.inelastic is not None
    assert (whole.memory.state.inelastic == memory.state.params).all()
    assert (whole.memory.interleaved_switch == memory.switch).all()
    assert (whole.memory.training == memory.training).all()


def test_without_elastic_buffers_nothing_is_relayed() -> None:
    """Both ranks of a host need the half that is on the other: it comes once, or to each."""
    train, infer = TrainParallelism(4, pipeline=2), InferenceParallelism(4)
    apart = Cluster(ranks_per_host=2)
    once, each = (job(train, infer, replace(apart, has_elastic_buffers=flag)) for flag in (True, False))
    assert once.received_by_host.tolist() == once.bytes.network_lower_bound.tolist()
    assert each.received_by_host.sum() > once.received_by_host.sum()
    planned = [sum(one.plan_of(rank).bytes_by_rank[rank].network for rank in range(4)) for one in (once, each)]
    assert planned == [once.bytes.network.sum(), each.bytes.network.sum()]


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
    found = megatron_peers(training_side(table, train).holdings, inference_side(table, infer).holdings, train, infer)
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
    everything, *_ = megatron_peers(source, destination, case.train, case.infer)
    whole = inference_side(case.table, InferenceParallelism(len(case.hosts))).holdings
    assert everything.nbytes == summarize(source, whole, case.hosts).received.mean()


# -- the picture -------------------------------------------------------------------------------------------------------


@JOBS
@given(layout_cases())
def test_bars_are_where_something_is_held(case: LayoutCase) -> None:
    picture = picture_of(case.table, case.source.holdings, case.destination.holdings)
    assert sorted(rank for column in picture.columns for rank in column.ranks) == list(range(len(case.hosts)))
    assert sorted(name for row in picture.rows for name in row.tensors) == sorted(case.table.shapes)
    assert [number for group in picture.groups for number in group.columns] == [*range(len(picture.columns))]
    drawn = {(bar.column, row, bar.side): bar for bar in picture.bars for row in bar.rows}
    assert len(drawn) == sum(bar.num_rows for bar in picture.bars), "no two bars in one place"
    for column, ranks in enumerate(picture.columns):
        for rank in ranks.ranks:
            sides = {"train": case.source.layout_of(rank), "infer": case.destination.layout_of(rank)}
            for side, layout in sides.items():
                held = {shard.region.tensor for shard in layout.shards}
                for number, row in enumerate(picture.rows):
                    assert ((column, number, side) in drawn) == bool(held & set(row.tensors))
        group = next(group for group in picture.groups if column in group.columns)
        for side, number in ((side, number) for side in ("train", "infer") for number in range(len(picture.rows))):
            assert ((column, number, side) in drawn) == ((group.columns.start, number, side) in drawn)


@JOBS
@given(layout_cases())
def test_what_is_there_already_is_drawn_in_front_of_what_is_needed(case: LayoutCase) -> None:
    picture = picture_of(case.table, case.source.holdings, case.destination.holdings)
    needed = {(bar.column, row): bar for bar in picture.bars if bar.side == "infer" for row in bar.rows}
    for bar in (bar for bar in picture.bars if bar.side == "both"):
        for row in bar.rows:
            for low, high in bar.extents:
                wholes = needed[bar.column, row].extents
                assert any(start - 1e-9 <= low and high <= stop + 1e-9 for start, stop in wholes), (bar, wholes)


def test_bars_are_slices() -> None:
    table = table_for(DENSE)
    source = training_side(table, TrainParallelism(2, tensor=2)).holdings
    destination = inference_side(table, InferenceParallelism(2)).holdings
    picture = picture_of(table, source, destination)
    assert [row.label for row in picture.rows] == ["embedding", "layers 0-3", "norm and head"]
    layers = {(bar.column, bar.side): bar for bar in picture.bars if bar.first_row == 1}
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
    first = len([row for row in picture.rows if row.experts is None])
    bars = {bar.side: bar for bar in picture.bars if bar.column == 0 and bar.first_row == first}
    assert bars["train"].extents == ((0.0, pytest.approx(1 / 3)),)
    assert bars["train"].share == 0.5
    assert bars["infer"].extents == ((0.0, 1.0),)
    assert bars["infer"].share == pytest.approx(1 / 3)
    assert bars["both"].extents == bars["train"].extents
    assert picture.texts[bars["train"].text].startswith("experts 0-1, of each\ngate_proj.weight [0:6, :]")


def test_of_too_many_columns_some_of_every_group_are_drawn() -> None:
    """Two stages of six ranks that hold different slices."""
    table = table_for(DENSE)
    source = training_side(table, TrainParallelism(12, tensor=6, pipeline=2, make_vocab_size_divisible_by=1)).holdings
    picture = picture_of(table, source, source, most_columns=4)
    assert [column.ranks for column in picture.columns] == [(0,), (3,), (6,), (9,)]
    assert [(group.columns, group.num_hidden) for group in picture.groups] == [(range(2), 4), (range(2, 4), 4)]


def test_an_overview_says_how_much_a_rank_of_each_group_holds() -> None:
    table = table_for(DENSE)
    source = training_side(table, TrainParallelism(4, tensor=2, pipeline=2)).holdings
    destination = inference_side(table, InferenceParallelism(4)).holdings
    overview = overview_of(picture_of(table, source, destination))
    assert [column.ranks for column in overview.columns] == [(0, 1), (2, 3)]
    assert [row.label for row in overview.rows] == ["embedding", "layers 0-1", "layers 2-3", "norm and head"]
    drawn = {(bar.column, row, bar.side): bar for bar in overview.bars for row in bar.rows}
    assert len(drawn) == sum(bar.num_rows for bar in overview.bars)
    for column, row in ((0, 1), (1, 2)):
        assert drawn[column, row, "train"].part == drawn[column, row, "both"].part == 0.5
        assert drawn[column, 3 - row, "infer"].part == 1.0
        assert (column, 3 - row, "train") not in drawn
    assert overview.texts[drawn[0, 1, "train"].text] == "50 % by each rank"


@JOBS
@given(layout_cases())
def test_traffic_between_groups_is_what_is_sent(case: LayoutCase) -> None:
    sides = case.source.holdings, case.destination.holdings
    moved, ranks = summarize(*sides, case.hosts), np.arange(len(case.hosts))
    by_rank, by_host = group_traffic(*sides, case.hosts, (), [ranks, np.array(Hosts(case.hosts).numbers)])
    assert (by_rank.sum(axis=0) == moved.received).all()
    assert (by_rank.sum(axis=1) == moved.sent).all()
    assert by_host.diagonal().sum() == moved.host.sum()
    assert by_host.sum() == moved.received.sum()
