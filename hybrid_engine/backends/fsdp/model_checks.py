"""What makes a model impossible to read or to drive, all of it at once and before anything was changed.

vLLM is built from the model's config, so that must say what the model computes:

    model.config  ->  transformers builds it once more, without memory  ->  compared, module by module, with the model

A config that was changed after the model was built says otherwise, and so does a model whose modules were changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import AutoModelForCausalLM

from hybrid_engine.backends.fsdp.attention import settings_left_out
from hybrid_engine.backends.fsdp.internals import StridedShard, initialize_module
from hybrid_engine.backends.fsdp.names import plain_name
from hybrid_engine.errors import DependencyError, ModelError, clipped
from hybrid_engine.models.families import TABLES

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


def require_whole(model: torch.nn.Module) -> None:
    """Raise ModelError naming everything about a model that is not sharded that cannot be read."""
    _raise_for("the model cannot be read", [*_of_other_wrappers(model), *_of_dtypes(model), *_of_meta(model)])


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


_NOT_INFERENCE = frozenset(
    {"training", "gradient_checkpointing", "padding_idx", "vocab_size", "max_seq_len_cached", "original_max_seq_len"}
)
"""Attributes of modules that only gradients depend on, or that are compared by something else: sizes of vocabularies by
the shapes of tensors, lengths by rotary frequencies."""
_NOT_INFERENCE_PARTS = ("drop", "jitter", "loss")
"""Parts of the names of attributes that only training uses."""


class _Difference(NamedTuple):
    attribute: str
    live: str
    configured: str


def config_of(model: Any) -> Any:
    """A copy of the model's config that names its architecture, whatever `fully_shard` made of its class."""
    config = type(model.config).from_dict(model.config.to_dict())
    names = [each.__name__ for each in type(model).__mro__]
    config.architectures = [next((name for name in names if name in TABLES), names[0])]
    return config


def require_configured(model: torch.nn.Module) -> None:
    """Raise ModelError naming everything in which a transformers model is not what its config describes.

    Compared are numbers, flags and texts of its modules, its activations, and rotary frequencies and whatever else it
    keeps in buffers that no checkpoint has. Its implementation of attention must take all that the config sets. Takes
    no memory for weights, and no random number.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with torch.device("meta"):
            configured = AutoModelForCausalLM.from_config(config_of(model))
        set_epsilon_of_norms(configured)
        modules = {plain_name(name): module for name, module in model.named_modules()}
        found: dict[_Difference, list[str]] = {}
        for name, module in configured.named_modules():
            if (live := modules.get(name)) is not None:
                for difference in (*_of_attributes(live, module), *_of_buffers(live, module, configured)):
                    found.setdefault(difference, []).append(name or "the model")
        implementation = getattr(model.config, "_attn_implementation", None)
        left_out = settings_left_out(configured, implementation)
    lines = [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {difference.attribute} is "
        f"{difference.live}, by model.config {difference.configured}"
        for difference, names in found.items()
    ]
    lines += [
        f"attention by {implementation!r} leaves out {name} {value}: load the model with attn_implementation='eager', "
        "or call model.set_attn_implementation('eager')"
        for name, value in left_out.items()
    ]
    if lines:
        raise ModelError(
            "the model computes otherwise than model.config says, from which vLLM is built. Set model.config to what "
            "the model computes, or build the model from it:\n  " + "\n  ".join(lines)
        )


def set_epsilon_of_norms(model: torch.nn.Module) -> None:
    """Give all norms the config's epsilon, as vLLM does; transformers leaves those within DeepSeek's attention 1e-6."""
    epsilon = getattr(model.config, "rms_norm_eps", None)
    for module in model.modules() if epsilon is not None else ():
        if hasattr(module, "variance_epsilon"):
            vars(module)["variance_epsilon"] = epsilon


def _of_attributes(live: torch.nn.Module, configured: torch.nn.Module) -> Iterator[_Difference]:
    own = vars(live)
    for key, value in vars(configured).items():
        if key.startswith("_") or key in _NOT_INFERENCE or any(part in key for part in _NOT_INFERENCE_PARTS):
            continue
        if key in own and isinstance(value, bool | int | float | str | None) and own[key] != value:
            yield _Difference(key, clipped(repr(own[key])), clipped(repr(value)))
    is_function = not any(configured.children()) and not any(True for _ in configured.parameters())
    if is_function and type(live) is not type(configured) and not isinstance(configured, torch.nn.Dropout):
        yield _Difference("its class", type(live).__name__, type(configured).__name__)


def _of_buffers(live: torch.nn.Module, configured: torch.nn.Module, model: torch.nn.Module) -> Iterator[_Difference]:
    """Compare floating-point buffers; those of a module with weights depend on the weights."""
    buffers = {name: each for name, each in configured.named_buffers(recurse=False) if each.is_floating_point()}
    if not buffers or any(True for _ in configured.parameters(recurse=False)):
        return
    configured.to_empty(device="cpu", recurse=False)
    for name in buffers:
        configured.get_buffer(name).fill_(torch.nan)  # what stays so is not known
    initialize_module(model, configured)
    there: Mapping[str, torch.Tensor] = dict(live.named_buffers(recurse=False))
    for name in buffers.keys() & there.keys():
        expected, found = configured.get_buffer(name), there[name]
        if expected.isnan().any() or found.is_meta:
            continue
        values = found.detach().to("cpu", expected.dtype)
        if values.shape != expected.shape or not torch.allclose(values, expected, rtol=1e-5, atol=0.0):
            dtype = "" if found.dtype is expected.dtype else f" in {found.dtype}, for .to() rounds it; loading does not"
            yield _Difference(name, f"{_shown(values)}{dtype}", _shown(expected))


def _shown(values: torch.Tensor) -> str:
    """The last few; rotary frequencies all begin with 1."""
    return f"[… {', '.join(f'{value:g}' for value in values.flatten()[-3:].tolist())}]"
