"""Sharding of a transformers model, and location of this rank's part of each sharded tensor."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hybrid_engine.backends.fsdp.internals import StridedShard, checkpoint_wrapper
from hybrid_engine.backends.fsdp.model_checks import require_sharded, require_whole
from hybrid_engine.backends.fsdp.names import transformers_model
from hybrid_engine.backends.training_side import (
    dtype_name,
    flat_storage_of,
    parts_in_elastic_buffers,
)
from hybrid_engine.compute_check.fingerprint import Fingerprint
from hybrid_engine.config import FsdpConfig
from hybrid_engine.errors import ModelError
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.regions import LocalBox, Offsets, Shape

_COMPUTE_DTYPES = {
    "no": None,
    "amp": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Compute dtype by `mixed_precision`; None: the dtype of the weights."""

_mesh_numbers = itertools.count()
"""Numbers of the meshes of this process; see `mesh_of`."""


class ShardedTensors:
    """This rank's part of a model: its parameters are sharded, its buffers equal on all ranks.

    Parameters that split evenly are moved into one elastic buffer per dtype, whose memory is
    released page by page and which peers on the host can read. FSDP pads the last part of other
    parameters, in memory that it allocates, so these are not moved.

    Args:
        model: model with `fully_shard` applied. No parameter may be added or replaced afterwards.
        is_whole: no part of the model is sharded. Every rank has a copy, and the training loop
            keeps the copies equal.

    Attributes:
        tensors: name in the state dict -> the model's tensor: parameters (DTensors) and persistent
            buffers.
        parts: name -> this rank's part of the tensor.
        buffer_of: name -> name of the buffer that contains the part.
        flat_buffers: live 1-D storage by name.
        fingerprint: structure of the model when its tensors were located.

    Raises:
        ModelError: listing every reason why the model cannot be read.
    """

    def __init__(self, model: torch.nn.Module, is_whole: bool = False) -> None:
        if is_whole:
            require_whole(model)
        else:
            require_sharded(model)
        reshard(model)
        _move_into_elastic_buffers(model)
        self.tensors = dict(model.state_dict(keep_vars=True))
        self.flat_buffers: TensorDict = {}
        self.parts: dict[str, LocalBox] = {}
        self.buffer_of: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            local = local_of(tensor)
            offsets, lengths = box_of(tensor)
            buffer = name
            if exported_buffer_of(local) is not None:
                buffer = f"parameters in {dtype_name(local)}"
            start = int(local.storage_offset())
            self.parts[name] = LocalBox(offsets, lengths, start, tuple(local.stride()))
            self.buffer_of[name] = buffer
            # The storage counts: FSDP pads, so a rank without rows has memory, too.
            if local.untyped_storage().nbytes() and buffer not in self.flat_buffers:
                self.flat_buffers[buffer] = flat_storage_of(local)
        self.fingerprint = Fingerprint([model], stored_part)


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters, so that all modules have their sharded parameters again.

    Some modules keep gathered parameters after a forward pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory and detached from autograd."""
    local = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def stored_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as it is stored, without an operation of autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def box_of(tensor: torch.Tensor) -> tuple[Offsets, Shape]:
    """Return offsets and lengths, in elements per dim, of this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _move_into_elastic_buffers(model: torch.nn.Module) -> None:
    even = [parameter for parameter in model.parameters() if _is_even(parameter)]
    parts = parts_in_elastic_buffers([local_of(parameter) for parameter in even])
    moved: dict[int, torch.Tensor] = {}
    for parameter, part in zip(even, parts, strict=True):
        moved[id(parameter)] = part
        if isinstance(parameter, DTensor):
            moved[id(parameter)] = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
    # `_apply` replaces the data of parameters and keeps the objects: optimizers refer to them.
    model._apply(lambda tensor: moved.get(id(tensor), tensor))


