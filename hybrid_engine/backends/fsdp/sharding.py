"""Shards a transformers model as a configuration says: each of its layers, then the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hybrid_engine.backends.fsdp.internals import checkpoint_wrapper
from hybrid_engine.backends.fsdp.wrapped_names import transformers_model
from hybrid_engine.config import FsdpConfig
from hybrid_engine.errors import ModelError

_COMPUTES_IN = {"no": None, "amp": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` was applied to it or to a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def shard_model(
    model: torch.nn.Module,
    config: FsdpConfig,
    mesh: DeviceMesh,
    before_each: Callable[[torch.nn.Module], None] = lambda module: None,
) -> None:
    """Apply `fully_shard`, in place. Collective.

    Args:
        model: a transformers model on any device but meta; its parameters move to that of the mesh.
        config: how.
        mesh: of all ranks; see `mesh_of`.
        before_each: called with each layer, and at last with the model, just before it is sharded; what had no memory
            until then has it afterwards.

    Raises ModelError for a model that is sharded already, or that does not say what its layers are.
    """
    if is_sharded(model):
        raise ModelError("the model is sharded already: leave train_config out, or pass the model as it was")
    inner = transformers_model(model)
    kinds = set(getattr(inner, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ModelError(
            f"{type(inner).__name__} does not say what its layers are (_no_split_modules): call fully_shard on them "
            "and on the model, and leave train_config out"
        )
    if config.activation_checkpointing:
        layers = _checkpointed(model, layers)
    computes_in = _COMPUTES_IN[config.mixed_precision]
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.sharding_strategy != "SHARD_GRAD_OP",
        "mp_policy": MixedPrecisionPolicy(computes_in, torch.float32 if computes_in else None),
    }
    for module in (*layers, inner):
        before_each(module)
        fully_shard(module, **options)


def _checkpointed(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Wrap each of a model's layers, so that its input alone is kept for the backward pass."""
    wrapped = {layer: checkpoint_wrapper(layer) for layer in layers}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in wrapped and module is not wrapped[child]:
                setattr(module, name, wrapped[child])
    return list(wrapped.values())


def mesh_of(config: FsdpConfig, device: torch.device, world_size: int) -> DeviceMesh:
    """All ranks, as a configuration shards over them. Collective."""
    if config.replicas == 1:
        return init_device_mesh(device.type, (world_size,))
    shape = (config.replicas, world_size // config.replicas)
    # torch remembers how tensors of a mesh are redistributed, by a mesh that is equal: names of its own keep one whose
    # groups have ended from being taken for this one
    number = next(_mesh_numbers)
    return init_device_mesh(device.type, shape, mesh_dim_names=(f"replicas_{number}", f"shards_{number}"))


_mesh_numbers = itertools.count()
