"""What makes a model impossible to read or to drive, all of it at once and before anything was changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from packaging.version import Version
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hybrid_engine.backends.fsdp.internals import StridedShard
from hybrid_engine.errors import DependencyError, ModelError

TESTED_TORCH = Version("2.13.0")

_OTHER_WRAPPERS = (FullyShardedDataParallel, DistributedDataParallel, DataParallel)


def require_torch(version: str = torch.__version__) -> None:
    """Raise DependencyError when torch is older than what FSDP2 was tested with."""
    if Version(version).release < TESTED_TORCH.release:
        raise DependencyError(
            f"torch {version} is installed, but sharded models were tested with {TESTED_TORCH} and later: "
            f"pip install 'torch>={TESTED_TORCH}'"
        )


def require_drivable(model: torch.nn.Module, num_ranks: int) -> None:
    """Raise ModelError for a model that cannot be sharded by us, or is sharded and cannot be read, on all ranks."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        require_sharded(model)
        _require_all_ranks(model, num_ranks)
    else:
        _raise_for("the model cannot be sharded", [*_of_other_wrappers(model), *_of_dtypes(model), *_of_meta(model)])


def weights_dtype(weights: Mapping[str, torch.Tensor], wire_dtype: str | None) -> str:
    """The dtype that a model's weights are kept in.

    Args:
        weights: name -> tensor; buffers do not count.
        wire_dtype: in which they are sent, if that is another; then some may be in it already.

    Raises ModelError for several, of which no one is what vLLM would have to compute in.
    """
    names: dict[str, list[str]] = {}
    for name, tensor in weights.items():
        if isinstance(tensor, torch.nn.Parameter):
            names.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(name)
    if len(names) == 1:
        return next(iter(names))
    if wire_dtype is not None and names.keys() == {"float32", wire_dtype}:
        return "float32"
    each = "; ".join(f"{len(found)} in {dtype}, first {found[0]}" for dtype, found in names.items())
    raise ModelError(
        f"the weights have several dtypes ({each}): convert the model by model.to(torch.float32) before it is sharded, "
        "or send float32 and bfloat16 alike in bfloat16 by compress_reshard"
    )


def require_sharded(model: torch.nn.Module) -> None:
    """Raise ModelError naming everything about a sharded model that cannot be read."""
    found = [*_of_other_wrappers(model), *_of_dtypes(model)]
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        found.append("the model is not sharded: call torch.distributed.fsdp.fully_shard on its layers and on it")
    else:
        found += [f"{name}: {problem}" for name, each in model.named_parameters() if (problem := _problem(each))]
    _raise_for("the sharded model cannot be read", found)


def _require_all_ranks(model: torch.nn.Module, num_ranks: int) -> None:
    """Raise ModelError for a model that is sharded over some of the job's ranks: the others' weights are others."""
    meshes = [each.device_mesh.mesh for each in model.parameters() if isinstance(each, DTensor)]
    used = sorted({int(rank) for mesh in meshes for rank in mesh.flatten()})
    if used and len(used) < num_ranks:
        ranks = ", ".join(map(str, used))
        raise ModelError(
            f"the model is sharded over ranks {ranks} of {num_ranks}: use a mesh of all ranks, for copies one of two "
            "dims (replicas, shards)"
        )


def _raise_for(what: str, findings: list[str]) -> None:
    if len(findings) > 1:
        raise ModelError(f"{what}:\n  " + "\n  ".join(findings))
    if findings:
        raise ModelError(f"{what}: {findings[0]}")


def _of_other_wrappers(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, _OTHER_WRAPPERS):
            yield f"{name or 'it'} is wrapped by {type(module).__name__}; pass the model itself, and use fully_shard"


def _of_dtypes(model: torch.nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            dtype = str(parameter.dtype).removeprefix("torch.")
            yield f"{name}: stored as {dtype}; load the model without quantization"


def _of_meta(model: torch.nn.Module) -> Iterator[str]:
    if on_meta := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        yield f"{len(on_meta)} parameters are on the meta device, first {on_meta[0]}; shard it yourself, then to_empty"


def _problem(parameter: torch.nn.Parameter) -> str | None:
    if not isinstance(parameter, DTensor):
        return "not sharded; call fully_shard on the whole model too, before this"
    known = (Shard, Replicate, StridedShard)
    if strange := [each for each in parameter.placements if not isinstance(each, known)]:
        return f"unsupported placement {type(strange[0]).__name__}; use Shard or Replicate"
    if parameter.is_meta:
        return "on the meta device; give it memory first (to_empty, then load the weights)"
    local = parameter.to_local()
    if local.device.type != parameter.device_mesh.device_type:
        return f"on {local.device.type}; leave CPUOffloadPolicy out, for a switch takes what it must off the device"
    if not _is_box(parameter):
        return f"rank by rank no box of it, placements {tuple(parameter.placements)}; split it evenly over all ranks"
    return None


def _is_box(parameter: DTensor) -> bool:
    """Whether each rank's part is one box, of which `__create_chunk_list__` then tells offsets and lengths.

    A strided shard is one if what it strides over, `split_factor` parts, are those of the later dims of the mesh: these
    split the dim first (tensor parallelism), and FSDP2 split the parts again.
    """
    later = dict.fromkeys(range(parameter.dim()), 1)
    for placement, size in reversed([*zip(parameter.placements, parameter.device_mesh.shape, strict=True)]):
        if isinstance(placement, StridedShard) and placement.split_factor != later[placement.dim]:
            return False
        if isinstance(placement, (Shard, StridedShard)):
            later[placement.dim] *= size
    (chunk,) = parameter.__create_chunk_list__()
    return tuple(chunk.sizes) == tuple(parameter.to_local().shape)
