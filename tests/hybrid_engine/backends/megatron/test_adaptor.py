"""The Megatron adaptor's records against what Megatron itself says: `sharded_state_dict()`, unpacked here by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ParameterMismatchError, WeightError
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.validation import layout_faults
from tests.harness.core_versions import without
from tests.harness.launch import Ranks, remembered
from tests.zoo.families import read_config
from tests.zoo.megatron_models import DENSE_FLOAT32, parallel_state_of, region_slices, running
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

TWO_RANKS = {
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
}
FOUR_RANKS = {
    "tp2 pp2": Case("qwen3", TIED, {**TP2, **PP2}),
    "tp2 dp2, overlap": Case("qwen2", {}, {**TP2, **OVERLAP}),
    "tp4, two kv heads": Case("llama", {}, {"tensor_model_parallel_size": 4}),
    "experts tp2 ep2 etp2": Case("deepseek_v3", {}, {**SP2, **EP2}),
    "experts tp2 pp2 ep2 etp1": Case("mixtral", {}, {**SP2, **PP2, **EP2, **ETP1}),
}
ALL_CASES = {
    2: without(
        TWO_RANKS, "tp2, one kv head", "experts tp2, shared and gated", "experts tp2 ep2 etp1, latent attention, mtp"
    ),
    4: without(FOUR_RANKS, "tp4, two kv heads", "experts tp2 ep2 etp2"),
}


@dataclass(frozen=True)
class MegatronTensor:
    """One entry of `sharded_state_dict()`: part of a tensor of the whole model, in Megatron's own packing."""

    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_main_replica: bool
    values: np.ndarray


@dataclass(frozen=True)
class RankView:
    """What one rank says, twice: by the adaptor and by Megatron."""

    layout: Layout
    buffers: Mapping[str, np.ndarray]
    megatron: list[MegatronTensor]


def views_of_rank(cases: dict[str, Case], paths: dict[str, Path]) -> dict[str, RankView]:
    """On every rank: each case in turn, with weights that do not depend on the sharding."""
    return {name: view_of_rank(case, paths[name]) for name, case in cases.items()}


def view_of_rank(case: Case, path: Path) -> RankView:
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


def megatron_tensors(chunk: torch.nn.Module) -> Iterator[MegatronTensor]:
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    from tests.megatron_patches.gpt import sharded_tensors

    for tensor in sharded_tensors(chunk):
        yield MegatronTensor(
            key=tensor.key,
            global_shape=tuple(tensor.global_shape),
            global_offset=tuple(tensor.global_offset),
            is_main_replica=is_main_replica(tensor.replica_id),
            values=tensor.data.detach().float().numpy().copy(),
        )


Launched = Callable[[int], tuple[dict[str, Path], dict[str, list[Any]]]]


