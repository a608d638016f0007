"""Model tables against the parameters of megatron-core's Transformer Engine layer specs.

Transformer Engine is a mock (`mock_transformer_engine`: names and shapes, no computation).
Everything above it is megatron-core's: the layer specs with `TESpecProvider`, the wrappers around
Transformer Engine's classes, which decide what is fused, grouped and split, and GPTModel.

Two ranks run one after the other in one process (see `fake_ranks`). On each, the adaptor must place
every parameter by name and shape; both ranks together must hold every checkpoint tensor whole.
Values are compared with the local spec, in test_experts and others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_engine.memory.offload_items import storage_of
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.regions import Shape
from hybrid_engine.records.validation import layout_faults
from hybrid_engine.trainer.batches.arrangement import Rows
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.megatron import mock_transformer_engine
from tests.hybrid_engine.ranks.fake_ranks import fake_rank
from tests.zoo.families import read_config
from tests.zoo.megatron_models import EP2, SP2, actor_config
from tests.zoo.tiny_models import Zoo

ETP1 = {"expert_tensor_parallel_size": 1}


@dataclass(frozen=True)
class Case:
    """A model on two ranks and some parameter names it must have with Transformer Engine.

    Attributes:
        settings: fields of Megatron's configuration set after the model is built, because the
            installed megatron-core may be too old for them.
        grouped: whether all experts of a rank are one parameter.
        buffered: whether these parameters lie in a flat buffer of DDP.
    """

    family: str
    model: Values = field(default_factory=dict)
    actor: Values = field(default_factory=dict)
    names: tuple[str, ...] = ()
    settings: Values = field(default_factory=dict)
    grouped: bool = False
    buffered: bool = False


DENSE_NAMES = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
EXPERT_NAMES = ("self_attention.linear_qkv.layer_norm_weight", "mlp.experts.linear_fc1.weight3")
LATENT_NAMES = (
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "mlp.experts.linear_fc1.weight7",
)
CASES = {
    **{
        family: Case(family, actor=SP2, names=DENSE_NAMES)
        for family in ("llama", "qwen2", "qwen3", "glm", "glm4")
    },
    **{family: Case(family, actor=SP2) for family in ("gemma2", "gemma3", "gpt2")},
    "qwen3_moe ep2": Case("qwen3_moe", actor=EP2, names=EXPERT_NAMES),
    "qwen3_moe tp2 etp2": Case("qwen3_moe", actor=SP2, names=EXPERT_NAMES),
    "qwen3_moe tp2 etp2 interleaved": Case(
        "qwen3_moe", actor=SP2, settings={"moe_mlp_glu_interleave_size": 2}
    ),
    "qwen3_moe ep2 one parameter": Case("qwen3_moe", actor=EP2, grouped=True),
    "qwen3_moe ep2 one parameter in a buffer": Case(
        "qwen3_moe", actor=EP2, grouped=True, buffered=True
    ),
    "qwen2_moe tp2 ep2 etp1": Case("qwen2_moe", actor={**SP2, **EP2, **ETP1}, names=EXPERT_NAMES),
    "mixtral ep2": Case("mixtral", actor=EP2, names=EXPERT_NAMES),
    "deepseek_v2 tp2": Case("deepseek_v2", {"q_lora_rank": None}, SP2, LATENT_NAMES),
    "deepseek_v3 tp2 ep2 etp1": Case(
        "deepseek_v3", {"mtp_layers": 2}, {**SP2, **EP2, **ETP1}, LATENT_NAMES
    ),
}


@dataclass(frozen=True)
class RankView:
    """State of one rank.

    Attributes:
        layout: the adaptor's records.
        shapes: of all parameters, by the names in the whole model.
        unlisted: tensors reachable from the model but missing in the adaptor's buffers.
        moved: result of `moved` after the experts of the first layer got other memory.
        no_packing: reason why rows with several sequences are refused, or "".
        packed: Megatron's arguments and communicated shape for such rows; empty if refused.
    """

    layout: Layout
    shapes: dict[str, Shape]
    unlisted: list[str]
    moved: list[str]
    no_packing: str
    packed: Values


NUM_RANKS = 2


def views_of_ranks(cases: dict[str, Case], paths: dict[str, Path]) -> dict[str, list[RankView]]:
    """Build the cases on all ranks; runs in a separate process because of the mock."""
    mock_transformer_engine.install()
    return {
        name: [view_of(case, paths[name], rank) for rank in range(NUM_RANKS)]
        for name, case in cases.items()
    }


def view_of(case: Case, path: Path, rank: int) -> RankView:
    config = actor_config(**case.actor)
    with fake_rank(config, rank, NUM_RANKS):
        from hybrid_engine.backends.megatron import megatron_config
        from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
        from hybrid_engine.backends.megatron.model_tensors import ModelTensors
        from hybrid_engine.trainer.megatron import build
        from tests.harness.reachable import reachable

        # Without a GPU Transformer Engine counts as missing.
        build.has_transformer_engine = megatron_config.has_transformer_engine = lambda: True
        table = table_for(read_config(path))
        chunks, _ = build.build_model(
            config, table, read_config(path), NUM_RANKS, weights_only=True
        )
        vars(chunks[0].config).update(case.settings)
        modules = list(chunks[0].modules())
        grouped = [
            module
            for module in modules
            if isinstance(module, mock_transformer_engine.GroupedLinear)
        ]
        if case.grouped:
            for module in grouped:
                module.group_weights()
        if case.buffered:
            chunks = [in_expert_buffer(chunks[0], [module.weight for module in grouped])]
        adaptor = MegatronAdaptor(ModelTensors(chunks, table))
        assert any(
            isinstance(module, mock_transformer_engine.Linear) for module in chunks[0].modules()
        )
        layout = adaptor.layout()
        shapes = {name: tuple(tensor.shape) for name, tensor in adaptor.model.named_weights()}
        listed = {storage_of(name, flat)[1] for name, flat in adaptor.buffers().items()}
        unlisted = [
            tensor.owner
            for tensor in reachable(model=chunks)
            if not tensor.stays and storage_of(tensor.owner, tensor.tensor)[1] not in listed
        ]
        if case.grouped:
            # DDP and optimizers replace the memory behind a GroupedTensor.
            grouped[0].weight.rowwise_data = grouped[0].weight.rowwise_data.clone()
        return RankView(
            layout, shapes, unlisted, adaptor.fingerprint.moved(), *packed_inputs(chunks)
        )


SEQUENCE_IDS = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0], [5, 3, 3, 3, 3, 4, 4, 4]])


def packed_inputs(chunks: Sequence[torch.nn.Module]) -> tuple[str, Values]:
    """Return the reason packing is refused, and the arguments the engine would pass."""
    from hybrid_engine.trainer.megatron.model_inputs import ModelInputs

    inputs = ModelInputs(chunks)
    rows = Rows(torch.arange(16).view(2, 8), sequence_ids=SEQUENCE_IDS)
    if inputs.no_packing:
        return inputs.no_packing, {}
    alone = inputs.arguments(Rows(rows.tokens))
    return "", {
        **inputs.arguments(rows),
        "shape": inputs.shape_of(rows),
        "mask of one sequence": alone["attention_mask"],
    }


PADDING = 64  # elements between the parameters of a flat buffer


def in_expert_buffer(
    model: torch.nn.Module, params: Sequence[torch.nn.Parameter]
) -> torch.nn.Module:
    """Stand in for DDP of megatron-core 0.19: each `GroupedTensor` is a slot of one flat buffer."""
    from megatron.core.distributed import DistributedDataParallel

    slots = {}
    end = 0
    for index, param in enumerate(params):
        start = end + PADDING
        end = start + param.numel()
        slots[param] = (start, end, index)
    flat = torch.zeros(end)
    for param, (start, end, _) in slots.items():
        param.rowwise_data = flat[start:end]
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    ddp.module = model
    ddp.buffers = []
    ddp.bucket_groups = []
    ddp.expert_parallel_bucket_groups = []
    config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=False)
    gradients = torch.zeros_like(flat)
    ddp.expert_parallel_buffers = [
        SimpleNamespace(
            param_data=flat, grad_data=gradients, param_index_map=slots, ddp_config=config
        )
    ]
    return ddp


@pytest.fixture(scope="module")
def views(engines: Ranks, zoo: Zoo) -> dict[str, tuple[ModelTable, list[RankView]]]:
    """Map each case to its table and the views of the ranks."""
    paths = {name: zoo.path(case.family, **case.model) for name, case in CASES.items()}
    ranks = engines.run_alone(views_of_ranks, CASES, paths)
    return {name: (table_for(read_config(path)), ranks[name]) for name, path in paths.items()}


Views = dict[str, tuple[ModelTable, list[RankView]]]


def test_ranks_hold_the_whole_checkpoint_together(views: Views) -> None:
    for name, (table, ranks) in views.items():
        merged = Layout.merge(view.layout for view in ranks)
        assert layout_faults(merged, exact=False) == [], name
        assert merged.tensors == table.shapes, name
        # The local spec would also hold it, by other names.
        parameters = {f"decoder.layers.1.{parameter}" for parameter in CASES[name].names}
        assert parameters <= {parameter for view in ranks for parameter in view.shapes}, name


def test_packed_rows_become_one_row_with_sequence_offsets(views: Views) -> None:
    for name, (_table, ranks) in views.items():
        for view in ranks:
            if name.startswith("deepseek_v3"):
                assert "2 MTP layers" in view.no_packing
                continue
            packed = view.packed  # arguments only: Transformer Engine needs a GPU
            if name == "gemma2":  # capped scores: megatron-core's own attention, with a mask
                assert packed["attention_mask"].shape == (2, 1, 8, 8)
                assert packed["shape"] == (2, 8)
                assert packed["mask of one sequence"].shape == (1, 1, 8, 8)
                continue
            assert packed["attention_mask"] is packed["mask of one sequence"] is None, name
            assert packed["shape"] == (1, 16)
            assert packed["input_ids"].tolist() == [list(range(16))]
            assert packed["position_ids"].tolist() == [
                [0, 1, 2, 0, 1, 0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2]
            ]
            params = packed["packed_seq_params"]
            assert params.qkv_format == "thd"
            assert (
                params.cu_seqlens_q.tolist()
                == params.cu_seqlens_kv.tolist()
                == [0, 3, 5, 8, 9, 13, 16]
            )
            assert params.cu_seqlens_q.dtype is torch.int32
            assert (params.max_seqlen_q, params.max_seqlen_kv) == (4, 4)


def test_rows_of_interleaved_experts_lie_in_alternating_blocks(views: Views) -> None:
    _table, ranks = views["qwen3_moe tp2 etp2 interleaved"]
    for rank, view in enumerate(ranks):
        rows, width = view.shapes["decoder.layers.0.mlp.experts.linear_fc1.weight3"]
        held = {
            (shard.region.offsets[0], shard.region.tensor.split(".")[-2]): shard.place.offset
            // width
            for shard in view.layout.shards
            if shard.region.tensor.startswith("model.layers.0.mlp.experts.3.")
            and "down" not in shard.region.tensor
        }
        first = rank * rows // 2  # gate and up have rows / 2 each on a rank
        blocks = [
            (first + row, part)
            for row in range(0, rows // 2, 2)
            for part in ("gate_proj", "up_proj")
        ]
        assert [held[block] for block in blocks] == list(range(0, rows, 2))
        assert len(held) == len(blocks) > 2


def test_experts_in_one_parameter_have_separate_records(views: Views) -> None:
    _, separate = views["qwen3_moe ep2"]
    table, grouped = views["qwen3_moe ep2 one parameter"]
    num_experts = table.dims.num_experts // NUM_RANKS
    for rank, (view, other) in enumerate(zip(grouped, separate, strict=True)):
        fc1 = "decoder.layers.0.mlp.experts.linear_fc1.weight"
        _, rows, columns = view.shapes[fc1]
        assert (num_experts, rows, columns) == view.shapes[fc1]
        places = {
            shard.region.tensor: (shard.place.buffer.name, shard.place.offset)
            for shard in view.layout.shards
            if shard.region.tensor.startswith("model.layers.0.mlp.experts.")
            and "gate_proj" in shard.region.tensor
        }
        assert places == {
            f"model.layers.0.mlp.experts.{rank * num_experts + index}.gate_proj.weight": (
                fc1,
                index * rows * columns,
            )
            for index in range(num_experts)
        }
        assert {shard.region for shard in view.layout.shards} == {
            shard.region for shard in other.layout.shards
        }
        assert view.unlisted == other.unlisted
        assert (view.moved, other.moved) == ([fc1], [])


def test_experts_in_one_parameter_are_placed_in_their_flat_buffer(views: Views) -> None:
    _, separate = views["qwen3_moe ep2 one parameter"]
    _, buffered = views["qwen3_moe ep2 one parameter in a buffer"]
    for view, other in zip(buffered, separate, strict=True):
        experts = [name for name in view.shapes if ".experts.linear_fc" in name]
        starts = {}
        end = 0
        for name in experts:
            starts[name] = end + PADDING
            end = starts[name] + math.prod(view.shapes[name])
        expected = {
            (shard.region, starts[shard.place.buffer.name] + shard.place.offset)
            for shard in other.layout.shards
            if shard.place.buffer.name in starts
        }
        places = {
            (shard.region, shard.place.offset)
            for shard in view.layout.shards
            if shard.place.buffer.name == "chunk0.expert0"
        }
        assert places == expected
        assert len(experts) > 1
        assert view.moved == [f"module.{experts[0]}"]  # in DDP
