"""Shards a transformers model as a configuration says, and finds this rank's part of each tensor of a sharded one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hybrid_engine.backends.fsdp.internals import StridedShard, checkpoint_wrapper
from hybrid_engine.backends.fsdp.model_checks import require_sharded, require_whole
from hybrid_engine.backends.fsdp.names import transformers_model
from hybrid_engine.backends.training_side import dtype_name, flat_storage_of, parts_in_elastic_buffers
from hybrid_engine.config import FsdpConfig
from hybrid_engine.errors import ModelError
from hybrid_engine.layouts.sharded import LocalBox
from hybrid_engine.memory.elastic import exported_buffer_of


class ShardedTensors:
    """Of one model. Its parameters are sharded, its buffers are the same on all ranks.

    Args:
        model: with `fully_shard` applied to it, after which no parameter may be added or replaced.
        is_whole: no part of it is sharded: every rank has a copy, and whoever trains keeps them alike.

    Attributes:
        tensors: name -> the model's own tensor, as its state dict has it: parameters (DTensors) and persistent buffers.
        parts: what this rank holds of each.
        buffer_of: name of the buffer in which that lies.
        flat_buffers: live 1-D storage by name.

    Parameters that split evenly are moved into one elastic buffer for each dtype, whose memory comes and goes page by
    page and which peers on the host can read. FSDP pads the last part of any other, in memory of its own: such a
    parameter stays where it is.

    Raises ModelError with a line for everything about the model that cannot be read.
    """

    def __init__(self, model: torch.nn.Module, is_whole: bool = False) -> None:
        self._model = model
        if is_whole:
            require_whole(model)
        else:
            require_sharded(model)
        reshard(model)
        _move_into_elastic_buffers(model)
        self.tensors = dict(model.state_dict(keep_vars=True))
        self.flat_buffers: dict[str, torch.Tensor] = {}
        self.parts: dict[str, LocalBox] = {}
        self.buffer_of: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            local = local_of(tensor)
            offsets, lengths = box_of(tensor)
            buffer = f"parameters in {dtype_name(local)}" if exported_buffer_of(local) is not None else name
            self.parts[name] = LocalBox(offsets, lengths, int(local.storage_offset()), tuple(local.stride()))
            self.buffer_of[name] = buffer
            # a rank without rows has a part of padding, and memory for it
            if local.untyped_storage().nbytes() and buffer not in self.flat_buffers:
                self.flat_buffers[buffer] = flat_storage_of(local)

    def moved(self) -> list[str]:
        """Names of tensors that are not where `parts` says, or not the model's any more."""
        # not by state_dict(), which is refused while a switch is under way: other names, but the same tensors
        parameters = {id(tensor): name for name, tensor in self._model.named_parameters()}
        present = parameters.keys() | set(map(id, self._model.buffers()))
        gone = [name for name, own in self.tensors.items() if id(own) not in present or not self._is_home(name, own)]
        known = set(map(id, self.tensors.values()))
        return [*dict.fromkeys(gone + [name for key, name in parameters.items() if key not in known])]

    def _is_home(self, name: str, tensor: torch.Tensor) -> bool:
        local = local_of(tensor)
        if not local.numel():
            return True
        flat = self.flat_buffers[self.buffer_of[name]]
        return local.data_ptr() == flat.data_ptr() + self.parts[name].start * flat.element_size()


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters, which some modules keep after a forward pass: theirs are the sharded ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, as memory: without autograd."""
    local = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def box_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and lengths of this rank's part in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _move_into_elastic_buffers(model: torch.nn.Module) -> None:
    even = [parameter for parameter in model.parameters() if _is_even(parameter)]
    parts = parts_in_elastic_buffers([local_of(parameter) for parameter in even])
    moved = {id(each): _in_place_of(each, part) for each, part in zip(even, parts, strict=True)}
    # a module's parameters keep their identity: optimizers refer to them
    model._apply(lambda tensor: moved.get(id(tensor), tensor))


def _in_place_of(parameter: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return part
    placed = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, *placed, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _is_even(parameter: torch.nn.Parameter) -> bool:
    """Whether all ranks hold as much of it, all of it contiguous: FSDP then uses the memory that it is given."""
    if not isinstance(parameter, DTensor):
        return parameter.numel() > 0 and parameter.is_contiguous()
    ranks_by_dim: dict[int, int] = {}
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            ranks_by_dim[placement.dim] = ranks_by_dim.get(placement.dim, 1) * size
    divides = all(parameter.shape[dim] % num_ranks == 0 for dim, num_ranks in ranks_by_dim.items())
    return divides and parameter.numel() > 0 and local_of(parameter).is_contiguous()


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
