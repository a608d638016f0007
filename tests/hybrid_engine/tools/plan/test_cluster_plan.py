"""Memory of a job, for sizes that can be counted by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_engine.config import load_config
from hybrid_engine.config.job_rules import memory_plan
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.memory import (
    GIB,
    MemoryPeaks,
    Stays,
    TrainingMemory,
    megatron_memory,
    plan_memory,
    sharded_memory,
)
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
    named,
)
from hybrid_engine.layouts.sharded import Packed, PackedModel, sharded_side
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import Link
from hybrid_engine.records.regions import StridedView, contiguous_strides
from hybrid_engine.tools.plan.answer import device_memory
from hybrid_engine.tools.plan.cluster_plan import (
    BUCKET_SECONDS,
    PCIE_GBPS,
    Cluster,
    JobPlan,
    plan_job,
)
from hybrid_engine.tools.verify.small_models import reduced_config
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS
from tests.hybrid_engine.planning.cases import bytes_read
from tests.zoo.families import write_config
from tests.zoo.published_configs import DEEPSEEK_V3, QWEN3_30B_A3B

JobPlanner = Callable[..., JobPlan]


@pytest.fixture
def job(tmp_path: Path) -> JobPlanner:
    def plan(
        train: TrainParallelism,
        infer: InferenceParallelism,
        cluster: Cluster | None = None,
        model: dict[str, Any] = EXPERTS,
        **generate: Any,
    ) -> JobPlan:
        values = {
            "model": str(write_config(tmp_path, model)),
            "actor_config": named(train, "key"),
            "generate_config": {**named(infer, "key"), **generate},
        }
        config = load_config(values, train.world_size, weights_only=True, own_weights=True)
        return plan_job(config, train.world_size, cluster)

    return plan


def test_memory_is_counted_with_padding_and_shards() -> None:
    """Two tensor parallel ranks x two replicas; experts are uncut on two ranks."""
    table = table_for(EXPERTS)
    hidden = 3
    vocab = 152  # 150, rounded up to a multiple of 4 * 2
    attention = 4 * 24 * hidden // 2 + 2 * 2  # q, k, v, o cut in two; norms of query and key
    norms = 2 * hidden
    router = 6 * hidden
    expert = 3 * 12 * hidden
    dense = (
        2 * vocab * hidden // 2
        + hidden
        + 4 * (attention + norms)
        + 3 * router
        + 3 * 12 * hidden // 2
    )
    experts = 3 * 3 * expert
    train = TrainParallelism(4, tensor=2, expert=2, expert_tensor=1, make_vocab_size_divisible_by=4)
    infer = InferenceParallelism(4, tensor=2)
    source = training_side(table, train)
    destination = inference_side(table, infer)
    assert source.num_elements.tolist() == [dense + experts] * 4
    state = megatron_memory(source, train, "bfloat16")
    peaks = MemoryPeaks(state, 2 * destination.num_elements, bucket=100)
    assert state.params.tolist() == [2 * (dense + experts)] * 4
    assert state.grads.tolist() == [4 * (dense + experts)] * 4
    shards = math.ceil(dense / 2) + math.ceil(experts / 2)
    narrow = megatron_memory(source, train, "bfloat16", float32_grads=False).grads
    assert narrow.tolist() == [2 * (dense + experts) + 4 * shards] * 4, (
        "float32 gradients of main parameters"
    )
    assert state.optimizer.tolist() == [12 * shards] * 4
    served = (
        2 * 192 * hidden // 2 + dense - 2 * vocab * hidden // 2 + 3 * 6 * expert // 2
    )  # vLLM pads to 192
    assert peaks.inference.tolist() == [2 * served] * 4
    assert (peaks.switch == state.params + peaks.inference).all()
    assert (peaks.interleaved_switch == np.maximum(state.params, peaks.inference) + 200).all()
    assert (peaks.device == np.maximum(state.total, peaks.interleaved_switch)).all()
    assert (state.copied == state.params + state.optimizer).all()
    assert megatron_memory(source, train, "float32").optimizer.tolist() == [8 * shards] * 4, (
        "no main copy"
    )


def test_the_peak_counts_the_planners_buckets(job: JobPlanner) -> None:
    """A layer's experts share a bucket: 128 x 3 x 2,048 x 768 x 2 bytes, half on a rank."""
    model = {**QWEN3_30B_A3B, "num_hidden_layers": 8}
    plan = job(TrainParallelism(8, expert=8), InferenceParallelism(8, tensor=2), model=model)
    buckets = plan.plan_of(0).buckets
    for bucket in buckets:
        assert sum(".mlp.experts." in name for name in bucket.tensors) % (3 * 128) == 0, (
            "whole layers"
        )
    assert plan.memory.bucket == max(bucket.nbytes for bucket in buckets)
    assert plan.memory.bucket >= 603_979_776 > plan.bucket_nbytes
    peak = np.maximum(plan.memory.state.params, plan.memory.inference) + 2 * plan.memory.bucket
    assert (plan.phases["switch"].total == peak).all()
    assert (memory_plan(plan.config, 8).phases["switch"].total == plan.phases["switch"].total).all()
    assert device_memory(plan)["largest_bucket"]["max"] == plan.memory.bucket


