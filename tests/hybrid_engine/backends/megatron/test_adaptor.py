"""The Megatron adaptor's records against what Megatron itself says: `sharded_state_dict()`, unpacked by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_engine.config import ActorConfig
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.validation import layout_faults
from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.backends.megatron.unpacking import MegatronTensor, megatron_tensors, unpacked, whole_tensors
from tests.zoo.families import read_config
from tests.zoo.megatron_models import DENSE_FLOAT32, region_slices, running
from tests.zoo.tiny_models import save_model


@dataclass(frozen=True)
class Case:
    """A model and how Megatron shards it; data parallel ranks are what remains."""

    family: str
    model: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)

    def config(self) -> ActorConfig:
        return ActorConfig(**{**DENSE_FLOAT32, **self.actor})


TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
PP2 = {"pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TIED = {"tie_word_embeddings": True}

CASES: dict[int, dict[str, Case]] = {
    2: {
        "tp2": Case("llama", {}, TP2),
        "tp2, all biases": Case("llama", {"attention_bias": True, "mlp_bias": True}, TP2),
        "tp2, tied, sequence parallel": Case("qwen2", TIED, SP2),
        "tp2, one kv head": Case("qwen3", {"num_key_value_heads": 1}, TP2),
        "pp2, tied": Case("llama", TIED, PP2),
        "pp2 vpp2": Case("qwen3", {"num_hidden_layers": 4}, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
        "dp2, bfloat16": Case("qwen2", {}, {"params_dtype": "bfloat16"}),
        "dp2, plain optimizer": Case("llama", {}, {"use_distributed_optimizer": False}),
        "experts ep2": Case("qwen3_moe", {}, EP2),
        "experts tp2, shared and gated": Case("qwen2_moe", {}, SP2),
        "experts tp2 ep2 etp1, latent attention, mtp": Case("deepseek_v3", {"mtp_layers": 2}, {**SP2, **EP2, **ETP1}),
        "experts pp2, last does nothing": Case("deepseek_v2", {"q_lora_rank": None}, {**PP2, "noop_layers": (3,)}),
    },
    4: {
        "tp2 pp2": Case("qwen3", TIED, {**TP2, **PP2}),
        "tp2 dp2, overlap": Case("qwen2", {}, {**TP2, **OVERLAP}),
        "tp4, two kv heads": Case("llama", {}, {"tensor_model_parallel_size": 4}),
        "experts tp2 ep2 etp2": Case("deepseek_v3", {}, {**SP2, **EP2}),
        "experts tp2 pp2 ep2 etp1": Case("mixtral", {}, {**SP2, **PP2, **EP2, **ETP1}),
    },
}


@dataclass(frozen=True)
class RankView:
    """What one rank says, twice: by the adaptor and by Megatron."""

    layout: Layout
    buffers: Mapping[str, np.ndarray]
    megatron: list[MegatronTensor]


def view_of_rank(case: Case, path: Path) -> RankView:
    """On every rank, with weights that do not depend on the sharding."""
    with running(path, case.config()) as run:
        from megatron.core.utils import unwrap_model

        from tests.megatron_patches.gpt import fill_weights

        chunks = unwrap_model(run.actor.chunks)
        for chunk in chunks:
            fill_weights(chunk, seed=11)
        weights = run.engine.weights
        return RankView(
            layout=weights.layout(),
            buffers={name: flat.float().numpy().copy() for name, flat in weights.buffers().items()},
            megatron=[tensor for chunk in chunks for tensor in megatron_tensors(chunk)],
        )


@dataclass(frozen=True)
class Seen:
    """A case: its model's table, and what each rank says."""

    table: ModelTable
    views: list[RankView]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_model(tmp_path_factory.mktemp("model"), case.family, **case.model)
        for cases in CASES.values()
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def launched(engines: Ranks, paths: dict[str, Path]) -> Callable[[int], Outcomes]:
    """Number of ranks -> what its cases brought back; each number is launched once."""

    def launch_on(num_ranks: int) -> Outcomes:
        calls = {name: (view_of_rank, (case, paths[name])) for name, case in CASES[num_ranks].items()}
        return engines.launch_in_turn(num_ranks, calls)

    return functools.cache(launch_on)


@pytest.fixture(
    params=[pytest.param((num_ranks, name), id=name) for num_ranks, cases in CASES.items() for name in cases]
)
def seen(request: pytest.FixtureRequest, launched: Callable[[int], Outcomes], paths: dict[str, Path]) -> Seen:
    num_ranks, name = request.param
    return Seen(table_for(read_config(paths[name])), launched(num_ranks)[name])


def test_records_find_what_megatron_says(seen: Seen) -> None:
    expected = unpacked(whole_tensors(tensor for view in seen.views for tensor in view.megatron), seen.table)
    found = from_records(seen.views)
    assert found.keys() == expected.keys() == seen.table.shapes.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_layouts_are_sound(seen: Seen) -> None:
    merged = Layout.merge(view.layout for view in seen.views)
    assert layout_faults(merged, exact=False) == []
    assert merged.tensors == seen.table.shapes
    for view in seen.views:
        assert {shard.region.tensor for shard in view.layout.shards} == set(view.layout.tensors)


def test_buffers_are_those_of_the_layout(seen: Seen) -> None:
    for view in seen.views:
        for shard in view.layout.shards:
            description = view.layout.buffers[shard.place.buffer]
            assert description.numel == view.buffers[shard.place.buffer.name].size
            assert description.exported, shard.place.buffer


def test_every_rank_holds_each_element_once(seen: Seen) -> None:
    """No tensor parallel rank of a rank's own model parallel group has what another one has, but for replicas."""
    for view in seen.views:
        counts = {name: np.zeros(seen.table.shapes[name], int) for name in view.layout.tensors}
        for shard in view.layout.shards:
            counts[shard.region.tensor][region_slices(shard)] += 1
        assert all(count.max() == 1 for count in counts.values())


def from_records(views: list[RankView]) -> dict[str, np.ndarray]:
    """Canonical tensors read through the records of all ranks; replicas must agree."""
    merged = Layout.merge(view.layout for view in views)
    tensors = {name: np.full(shape, np.nan, np.float32) for name, shape in merged.tensors.items()}
    for view in views:
        for shard in view.layout.shards:
            flat = view.buffers[shard.place.buffer.name]
            strides = [stride * flat.itemsize for stride in shard.place.strides]
            values = np.lib.stride_tricks.as_strided(flat[shard.place.offset :], shard.region.lengths, strides)
            target = tensors[shard.region.tensor][region_slices(shard)]
            assert np.all(np.isnan(target) | (target == values)), f"replicas of {shard.region} differ"
            target[...] = values
    assert not any(np.isnan(values).any() for values in tensors.values()), "some elements have no record"
    return tensors
