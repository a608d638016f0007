"""Model tables compared with mbridge, which converts checkpoints to Megatron for verl and others.

Every element of a checkpoint gets a unique number. For each parameter of each rank, mbridge names
the checkpoint tensors, joins them and splits the result over ranks. The adaptor's records, followed
from the same numbers, must fill the parameter with the same numbers.

Real: mbridge's classes with their names, joins and splits; megatron-core's GPTModel with its
Transformer Engine layer specs, on every rank of layouts of up to 8 ranks.

Mocked: Transformer Engine (names and shapes, see `mock_transformer_engine`); ranks, which share a
process (`fake_ranks`); the constructor of mbridge objects, which would need process groups and
build a configuration for a GPU. The attributes that the conversion reads are set by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.megatron import mock_transformer_engine
from tests.hybrid_engine.ranks.fake_ranks import fake_rank
from tests.zoo.families import read_config
from tests.zoo.megatron_models import actor_config, view_of
from tests.zoo.tiny_models import save_model


@dataclass(frozen=True)
class Case:
    """A model and its layouts, each with a number of ranks."""

    family: str
    model: Values = field(default_factory=dict)
    layouts: tuple[tuple[int, Values], ...] = ()


def layout(ranks: int, tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None):
    actor = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    actor |= {"virtual_pipeline_model_parallel_size": vpp, "expert_model_parallel_size": ep}
    return ranks, {**actor, "expert_tensor_parallel_size": etp, "sequence_parallel": tp > 1}


DENSE = (layout(1), layout(4, tp=4), layout(4, tp=2, pp=2), layout(2, pp=2, vpp=2))
EXPERTS = (layout(1), layout(4, tp=2, ep=4, etp=1), layout(4, tp=2, ep=2, etp=2), layout(8, tp=4, pp=2, ep=2, etp=2))
FOUR_LAYERS = {"num_hidden_layers": 4}
CASES = {
    "llama": Case("llama", FOUR_LAYERS, DENSE),
    "qwen2": Case("qwen2", {**FOUR_LAYERS, "tie_word_embeddings": True}, DENSE),
    "qwen3": Case("qwen3", {**FOUR_LAYERS, "num_key_value_heads": 1}, DENSE),
    "mixtral": Case("mixtral", {}, EXPERTS),
    "qwen2_moe": Case("qwen2_moe", {}, EXPERTS),
    "qwen3_moe": Case("qwen3_moe", {}, EXPERTS),
    "deepseek_v3": Case("deepseek_v3", FOUR_LAYERS, EXPERTS),
    "deepseek_v3, plain queries": Case("deepseek_v3", {**FOUR_LAYERS, "q_lora_rank": None}, EXPERTS[1:2]),
    # mbridge supports MTP only for the real number of layers.
    "deepseek_v3, all layers": Case(
        "deepseek_v3",
        {"num_hidden_layers": 61, "n_routed_experts": 4, "num_experts_per_tok": 2, "mtp_layers": 1},
        (layout(4, tp=2, pp=1, ep=2, etp=2),),
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Results for one case: the number of compared parameters, and the differences."""

    num_parameters: int
    different: list[str]
    not_in_mbridge: list[str]
    shared: dict[str, list[str]]


def compare_all(cases: dict[str, Case], paths: dict[str, Path]) -> dict[str, Comparison]:
    mock_transformer_engine.install()
    return {name: compare(case, paths[name]) for name, case in cases.items()}


def compare(case: Case, path: Path) -> Comparison:
    table = table_for(read_config(path))
    numbers = {}
    start = 0
    for name, shape in table.shapes.items():
        count = torch.Size(shape).numel()
        # 0 stands for padding; float64 is exact.
        numbers[name] = torch.arange(start + 1, start + 1 + count, dtype=torch.float64).reshape(shape)
        start += count
    total = Comparison(0, [], [], {})
    for world_size, actor in case.layouts:
        config = actor_config(**actor)
        for rank in range(world_size):
            with fake_rank(config, rank, world_size):
                comparison = compare_rank(config, table, path, numbers)
            where = f"{actor}, rank {rank}: "
            total = Comparison(
                total.num_parameters + comparison.num_parameters,
                total.different + [where + name for name in comparison.different],
                sorted({*total.not_in_mbridge, *comparison.not_in_mbridge}),
                comparison.shared,
            )
    return total