def _is_even(parameter: torch.nn.Parameter) -> bool:
    """Return whether all ranks hold equal, contiguous parts of a parameter.

    FSDP copies other shards, so only these can be in a buffer of the caller's.
    """
    if not isinstance(parameter, DTensor):
        return parameter.numel() > 0 and parameter.is_contiguous()
    ranks_by_dim: dict[int, int] = {}
    # A mesh (2, 4) that splits dim 0 twice needs a multiple of 8 rows; replicated dims of the mesh
    # split nothing.
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            ranks_by_dim[placement.dim] = ranks_by_dim.get(placement.dim, 1) * size
    divides = all(parameter.shape[dim] % num_ranks == 0 for dim, num_ranks in ranks_by_dim.items())
    return divides and parameter.numel() > 0 and local_of(parameter).is_contiguous()


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a model or to a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def shard_model(
    model: torch.nn.Module,
    config: FsdpConfig,
    mesh: DeviceMesh,
    before_each: Callable[[torch.nn.Module], None] = lambda module: None,
) -> None:
    """Apply `fully_shard` to a model, in place. Collective.

    Args:
        model: a transformers model; its parameters move to the mesh's device. It may be on the meta
            device if `before_each` gives each module memory.
        config: options of the sharding.
        mesh: mesh of all ranks, from `mesh_of`.
        before_each: called with each layer, and last with the model, just before it is sharded.

    Raises:
        ModelError: the model is sharded already, or does not name the classes of its layers.
    """
    if is_sharded(model):
        raise ModelError(
            "the model is sharded already: leave train_config out, or pass the model as it was "
            "before sharding",
            code="already-sharded",
        )
    inner = transformers_model(model)
    layer_classes = set(getattr(inner, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    if not layers:
        raise ModelError(
            f"{type(inner).__name__} does not name the classes of its layers "
            "(_no_split_modules): call fully_shard on the layers and on the model, and leave "
            "train_config out",
            code="unknown-layer-classes",
        )
    # Before sharding, because `fully_shard` must be applied to the wrappers.
    if config.activation_checkpointing:
        layers = _checkpointed(model, layers)
    compute_dtype = _COMPUTE_DTYPES[config.mixed_precision]
    # With mixed precision, gradients are reduced in float32.
    reduce_dtype = torch.float32 if compute_dtype else None
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.sharding_strategy != "SHARD_GRAD_OP",
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype),
    }
    # The model last: `fully_shard` leaves out parameters of modules that are sharded already.
    for module in (*layers, inner):
        before_each(module)
        for part in _in_other_dtypes(module):
            # Computes in its own dtype, as without sharding.
            fully_shard(part, **options | {"mp_policy": MixedPrecisionPolicy()})
        fully_shard(module, **options)


def _in_other_dtypes(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the largest parts of a module whose parameters all have another dtype than most do.

    FSDP shards parameters of one dtype together. Some routers have float32 in a bfloat16 model, and
    so do PEFT's adapters.
    """
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    # By elements: small parameters, such as norms in float32, do not decide however many they are.
    ((usual, _),) = sizes.most_common(1)
    parts: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for part in module.modules():  # outer modules come first
        dtypes = {parameter.dtype for parameter in part.parameters()}
        # Not PEFT's dictionaries of adapters: FSDP gathers for the `forward` of a module.
        is_computing = not isinstance(part, torch.nn.ModuleDict)
        if part not in inside and is_computing and dtypes and usual not in dtypes:
            parts.append(part)
            inside.update(part.modules())
    return parts


def _checkpointed(
    model: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
) -> list[torch.nn.Module]:
    """Wrap layers of a model so that only their inputs are kept for the backward pass."""
    wrapped = {layer: checkpoint_wrapper(layer) for layer in layers}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # A wrapper keeps the layer as its child.
            if child in wrapped and module is not wrapped[child]:
                setattr(module, name, wrapped[child])
    return list(wrapped.values())


def mesh_of(config: FsdpConfig, device: torch.device, world_size: int) -> DeviceMesh:
    """Return the mesh of all ranks over which a configuration shards. Collective.

    With replicas it has the dims (replicas, shards).
    """
    if config.replicas == 1:
        return init_device_mesh(device.type, (world_size,))
    shape = (config.replicas, world_size // config.replicas)
    # torch caches the redistribution of tensors by mesh, and meshes compare by their names. Unique
    # names keep torch from using groups of an equal mesh that have ended.
    number = next(_mesh_numbers)
    names = (f"replicas_{number}", f"shards_{number}")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)
