"""The oracle of the adaptor: what Megatron says in `sharded_state_dict()`, put together and unpacked by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hybrid_engine.models import ModelTable


@dataclass(frozen=True)
class MegatronTensor:
    """One entry of `sharded_state_dict()`: part of a tensor of the whole model, in Megatron's own packing."""

    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_main_replica: bool
    values: np.ndarray


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


def whole_tensors(parts: Iterable[MegatronTensor]) -> dict[str, np.ndarray]:
    """Megatron's tensors put together from the main replicas; `decoder.layers.…` keys get their layer number back."""
    whole: dict[str, np.ndarray] = {}
    for tensor in (each for each in parts if each.is_main_replica):
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
