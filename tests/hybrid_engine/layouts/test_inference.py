"""vLLM's side as computed here: positions of ranks, and divisions against vLLM's functions.

backends/vllm/test_layouts.py compares every family and layout with traced models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import ConfigError, ParameterMismatchError
from hybrid_engine.layouts.inference import expert_bounds, inference_side, stage_bounds
from hybrid_engine.layouts.parallelism import InferenceParallelism, InferencePlace, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard, differences
from hybrid_engine.records.regions import Region
from hybrid_engine.records.validation import layout_faults
from tests.harness.errors import violated
from tests.hybrid_engine.layouts.cases import (
    DENSE,
    EXPERTS,
    JOBS,
    LATENT,
    LayoutCase,
    held_tensors,
    layout_cases,
)


@given(st.integers(1, 70), st.integers(1, 12))
def test_stages_match_vllm(num_layers: int, stages: int) -> None:
    get_pp_indices = pytest.importorskip("vllm.distributed.utils").get_pp_indices
    bounds = stage_bounds(num_layers, stages)
    expected = [get_pp_indices(num_layers, stage, stages) for stage in range(stages)]
    assert list(itertools.pairwise(bounds)) == expected


@given(st.integers(1, 70), st.integers(1, 12))
@pytest.mark.slow
def test_blocks_of_experts_match_vllm(num_experts: int, blocks: int) -> None:
    maps = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager")
    bounds = expert_bounds(num_experts, blocks)
    for block in range(blocks):
        count, expert_map, _ = maps.determine_expert_map(blocks, block, num_experts)
        expected = (
            list(range(num_experts))
            if expert_map is None
            else np.flatnonzero(expert_map.numpy() >= 0).tolist()
        )
        assert list(range(bounds[block], bounds[block + 1])) == expected
        assert len(expected) == count


@pytest.mark.slow
@given(st.integers(1, 300))
def test_the_padded_vocabulary_matches_vllm(size: int) -> None:
    embedding = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
    assert InferenceParallelism.padded_vocabulary(size) == embedding.pad_vocab_size(size)


def test_positions_order_tensor_ranks_then_stages_then_replicas() -> None:
    """Two replicas share the experts."""
    sizes = InferenceParallelism(16, tensor=2, pipeline=2, expert=4)
    assert (sizes.data, sizes.replicas_per_instance) == (4, 2)
    assert sizes.place_of(0) == InferencePlace(0, 0, 0, 0, 0)
    assert sizes.place_of(3) == InferencePlace(3, 0, tp_rank=1, pp_rank=1, dp_rank=0)
    assert sizes.place_of(4) == InferencePlace(4, 0, tp_rank=0, pp_rank=0, dp_rank=1)
    assert sizes.place_of(15) == InferencePlace(15, 1, tp_rank=1, pp_rank=1, dp_rank=3)
    turned = InferenceParallelism(
        16, tensor=2, pipeline=2, expert=4, rank_order=tuple(range(15, -1, -1))
    )
    assert turned.place_of(0) == sizes.place_of(15)
    assert InferenceParallelism(4, tensor=2).place_of(3) == InferencePlace(3, 1, 1, 0, dp_rank=1)


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        (
            inference_side(table_for(EXPERTS), InferenceParallelism(4, tensor=2, expert=4)),
            ["01", "23", "4", "5"],
        ),
        (
            training_side(table_for(EXPERTS), TrainParallelism(4, tensor=2, expert=2)),
            ["012", "012", "345", "345"],
        ),
    ],
    ids=["vllm", "megatron"],
)
def test_expert_parallel_ranks_have_consecutive_experts(
    side: SideLayout, expected: list[str]
) -> None:
    for rank, experts in enumerate(expected):
        names = (name.partition(".experts.")[2] for name in held_tensors(side.layout_of(rank)))
        assert {name[0] for name in names if name} == {*experts}


def test_mtp_layers_have_the_embedding_again() -> None:
    side = training_side(table_for(LATENT), TrainParallelism(2, pipeline=2))
    assert all(
        "model.embed_tokens.weight" in held_tensors(side.layout_of(rank)) for rank in range(2)
    )


def test_replicas_that_share_experts_step_together() -> None:
    shared = {ep: InferenceParallelism(8, tensor=2, expert=ep) for ep in (1, 2, 4, 8)}
    assert {ep: sizes.replicas_per_instance for ep, sizes in shared.items()} == {
        1: 1,
        2: 1,
        4: 2,
        8: 4,
    }
    assert {ep: sizes.ranks_in_step(3) for ep, sizes in shared.items()} == {
        1: [2, 3],
        2: [2, 3],
        4: [0, 1, 2, 3],
        8: list(range(8)),
    }


@JOBS
@given(layout_cases())
def test_every_layout_is_valid_and_complete(case: LayoutCase) -> None:
    side = case.destination
    assert layout_faults(side.layout(), exact=True) == []
    shapes = case.table.shapes.items()
    served = layout_of(
        Region(name, (0,) * len(shape), shape)
        for name, shape in shapes
        if name not in case.unserved
    )
    instance = case.infer.ranks_per_instance
    for first in range(0, len(case.hosts), instance):
        ranks = case.infer.ranks.ravel()[first : first + instance].tolist()
        assert differences(side.layout_of(*ranks), served) == [], (
            "an instance must have every tensor completely"
        )


def test_invalid_sizes_are_refused() -> None:
    table = table_for(EXPERTS)
    with pytest.raises(ConfigError) as caught:
        inference_side(
            table, InferenceParallelism(8, tensor=8, pipeline=5, expert=9, rank_order=(0,) * 8)
        )
    keys = [violation.key for violation in caught.value.findings]
    assert sorted(set(keys)) == ["expert", "pipeline", "rank_order", "tensor"], caught.value
    with violated(ConfigError, ("pipeline", "below-1")):
        inference_side(table_for(DENSE), InferenceParallelism(8, pipeline=0))


SHAPE = (3, 4)
BUFFER = BufferId(0, "buffer")


@st.composite
def boxes(draw: st.DrawFn) -> list[Region]:
    spans = [
        [(start, stop) for start in range(size) for stop in range(start + 1, size + 1)]
        for size in SHAPE
    ]
    chosen = draw(st.lists(st.tuples(*map(st.sampled_from, spans)), max_size=4))
    return [Region("weight", (a, c), (b - a, d - c)) for (a, b), (c, d) in chosen]


def layout_of(regions: Iterable[Region]) -> Layout:
    shards = [Shard(region, Place(BUFFER, 0, region.lengths)) for region in regions]
    return Layout({"weight": SHAPE}, {BUFFER: Buffer(12, "float32", "")}, tuple(shards))


def elements(regions: Iterable[Region]) -> set[tuple[int, ...]]:
    return {
        element
        for region in regions
        for element in itertools.product(*map(range, region.offsets, region.ends))
    }


@given(boxes(), boxes())
def test_layouts_differ_if_an_element_differs(first: list[Region], second: list[Region]) -> None:
    expected = [] if elements(first) == elements(second) else ["weight"]
    assert differences(layout_of(first), layout_of(second)) == expected


def test_an_engine_with_another_layout_than_its_position_is_refused() -> None:
    pytest.importorskip("torch", reason="layouts of live buffers need torch")
    require_traced_before = import_module("hybrid_engine.assembly").require_traced_before
    side = inference_side(table_for(DENSE), InferenceParallelism(2, tensor=2))
    layout = side.layout_of(0)
    other = side.layout_of(1)
    require_traced_before(layout, layout.on(1), rank=1, position=0)
    with pytest.raises(ParameterMismatchError) as lacking:
        require_traced_before(layout, replace(layout, shards=layout.shards[1:]), rank=1, position=0)
    (missing,) = lacking.value.findings
    assert missing.startswith(
        f"{layout.shards[0].region.tensor}: on rank 1 vLLM holds other parts of it"
    )
    assert "traced for position 0" in missing
    with pytest.raises(ParameterMismatchError) as another:
        require_traced_before(layout, other, rank=1, position=0)
    whole = {
        shard.region.tensor
        for shard in layout.shards
        if shard.region.lengths == layout.tensors[shard.region.tensor]
    }
    assert len(another.value.findings) == len(layout.tensors) - len(whole)