def test_shards_are_padded_and_uneven_ones_leave_late() -> None:
    """Three ranks: 7 rows are padded to 3 each, 6 rows are 2 each; a router's bias is not cut."""
    shapes = {"uneven": (7, 5), "even": (6, 2), "bias": (4,)}
    tensors = {
        name: Packed(name, StridedView(0, shape, contiguous_strides(shape)))
        for name, shape in shapes.items()
    }
    model = PackedModel(tensors, shapes, whole={"bias"})
    sizes = ShardedParallelism(3)
    source = sharded_side(replace(table_for(DENSE), shapes=shapes), model, sizes)
    assert source.num_elements.tolist() == [3 * 5 + 2 * 2 + 4] * 3
    state = sharded_memory(source, model, sizes, "float32")
    assert state.params.tolist() == state.grads.tolist() == [4 * 23] * 3
    assert state.optimizer.tolist() == [8 * 23, 8 * 23, 8 * (1 * 5 + 2 * 2 + 4)], (
        "the last rank has one row of 7"
    )
    assert (state.copied == 2 * 92 + state.optimizer).all()
    assert state.inelastic.tolist() == [4 * (3 * 5 + 4)] * 3
    peaks = MemoryPeaks(state, np.array([400, 10, 1]), bucket=1)
    assert peaks.interleaved_switch.tolist() == [76 + 400 + 2, 92 + 2, 92 + 1], (
        "at most both together"
    )
    assert (replace(peaks, keeps_inference=True).device == state.total + peaks.inference).all()


def test_a_drafter_counts_as_weights_of_vllm(job: JobPlanner) -> None:
    model = reduced_config(DEEPSEEK_V3, 4)
    sizes = TrainParallelism(2), InferenceParallelism(2, tensor=2)
    mtp = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    without, drafting = (job(*sizes, model=model, vllm=vllm) for vllm in ({}, mtp))
    shapes = table_for(model).shapes
    numel = sum(
        math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.4.")
    )
    more = drafting.memory.inference - without.memory.inference
    assert (more > numel).all()  # half of the layer in 2 bytes, and what both ranks have whole
    assert (more < 1.5 * numel).all()


def test_relaying_needs_elastic_buffers(job: JobPlanner) -> None:
    """Both ranks of a host need the half on the other host: it arrives once, or for each rank."""
    train = TrainParallelism(4, pipeline=2)
    infer = InferenceParallelism(4)
    relayed, direct = (
        job(train, infer, Cluster(2, has_elastic_buffers=has)) for has in (True, False)
    )
    assert relayed.received_by_host.tolist() == relayed.bytes.network_lower_bound.tolist()
    assert direct.received_by_host.sum() > relayed.received_by_host.sum()
    for plan in (relayed, direct):
        planned = sum(bytes_read(plan.plan_of(rank))[rank].network for rank in range(4))
        assert planned == plan.bytes.network.sum()


def test_fit_and_time(job: JobPlanner) -> None:
    rates = {Link.SELF: 1e-3, Link.HOST: 1e-6, Link.NETWORK: 1e-9}
    train = TrainParallelism(4, tensor=2)
    infer = InferenceParallelism(4)
    small = job(
        train, infer, Cluster(ranks_per_host=2, device_gib=1e-6, host_gib=1e-6, link_gbps=rates)
    )
    assert small.verdict == ("does not fit", ["Device", "Cache", "Host"])
    moved = small.bytes
    expected = moved.own / 1e6 + np.maximum(moved.host, moved.sent_host) / 1e3
    assert moved.network.sum() == 0
    np.testing.assert_allclose(small.seconds, expected)
    state = small.memory.state
    pcie = PCIE_GBPS * 1e9
    (there, copies), (back, _) = (
        small.switch_seconds["to_vllm"],
        small.switch_seconds["to_training"],
    )
    np.testing.assert_allclose(
        copies, small.seconds
    )  # Gradients' memory is large enough for weights.
    finer = job(TrainParallelism(4, tensor=4), infer, small.cluster)
    first = (finer.memory.inference - finer.memory.state.grads) / pcie
    assert first.min() > 0
    np.testing.assert_allclose(
        finer.switch_seconds["to_vllm"][1], finer.seconds + first
    )  # No room for a KV cache.
    np.testing.assert_allclose(there, copies + BUCKET_SECONDS)  # one bucket
    np.testing.assert_allclose(back, state.params / pcie)
    whole = job(train, infer, Cluster(ranks_per_host=2, link_gbps=rates, has_elastic_buffers=False))
    _, copies = whole.switch_seconds["to_vllm"]
    np.testing.assert_allclose(copies, whole.seconds + (state.params + state.optimizer) / pcie)
    exact = Cluster(
        ranks_per_host=2, device_gib=small.peak.max() / GIB, host_gib=small.host_nbytes.max() / GIB
    )
    assert job(train, infer, exact).verdict == ("does not fit", ["Cache"])
    assert small.host_nbytes.tolist() == [state.copied[:2].sum(), state.copied[2:].sum()]


