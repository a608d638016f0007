"""transformers models, sharded by FSDP2 in the usual ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hybrid_engine.backends.fsdp.names import transformers_model


def shard(model: torch.nn.Module, replicas: int = 1, **options: Any) -> torch.nn.Module:
    """Shard each decoder layer and then the model, with several replicas by HSDP."""
    num_shards = dist.get_world_size() // replicas
    if replicas == 1:
        mesh = init_device_mesh("cpu", (num_shards,))
    else:
        mesh = init_device_mesh(
            "cpu", (replicas, num_shards), mesh_dim_names=("replicate", "shard")
        )
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def shard_over_tensor_parallel(model: torch.nn.Module) -> torch.nn.Module:
    """Apply TP=2 with transformers' own plan, then FSDP2, which alone shards norms."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    plan = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        **{"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()},
    }
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh["tp"], plan)  # type: ignore[arg-type]  # dict is invariant
        fully_shard(layer, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"])


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    inner = transformers_model(model)
    body = inner.get_submodule(str(inner.base_model_prefix))
    layers = body.h if hasattr(body, "h") else body.layers
    assert isinstance(layers, torch.nn.ModuleList)
    return layers


def from_config(path: Path, **changes: Any) -> torch.nn.Module:
    """Build a float32 model with random values, the same on all ranks, from a changed config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    # Eager attention honours all settings, such as Gemma's soft cap.
    config = AutoConfig.from_pretrained(path, attn_implementation="eager", **changes)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for tensor in {
            id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()
        }.values():
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.randn(tensor.shape))
    return model


def save(model: torch.nn.Module, path: Path, dtype: torch.dtype) -> None:
    """Write the weights by transformers on rank 0 and keep the existing config.json. Collective."""
    state = {}
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:  # A tied head is the embedding.
            whole = _whole(tensor.detach())
            state[name] = whole if name.endswith("e_score_correction_bias") else whole.to(dtype)
            seen.add(id(tensor))
    if dist.get_rank() == 0:
        config = (path / "config.json").read_text()
        model.save_pretrained(path, state_dict=state)
        (path / "config.json").write_text(config)
    dist.barrier()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
