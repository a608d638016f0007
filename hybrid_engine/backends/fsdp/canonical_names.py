"""Where each tensor of a checkpoint lies in a transformers model: its own conversion, run on tensors without memory.

    state dict of meta tensors  --->  transformers' conversion to a checkpoint  --->  views of those tensors
                                                                                       |
                                      name on disk -> (parameter, offset, shape, strides)

transformers packs some tensors (the experts of a layer in one of 3 dims) and renames others. What it does to save a
checkpoint says where each tensor of one lies, for every model it knows; there is no table of ours to fall behind.
A view on the meta device keeps offset and strides, and a copy made contiguous is taken for the view that it copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybrid_engine.backends.fsdp.internals import TorchDispatchMode, revert_weight_conversion
from hybrid_engine.errors import ParameterMismatchError
from hybrid_engine.layouts.sharded import Packed, PackedModel
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.torch_internals import storage_id
from hybrid_engine.records.regions import StridedView


def canonical_views(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], table: ModelTable
) -> Mapping[str, Packed]:
    """Canonical name -> where it lies, in the order of a checkpoint.

    Args:
        model: a transformers model; its conversion is used, its memory is not touched.
        tensors: state dict, of whole (global) shapes.
        table: says which tensors a checkpoint has.

    Raises ParameterMismatchError with one line for every tensor that a checkpoint of this config has and the model has
    not, or the other way round, and for every one that transformers computes from several parameters.
    """
    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    parameters = {storage_id(tensor.untyped_storage()): name for name, tensor in whole.items()}
    with torch.no_grad(), _CopiesAreViews():
        saved = revert_weight_conversion(model, dict(whole))
    found: dict[str, Packed] = {}
    findings: list[str] = []
    repeated = _repeats(tensors, table)
    for name, tensor in saved.items():
        shape, parameter = table.shapes.get(name), parameters.get(storage_id(tensor.untyped_storage()))
        if shape is None:
            if name not in repeated:
                findings.append(f"{name}: no tensor of a checkpoint of this config")
        elif parameter is None:
            findings.append(f"{name}: transformers computes it from parameters, so no part of one is it")
        elif tuple(tensor.shape) != shape:
            findings.append(f"{name}: shape {tuple(tensor.shape)} in the model, {shape} in a checkpoint of this config")
        else:
            found[name] = Packed(parameter, StridedView(int(tensor.storage_offset()), shape, tuple(tensor.stride())))
    missing = [name for name in table.shapes if name not in saved and table.is_served(name)]
    findings += [f"{name}: the model has no such tensor" for name in missing]
    if findings:
        raise ParameterMismatchError(findings)
    return {name: found[name] for name in table.shapes if name in found}


def packed_model(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], table: ModelTable) -> PackedModel:
    """The same with the parameters' own shapes; arguments and errors are those of `canonical_views`."""
    views = canonical_views(model, tensors, table)
    named = {packed.parameter for packed in views.values()}
    once: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name not in named):  # of tied ones the name that a checkpoint has
        once.setdefault(id(tensors[name]), name)
    return PackedModel(
        views,
        {name: tuple(tensors[name].shape) for name in once.values()},
        {name for name in once.values() if not isinstance(tensors[name], torch.nn.Parameter)},
    )


def _repeats(tensors: Mapping[str, torch.Tensor], table: ModelTable) -> set[str]:
    """Names under which a state dict lists a tensor again that has another, canonical name: tied embeddings."""
    canonical = {id(tensor) for name, tensor in tensors.items() if name in table.shapes}
    return {name for name, tensor in tensors.items() if id(tensor) in canonical} | set(table.copies)


class _CopiesAreViews(TorchDispatchMode):
    """A copy of a tensor without memory is that tensor: `contiguous()` would lose where the elements come from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))
