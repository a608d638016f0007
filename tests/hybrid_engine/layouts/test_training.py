"""Megatron's side as computed here, compared with live models and functions of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.layouts.stages import Chunk, chunks_of, parse_layout, split_violations
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.records.layout import differences
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo.families import served_config
from tests.zoo.megatron_models import actor_config, parallel_state_of

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
# (family, changes of its config, training layout), each on four ranks
LIVE: list[tuple[str, Values, Values]] = [
    ("llama", {}, {"tensor_model_parallel_size": 4}),
    ("qwen3 tied", {}, {**TP2, **PP2}),
    ("llama", {}, {**TP2, "context_parallel_size": 2}),
    (
        "qwen2 tied",
        {"num_hidden_layers": 7},
        {
            "pipeline_model_parallel_size": 4,
            "num_layers_in_first_pipeline_stage": 2,
            "num_layers_in_last_pipeline_stage": 1,
        },
    ),
    (
        "qwen3 tied",
        {"num_hidden_layers": 6},
        {
            **PP2,
            "virtual_pipeline_model_parallel_size": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    ("llama", {"num_hidden_layers": 5}, {**PP2, "pipeline_model_parallel_layout": "Et*2|(t|)*2tL"}),
    ("llama", {"num_hidden_layers": 3}, {**PP2, **TP2, "noop_layers": (1,)}),
    ("mixtral", {}, {**TP2, **EP2, **ETP1}),
    ("qwen3_moe", {}, {**TP2, **EP2}),
    (
        "qwen3_moe",
        {"num_hidden_layers": 4},
        {**PP2, **EP2, "virtual_pipeline_model_parallel_size": 2},
    ),
    ("deepseek_v2", {"num_hidden_layers": 4}, {**TP2, **PP2, **EP2, **ETP1}),
    ("deepseek_v3", {}, {**TP2, **EP2}),
    (
        "deepseek_v3",
        {"num_hidden_layers": 3},
        {**PP2, **EP2, "num_layers_in_first_pipeline_stage": 2},
    ),
    ("glm", {}, {**TP2, **PP2}),
    ("glm4", {}, TP2),
    ("gemma2", {}, {**TP2, **PP2}),
    ("gemma3", {}, TP2),
    ("gpt2", {}, {**TP2, **PP2}),
]


@on_engines(4)
def test_every_rank_matches_the_live_model() -> None:
    for family, changes, settings in LIVE:
        actor = actor_config(**settings)
        config = {**served_config(family), **changes}
        table = table_for(config)
        with parallel_state_of(actor):
            from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
            from hybrid_engine.backends.megatron.model_tensors import ModelTensors
            from hybrid_engine.trainer.megatron.build import build_model

            chunks, _ = build_model(actor, table, config, 4, weights_only=True)
            live = MegatronAdaptor(ModelTensors(chunks, table, actor.noop_layers)).layout()
            rank = dist.get_rank()
        side = training_side(table, actor.sizes(world_size=4, cuts_whole_projections=True))
        assert differences(side.layout_of(rank), live) == [], (family, settings)


@st.composite
def sizes(draw: st.DrawFn) -> TrainParallelism:
    tensor, context, expert, expert_tensor = (draw(st.sampled_from([1, 2, 3])) for _ in range(4))
    stage = np.lcm(tensor * context, expert * expert_tensor) * draw(st.integers(1, 2))
    pipeline = draw(st.sampled_from([1, 2, 3]))
    return TrainParallelism(
        int(stage) * pipeline,
        tensor,
        pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
    )


@pytest.mark.slow
@given(sizes())
def test_rank_grids_match_megatrons_groups(parallelism: TrainParallelism) -> None:
    """Ranks along each axis of a grid are a group of megatron-core, in its order."""
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(
        parallelism.tensor, 1, parallelism.data, parallelism.pipeline, parallelism.context, order
    )
    experts = RankGenerator(
        parallelism.expert_cut,
        parallelism.expert,
        parallelism.expert_data,
        parallelism.pipeline,
        1,
        order,
    )
    axes = [(parallelism.ranks, dense, ("pp", "dp", "cp", "tp"))]
    axes += [(parallelism.expert_ranks, experts, ("pp", "dp", "ep", "tp"))]
    for ranks, generator, names in axes:
        for axis, name in enumerate(names):
            groups = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist()
            assert sorted(groups) == sorted(generator.get_ranks(name)), name


@st.composite
def splits(draw: st.DrawFn) -> tuple[TrainParallelism, int]:
    """Draw splits of every kind, and a number of layers that may not fit."""
    size = st.one_of(st.none(), st.integers(1, 4))
    flags = draw(st.sampled_from([(False, False), (True, False), (False, True), (True, True)]))
    first, last = (None, None) if any(flags) else (draw(size), draw(size))
    pipeline = draw(st.integers(2, 4))
    virtual = draw(st.sampled_from([None, 2, 3]))
    return TrainParallelism(1, 1, pipeline, virtual, first, last, *flags), draw(st.integers(1, 24))


def megatrons_chunks(
    split: TrainParallelism, num_layers: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (stage, virtual, positions) by megatron-core's functions.

    Raises AssertionError or ZeroDivisionError for splits that it refuses.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = SimpleNamespace(**named(split, "model"), num_layers=num_layers)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(split.virtual_pipeline)
    try:
        for stage in range(split.pipeline):
            for virtual in range(split.virtual_pipeline or 1):
                vp_stage = virtual if split.virtual_pipeline else None
                count = get_num_layers_to_build(config, vp_stage, stage)
                offset = get_transformer_layer_offset(config, vp_stage, stage)
                yield stage, virtual, list(range(offset, offset + count))
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


@pytest.mark.slow
@given(splits())
def test_layers_of_stages_match_megatron(case: tuple[TrainParallelism, int]) -> None:
    split, num_layers = case
    refused = list(split_violations(split, num_layers, 0))
    try:
        expected = list(megatrons_chunks(split, num_layers))
    except (AssertionError, ZeroDivisionError):
        assert refused
        return
    if sorted(position for _, _, positions in expected for position in positions) != list(
        range(num_layers)
    ):
        assert refused, "Megatron would leave layers out or build some twice"
        return
    assert not refused
    chunks = [
        (chunk.stage, chunk.virtual, list(chunk.positions))
        for chunk in chunks_of(split, num_layers, 0)
    ]
    assert sorted(chunks) == sorted(expected)


LAYOUTS = [
    ("Et|t*2|tL", 3),
    ("E|(t|)*4,L", 3),
    ("Ett|(tt|)*2,m|L", 5),
    ("E,t*3|(t|t)*2|m*2L", 5),
    ("Et|t|t|t|tm|L", 2),
    ("Etttt|ttL", 2),
    ("Et|t|t|tmL", 2),
    ("Et|t|tm|tL", 2),
    ("Et|tm|t|L", 2),
    ("Et|t|m|mL", 4),
    ("t|EtL", 2),
    ("Et||*2tL", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "pipeline"), LAYOUTS)
def test_layouts_are_parsed_like_megatrons(text: str, pipeline: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    chunks = parse_layout(text)
    megatrons = PipelineParallelLayerLayout(text, pipeline)
    num_layers = "".join(chunks).count("t")
    num_mtp = "".join(chunks).count("m")
    split = TrainParallelism(1, pipeline=pipeline, pipeline_layout=text)
    try:
        megatrons.validate_layer_layout(num_layers, num_mtp)
    except AssertionError:
        assert list(split_violations(split, num_layers, num_mtp))
        return
    assert list(split_violations(split, num_layers, num_mtp)) == []
    virtual = len(chunks) // pipeline
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    try:
        for chunk in chunks_of(split, num_layers, num_mtp):
            where = {"vp_stage": chunk.virtual, "pp_rank": chunk.stage}
            assert list(chunk.positions) == megatrons.get_layer_id_list(LayerType.decoder, **where)
            has_mtp = megatrons.get_num_layers_to_build(LayerType.mtp, **where) > 0
            assert chunk.has_mtp == has_mtp
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def test_contents_of_chunks() -> None:
    chunks = chunks_of(TrainParallelism(1, pipeline=2, virtual_pipeline=2, noop_layers=(1,)), 3, 1)
    assert chunks[0] == Chunk(0, 0, range(0, 1), (0,), (0,), True, False, False, False)
    assert (
        [chunk.attention for chunk in chunks]
        == [chunk.mlp for chunk in chunks]
        == [(0,), (), (1,), (2,)]
    )
    assert chunks[-1] == Chunk(1, 1, range(3, 4), (2,), (2,), False, True, True, True)
    apart = chunks_of(TrainParallelism(1, pipeline=2, pipeline_layout="Ett||m|L"), 2, 1)
    assert [chunk.has_final_norm for chunk in apart] == [True, False, False, False]
    assert [chunk.has_mtp for chunk in apart] == [False, False, True, False]