def compare_rank(config: ActorConfig, table: ModelTable, path: Path, numbers: TensorDict) -> Comparison:
    from hybrid_engine.backends.megatron import megatron_config
    from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
    from hybrid_engine.backends.megatron.model_tensors import ModelTensors
    from hybrid_engine.trainer.megatron import build

    # Without a GPU Transformer Engine counts as missing.
    build.has_transformer_engine = megatron_config.has_transformer_engine = lambda: True
    chunks, _ = build.build_model(config, table, read_config(path), dist.get_world_size(), weights_only=True)
    adaptor = MegatronAdaptor(ModelTensors(chunks, table))
    records = filled_by_records(adaptor, numbers)
    bridge = mock_constructed_bridge(config, table, path)
    count = 0
    different = []
    unknown = []
    for chunk in chunks:
        tensors = {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}
        for local_name, name in bridge._weight_name_mapping_mcore_local_to_global(chunk).items():
            try:
                sources = [numbers[source] for source in bridge._weight_name_mapping_mcore_to_hf(name)]
            except NotImplementedError:
                unknown.append(name)
                continue
            parameter = tensors[local_name]
            is_expert = ".mlp.experts.linear_fc" in name
            size = bridge.mpu.etp_size if is_expert else bridge.mpu.tp_size
            whole = bridge._weight_to_mcore_format(name, sources)
            parts = bridge._weight_split_across_tp(name, whole, parameter, size)
            part = parts[bridge.mpu.etp_rank if is_expert else bridge.mpu.tp_rank]
            count += 1
            if not torch.equal(part, records[parameter.data_ptr()].view(parameter.shape)):
                different.append(name)
    return Comparison(count, different, unknown, getattr(bridge, "_SHARED_STATE_DICT_MAPPING", {}))


def filled_by_records(adaptor: Any, numbers: TensorDict) -> dict[int, torch.Tensor]:
    """Map the address of each parameter to the numbers written by records, 0 elsewhere."""
    buffers = {name: torch.zeros(flat.numel(), dtype=torch.float64) for name, flat in adaptor.buffers().items()}
    for shard in adaptor.layout().shards:
        region = tuple(slice(low, high) for low, high in zip(shard.region.offsets, shard.region.ends, strict=True))
        view_of(buffers, shard).copy_(numbers[shard.region.tensor][region])
    return {flat.data_ptr(): buffers[name] for name, flat in adaptor.buffers().items()}


def mock_constructed_bridge(config: ActorConfig, table: ModelTable, path: Path) -> Any:
    import mbridge  # noqa: F401  (registers its models)
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.core.parallel_states import ParallelStates
    from megatron.core import parallel_state
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(path)
    bridge_class = _MODEL_REGISTRY[hf_config.model_type]
    bridge_class = type("MockConstructed" + bridge_class.__name__, (bridge_class,), {})
    # Bridges of tied embeddings modify the mapping of their class.
    bridge_class._DIRECT_MAPPING = dict(bridge_class._DIRECT_MAPPING)
    bridge = bridge_class.__new__(bridge_class)
    bridge.hf_config = hf_config
    bridge.dtype = None
    bridge.config = SimpleNamespace(
        gated_linear_unit=True,
        num_moe_experts=table.dims.num_experts,
        num_layers=table.dims.num_layers,
        mtp_num_layers=table.dims.num_mtp_layers,
    )
    bridge.mpu = ParallelStates(
        tp_size=config.tensor_model_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        ep_size=config.expert_model_parallel_size,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
    )
    bridge.make_vocab_size_divisible_by = config.make_vocab_size_divisible_by
    bridge.vocab_size = table.dims.vocab_size
    bridge.padded_vocab_size = config.sizes(1).padded_vocabulary(table.dims.vocab_size)
    bridge._adjust_mapping_for_shared_weights()
    return bridge


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_model(tmp_path_factory.mktemp("model"), case.family, **case.model) for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def comparisons(engines: Ranks, paths: dict[str, Path]) -> dict[str, Comparison]:
    return engines.run_alone(compare_all, CASES, paths)


def test_every_parameter_equals_the_conversion_by_mbridge(comparisons: dict[str, Comparison]) -> None:
    for name, comparison in comparisons.items():
        assert comparison.different == [], name
        assert comparison.not_in_mbridge == [], name
        assert comparison.num_parameters > 10 * CASES[name].model.get("num_hidden_layers", 2), name


def test_copies_equal_those_of_mbridge(comparisons: dict[str, Comparison], paths: dict[str, Path]) -> None:
    name = "deepseek_v3, all layers"
    copies = {copy: names[0] for names in comparisons[name].shared.values() for copy in names[1:]}
    assert table_for(read_config(paths[name])).copies == copies
    assert len(copies) == 2
