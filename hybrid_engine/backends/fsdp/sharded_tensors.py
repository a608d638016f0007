"""The tensors of a sharded model on one rank: which part of the whole one each is, and the flat buffer it lies in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from hybrid_engine.backends.flat_buffers import dtype_name
from hybrid_engine.backends.fsdp.internals import StridedShard
from hybrid_engine.backends.fsdp.model_checks import require_sharded
from hybrid_engine.layouts.sharded import LocalBox
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of

_ALIGNMENT = 16  # bytes: kernels that load several elements at once want it, and no element is larger


class ShardedTensors:
    """Of one model. Its parameters are sharded, its buffers are the same on all ranks.

    Args:
        model: with `fully_shard` applied to it, after which no parameter may be added or replaced.

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

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
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


def flat_storage_of(local: torch.Tensor) -> torch.Tensor:
    """All of the storage in which a local tensor lies, as a flat one of its dtype."""
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())


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
    even = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor) and _is_even(parameter)]
    moved: dict[int, DTensor] = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in even):
        same = [parameter for parameter in even if parameter.dtype is dtype]
        for parameter, part in zip(same, parts_of_one_buffer([local_of(each) for each in same]), strict=True):
            moved[id(parameter)] = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
    # a module's parameters keep their identity: optimizers refer to them
    model._apply(lambda tensor: moved.get(id(tensor), tensor))


def parts_of_one_buffer(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one dtype, one after the other in one elastic buffer."""
    step = _ALIGNMENT // tensors[0].element_size()
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() // step) * step
    flat = allocate_elastic(end, tensors[0].dtype, tensors[0].device, "param")
    parts = [
        flat[start : start + tensor.numel()].view(tensor.shape) for start, tensor in zip(starts, tensors, strict=True)
    ]
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return parts


def _is_even(parameter: DTensor) -> bool:
    """Whether all ranks hold as much of it, all of it contiguous: FSDP then uses the memory that it is given."""
    ranks_by_dim: dict[int, int] = {}
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            ranks_by_dim[placement.dim] = ranks_by_dim.get(placement.dim, 1) * size
    divides = all(parameter.shape[dim] % num_ranks == 0 for dim, num_ranks in ranks_by_dim.items())
    return divides and parameter.numel() > 0 and local_of(parameter).is_contiguous()