@pytest.fixture(scope="module")
def launched(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Number of ranks -> the models of its cases, and by name what everything that runs on so many brought back."""

    @remembered
    def launch_on(num_ranks: int) -> tuple[dict[str, Path], dict[str, list[Any]]]:
        cases = ALL_CASES[num_ranks]
        paths = {
            name: save_model(tmp_path_factory.mktemp("model"), case.family, **case.model)
            for name, case in cases.items()
        }
        calls: dict[str, Any] = {"views": (views_of_rank, (cases, paths))}
        if num_ranks == 2:
            path = save_model(tmp_path_factory.mktemp("model"), "qwen3")
            calls |= {"values": (prepared_and_not, (path,)), "refusals": (refusals, (path,))}
        return paths, engines.launch_in_turn(num_ranks, calls)

    return launch_on


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def rank_views(request: pytest.FixtureRequest, launched: Launched) -> dict[str, tuple[ModelTable, list[RankView]]]:
    """Case -> (its table, what each rank saw)."""
    paths, found = launched(request.param)
    views = found["views"]
    return {name: (table_for(read_config(path)), [view[name] for view in views]) for name, path in paths.items()}


def test_records_find_what_megatron_says(rank_views: dict[str, tuple[ModelTable, list[RankView]]]) -> None:
    for case, (table, views) in rank_views.items():
        expected = unpacked(whole_megatron_tensors(views), table)
        assert expected.keys() == table.shapes.keys(), case
        found = from_records(views)
        assert found.keys() == table.shapes.keys(), case
        for name in table.shapes:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{case}: {name}")


def test_layouts_are_sound(rank_views: dict[str, tuple[ModelTable, list[RankView]]]) -> None:
    for case, (table, views) in rank_views.items():
        merged = Layout.merge(view.layout for view in views)
        assert layout_faults(merged, exact=False) == [], case
        assert merged.tensors == table.shapes, case
        for view in views:
            assert {shard.region.tensor for shard in view.layout.shards} == set(view.layout.tensors), case
            for shard in view.layout.shards:
                description = view.layout.buffers[shard.place.buffer]
                assert description.numel == view.buffers[shard.place.buffer.name].size
                assert description.exported, f"{case}: {shard.place.buffer}"


def test_every_rank_holds_each_element_once(rank_views: dict[str, tuple[ModelTable, list[RankView]]]) -> None:
    """No tensor parallel rank of a rank's own model parallel group has what another one has, but for replicas."""
    for case, (table, views) in rank_views.items():
        for view in views:
            counts = {name: np.zeros(table.shapes[name], int) for name in view.layout.tensors}
            for shard in view.layout.shards:
                counts[shard.region.tensor][region_slices(shard)] += 1
            assert all(count.max() == 1 for count in counts.values()), case


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


def whole_megatron_tensors(views: list[RankView]) -> dict[str, np.ndarray]:
    """Megatron's tensors put together from the main replicas; `decoder.layers.…` keys get their layer number back."""
    whole: dict[str, np.ndarray] = {}
    for tensor in (tensor for view in views for tensor in view.megatron if tensor.is_main_replica):
        target = whole.setdefault(tensor.key, np.full(tensor.global_shape, np.nan, np.float32))
        lengths = [1] * (len(tensor.global_shape) - tensor.values.ndim) + list(tensor.values.shape)
        part = target[tuple(slice(o, o + n) for o, n in zip(tensor.global_offset, lengths, strict=True))]
        assert np.isnan(part).all(), f"{tensor.key} at {tensor.global_offset} is held twice"
        part[...] = tensor.values.reshape(part.shape)
    assert not any(np.isnan(values).any() for values in whole.values())
    # equal layers are one tensor with a dim for the layer; other layers have their number in the key
    layers = {key: values for key, values in whole.items() if re.match(r"decoder\.layers\.\D", key)}
    others = {key: values for key, values in whole.items() if key not in layers}
    return others | {
        f"{index}.{key.removeprefix('decoder.layers.')}": values[index]
        for key, values in layers.items()
        for index in range(values.shape[0])
    }


def unpacked(megatron: dict[str, np.ndarray], table: ModelTable) -> dict[str, np.ndarray]:
    """Canonical tensors from Megatron's, by hand."""
    dims = table.dims
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    in_layer = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.linear_fc2.bias": "mlp.down_proj.bias",
        **(IN_LATENT_ATTENTION if "model.layers.0.self_attn.kv_b_proj.weight" in table.shapes else {}),
        **BESIDE_EXPERTS,
    }
    is_mixtral = "model.layers.0.block_sparse_moe.gate.weight" in table.shapes
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    shared = "mlp.shared_expert." if "model.layers.0.mlp.shared_expert_gate.weight" in table.shapes else SHARED
    canonical: dict[str, np.ndarray] = {}
    for key, values in megatron.items():
        layer, rest = layer_of(key, dims.num_layers)
        prefix = f"model.layers.{layer}."
        if key in whole:
            canonical[whole[key]] = values[: dims.vocab_size] if values.ndim == 2 else values
        elif rest in in_layer:
            canonical[prefix + in_layer[rest]] = values
        elif rest.startswith("self_attention.linear_qkv."):
            kind = rest.rpartition(".")[2]
            queries = dims.num_heads // dims.num_kv_heads
            heads = values.reshape(dims.num_kv_heads, queries + 2, dims.head_dim, *values.shape[1:])
            parts = {"q": heads[:, :queries], "k": heads[:, queries], "v": heads[:, queries + 1]}
            for part, rows in parts.items():
                canonical[f"{prefix}self_attn.{part}_proj.{kind}"] = rows.reshape(-1, *values.shape[1:])
        elif rest.startswith("mlp.linear_fc1."):
            kind = rest.rpartition(".")[2]
            canonical[f"{prefix}mlp.gate_proj.{kind}"], canonical[f"{prefix}mlp.up_proj.{kind}"] = np.split(values, 2)
        elif rest == "mlp.router.weight":
            canonical[f"{prefix}{'block_sparse_moe' if is_mixtral else 'mlp'}.gate.weight"] = values
        elif rest.startswith("mlp.experts.experts."):
            block = f"{prefix}{'block_sparse_moe' if is_mixtral else 'mlp'}.experts."
            for expert, part in enumerate(values):
                if "linear_fc2" in rest:
                    canonical[f"{block}{expert}.{down}.weight"] = part
                else:
                    canonical[f"{block}{expert}.{gate}.weight"], canonical[f"{block}{expert}.{up}.weight"] = np.split(
                        part, 2
                    )
        elif rest == "mlp.shared_experts.linear_fc1.weight":
            halves = np.split(values, 2)
            canonical[f"{prefix}{shared}gate_proj.weight"], canonical[f"{prefix}{shared}up_proj.weight"] = halves
        elif rest == "mlp.shared_experts.linear_fc2.weight":
            canonical[f"{prefix}{shared}down_proj.weight"] = values
        else:
            raise AssertionError(f"Megatron's {key} is unknown here")
    return canonical