def test_a_rank_order_is_kept_if_it_saves_bytes(job: JobPlanner) -> None:
    train = TrainParallelism(8, tensor=4)
    infer = InferenceParallelism(8, tensor=2)
    plan = job(train, infer)
    assert plan.infer.rank_order is not None
    assert plan.bytes.own.sum() > plan.sequential.own.sum()
    same = job(
        TrainParallelism(8, tensor=2, make_vocab_size_divisible_by=96), infer
    )  # 192 rows on both sides
    assert same.infer.rank_order is None
    assert same.bytes is same.sequential
    assert same.bytes.received.sum() == 0


def test_a_gather_receives_the_missing_weights(job: JobPlanner) -> None:
    """The bytes equal a plan for vLLM without tensor parallelism."""
    plan = job(TrainParallelism(4, tensor=2, pipeline=2), InferenceParallelism(4))
    assert plan.gathered.tolist() == plan.bytes.received.tolist()


def memory(params: int, grads: int, optimizer: int) -> TrainingMemory:
    """Return the memory of two ranks, the second with ten times as much."""
    kinds = [np.array([nbytes, 10 * nbytes]) for nbytes in (params, grads, optimizer)]
    return TrainingMemory(*kinds, copied=kinds[0] + kinds[2])


ACTOR = memory(100, 200, 300)
CRITIC = memory(10, 20, 30)
WEIGHTS = np.array([150, 50])
BUCKET = 5


def totals(**stays: object) -> dict[str, list[int]]:
    plan = plan_memory(ACTOR, WEIGHTS, BUCKET, CRITIC, stays=Stays(**stays))  # type: ignore[arg-type]
    return {name: phase.total.tolist() for name, phase in plan.phases.items()}


ALONE = {
    "train": [600, 6000],
    "forward": [100, 1000],
    "switch": [160, 1010],  # the larger of parameters and inference weights, and two buckets
    "generate": [150, 50],
    "reference": [100, 1000],
    "critic train": [60, 600],
    "critic forward": [10, 100],
}


@pytest.mark.parametrize(
    ("stays", "differences"),
    [
        ({}, {}),
        (
            {"kinds": frozenset({"grad"})},
            {
                "forward": [300, 3000],
                "switch": [360, 3010],
                "generate": [350, 2050],
                "reference": [300, 3000],
                "critic train": [260, 2600],
                "critic forward": [210, 2100],
            },
        ),
        (
            {"inference_nbytes": None},
            {
                "train": [750, 6050],
                "forward": [250, 1050],
                "switch": [255, 1055],  # all at once, and a bucket
                "reference": [250, 1050],
                "critic train": [210, 650],
                "critic forward": [160, 150],
            },
        ),
        (
            {"inference_nbytes": 60},
            {
                "train": [660, 6050],
                "forward": [160, 1050],
                "switch": [220, 1060],
                "reference": [160, 1050],
                "critic train": [120, 650],
                "critic forward": [70, 150],
            },
        ),
        (
            {"critic": True},
            {
                "train": [660, 6600],
                "forward": [160, 1600],
                "switch": [220, 1610],
                "generate": [210, 650],
                "reference": [160, 1600],
                "critic forward": [60, 600],
            },
        ),
    ],
    ids=["nothing", "gradients", "all weights", "some weights", "the critic"],
)
def test_a_phase_includes_state_that_stays(
    stays: dict[str, object], differences: dict[str, list[int]]
) -> None:
    assert totals(**stays) == {**ALONE, **differences}


def test_the_largest_rank_decides_over_the_budget() -> None:
    def over(budget: int | None) -> list[str]:
        plan = plan_memory(ACTOR, WEIGHTS, BUCKET, CRITIC, budget=budget)
        return [phase.name for phase in plan.over_budget()]

    assert over(None) == over(6000) == []
    assert over(5999) == ["train"]
    assert over(599) == ["train", "forward", "switch", "reference", "critic train"]
