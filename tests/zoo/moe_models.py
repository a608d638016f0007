"""Tiny models with experts, as `tiny_models` has dense ones.

path = save_moe_model(directory, "deepseek_v3", mtp_layers=1)   # transformers writes all but the mtp layers, which it
                                                                # does not have; their tensors are random

The sizes differ from each other wherever a rule could mix them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hybrid_engine.models import table_for
from hybrid_engine.records.layout import Layout
from tests.zoo.tiny_models import (
    SIZES,
    label_log_probs,
    read_canonical,
    read_config,
    region_slices,
    view_of,
)

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
# Latent attention: 8 rotary and 6 other elements in a query, 10 in a value.
LATENT: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
    **EXPERTS,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "routed_scaling_factor": 1.7,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
# family -> (transformers' name, sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **EXPERTS, "num_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **{name: value for name, value in SIZES.items() if name != "head_dim"},
            **EXPERTS,
            "num_experts": 4,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "norm_topk_prob": False, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}),
}


def build_moe_model(family: str, **overrides: Any) -> torch.nn.Module:
    """A transformers model of one of `FAMILIES`, fp32, in which every parameter and router bias is random."""
    import transformers

    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **overrides})
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            base = 1.0 if "norm" in parameter_name else 0.0
            parameter.copy_(base + 0.2 * torch.randn(parameter.shape, generator=generator))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def save_moe_model(directory: Path, family: str, mtp_layers: int = 0, **overrides: Any) -> Path:
    """Write such a model, with random tensors for the layers that transformers leaves out; returns the directory."""
    if mtp_layers:
        overrides["num_mtp_layers"] = mtp_layers
    build_moe_model(family, **overrides).save_pretrained(directory)
    table = table_for(read_config(directory))
    generator = torch.Generator().manual_seed(8)
    rest = {
        name: (1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in table.shapes.items()
        if not table.is_served(name)
    }
    if rest:
        save_file(rest, directory / "multi_token_prediction.safetensors")
    return directory


def build_mtp_layer(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], layer: int) -> torch.nn.Module:
    """transformers' own layer for multi-token prediction, with the checkpoint tensors of layer number `layer`.

    Args:
        model: the DeepSeek-V3 model the layer belongs to.
        tensors: the checkpoint.
    """
    from transformers.modeling_layers import MtpLayer

    decoder_layer = model.model.layers[-1]
    result = MtpLayer(model.config, type(decoder_layer), type(decoder_layer.input_layernorm), layer).eval()
    prefix = f"model.layers.{layer}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    state = {name: own.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")}
    state = {f"{name}.weight": tensor for name, tensor in state.items()}
    state["post_norm.weight"] = own.pop("shared_head.norm.weight")
    experts = range(model.config.n_routed_experts)

    def stacked(projection: str) -> torch.Tensor:
        return torch.stack([own.pop(f"mlp.experts.{expert}.{projection}_proj.weight") for expert in experts])

    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([stacked("gate"), stacked("up")], dim=1)
    state["mtp_block.mlp.experts.down_proj"] = stacked("down")
    state |= {f"mtp_block.{name}": tensor for name, tensor in own.items()}
    result.load_state_dict(state)
    return result


def mtp_losses(path: Path, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> list[float]:
    """Mean loss of each layer for multi-token prediction, computed with transformers' layers.

    Layer k sees at token t the embedding of token t + k + 1, and predicts the label after it; what would lie past the
    end counts as token 0, is masked in the loss, and is seen by no token before it. A `mask` in the batch has the same
    number of ones in every sequence.
    """
    mask = batch.get("mask", torch.ones(batch["tokens"].shape))
    tensors, num_layers = read_canonical(path), model.config.num_hidden_layers
    tokens, labels, losses = batch["tokens"], batch["labels"], []
    length = tokens.shape[1]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state
        positions = torch.arange(length)[None]
        angles = model.model.rotary_emb(hidden, positions)
        future = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for index in range(model.config.num_nextn_predict_layers):
            tokens, labels = (torch.cat([row[:, 1:], torch.zeros_like(row[:, :1])], 1) for row in (tokens, labels))
            layer = build_mtp_layer(model, tensors, num_layers + index)
            embedded = model.model.embed_tokens(tokens)
            hidden = layer(embedded, hidden, angles, future, positions, None)
            losses_here = -label_log_probs(model.lm_head(hidden), labels)[:, : length - index - 1]
            losses.append(losses_here[mask[:, index + 1 :] == 1].mean().item())
    return losses


def whole_weights(weights: Any) -> dict[str, torch.Tensor]:
    """The checkpoint tensors that the ranks' training weights hold together, read through the records; on every rank.

    A region that several ranks hold must be the same on all of them.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    own = (weights.layout(), {name: flat.clone() for name, flat in weights.buffers().items()})
    dist.all_gather_object(everyone, own)
    layout = Layout.merge(rank_layout for rank_layout, _ in everyone)
    found = {name: torch.full(shape, torch.nan) for name, shape in layout.tensors.items()}
    for shard in layout.shards:
        values = view_of(everyone[shard.place.buffer.rank][1], shard).float()
        target = found[shard.region.tensor][region_slices(shard)]
        assert torch.all(target.isnan() | (target == values)), f"ranks differ in {shard.region}"
        target.copy_(values)
    return found