SHARED = "mlp.shared_experts."
IN_LATENT_ATTENTION = {
    f"self_attention.{ours}.weight": f"self_attn.{theirs}.weight"
    for ours, theirs in {
        "linear_q_proj": "q_proj",
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
    }.items()
}
BESIDE_EXPERTS = {
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def layer_of(key: str, num_layers: int) -> tuple[str, str]:
    """Number of the layer in the checkpoint, and the rest of Megatron's key; ("", key) for what is in no layer."""
    if found := re.match(r"(?:decoder\.layers\.)?(\d+)\.(.+)", key):
        return found[1], found[2]
    if found := re.match(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)", key):
        return str(num_layers + int(found[1])), found[2]
    return "", key


# -- values, and what is pending on them ---------------------------------------------------------------------------


def prepared_and_not(path: Path) -> dict[str, Any]:
    """On every rank, after optimizer steps with overlapping gathers: buffers before and after `prepare`."""
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **OVERLAP})) as run:
        batch = {"tokens": torch.arange(12).reshape(1, 12) + 12 * run.engine.dp_rank}
        batch["labels"] = batch["tokens"] + 1
        run.engine.set_learning_rate(1e-2)

        def buffers() -> dict[str, torch.Tensor]:
            return {name: flat.clone() for name, flat in run.engine.weights.buffers().items()}

        seen = []
        for _ in range(2):
            run.engine.train_step(batch, lambda _batch, log_probs: (-log_probs.mean(), {}))
            before = buffers()
            run.engine.weights.prepare()
            seen.append((before, buffers()))
        run.engine.weights.prepare()  # nothing is pending: nothing changes
        return {"steps": seen, "at the end": buffers()}


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in left if not torch.equal(left[name], right[name])]


def test_prepare_finishes_pending_gathers(launched: Launched) -> None:
    """Without `prepare` a data parallel replica still holds the other rank's old weights."""
    first, second = launched(2)[1]["values"]
    for (stale, ready), (other_stale, other_ready) in zip(first["steps"], second["steps"], strict=True):
        assert differing(stale, other_stale), "the replicas agree before prepare: this test shows nothing"
        assert differing(stale, ready)
        assert differing(other_stale, other_ready)
        assert differing(ready, other_ready) == []
    assert differing(first["at the end"], first["steps"][-1][1]) == []


def refusals(path: Path) -> dict[str, str]:
    """On both ranks: the messages about NaN weights, and about a model that is not the table's."""
    messages = {}
    config = ActorConfig(**{**DENSE_FLOAT32, **TP2})
    with running(path, config) as run:
        weights = run.engine.weights
        weights.check_values()
        named = dict(weights.model.named_parameters())
        large = named["decoder.layers.0.self_attention.linear_qkv.weight"]
        kept = large.detach().clone()
        with torch.no_grad():
            large.fill_(1e38)
            weights.check_values()  # their sum is infinite, they are not
            large.copy_(kept)
            named["decoder.layers.1.self_attention.linear_qkv.weight"][3, :2] = float("nan")
            named["decoder.layers.1.self_attention.linear_qkv.weight"][4, 0] = float("-inf")
            named["decoder.final_layernorm.weight"][0] = float("inf")
        with pytest.raises(WeightError) as caught:
            weights.check_values()
        messages["nan"] = str(caught.value)
    with parallel_state_of(config):
        from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
        from hybrid_engine.backends.megatron.build import build_model
        from hybrid_engine.backends.megatron.model_tensors import ModelTensors

        hf_config = read_config(path)
        chunks, _ = build_model(config, table_for(hf_config), hf_config, dist.get_world_size())
        others = {
            "wider": {"intermediate_size": 48},
            "narrower": {"intermediate_size": 32},
            "fewer layers": {"num_hidden_layers": 1},
            "no norms": {"architectures": ["LlamaForCausalLM"]},
            "more heads": {"num_attention_heads": 8},
            "vocabulary": {"vocab_size": 1000},
            "hidden": {"hidden_size": 48},
        }
        for name, change in others.items():
            with pytest.raises(ParameterMismatchError) as caught:
                MegatronAdaptor(ModelTensors(chunks, table_for({**hf_config, **change}))).layout()
            messages[name] = str(caught.value)
    return messages


def test_refusals_name_every_parameter(launched: Launched) -> None:
    for rank, messages in enumerate(launched(2)[1]["refusals"]):
        nan = messages["nan"]
        assert "(2)" in nan
        assert f"decoder.layers.1.self_attention.linear_qkv.weight on rank {rank}" in nan
        assert "model.layers.1.self_attn.k_proj.weight" in nan
        assert "2 NaN, 1 Inf of 768 elements" in nan
        assert "model.norm.weight): 1 Inf of " in nan
        for name in ("wider", "narrower"):
            for layer in range(2):
                assert f"decoder.layers.{layer}.mlp.linear_fc1.weight" in messages[name], name
                assert f"decoder.layers.{layer}.mlp.linear_fc2.weight" in messages[name], name
        assert "model.layers.1.input_layernorm.weight" in messages["fewer layers"]
        assert "decoder.layers.0.self_attention.q_layernorm.weight" in messages["no norms"]
        assert "linear_qkv.weight" in messages["more heads"]
        assert "linear_proj.weight" in messages["more heads"]
        assert "embedding.word_embeddings.weight" in messages["vocabulary"]
        assert "decoder.final_layernorm.weight" in messages["hidden"]
