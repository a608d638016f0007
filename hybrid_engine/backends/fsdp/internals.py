"""Undocumented names of torch, transformers and PEFT that this backend uses, each with its reason.

tests/hybrid_engine/backends/fsdp/test_model_checks.py looks each up in the installed versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hybrid_engine.ranks.torch_internals import PrivateName, storage_id

__all__ = [
    "PRIVATE_NAMES",
    "OperationWatch",
    "StridedShard",
    "TorchDispatchMode",
    "allocate_modules",
    "checkpoint_wrapper",
    "initialize_module",
    "model_of_modules",
    "revert_weight_conversion",
    "storages_in",
]

PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper",
        "recomputes a layer in the backward pass in any mode; transformers' checkpointing does so "
        "in training mode only, with dropout",
    ),
    PrivateName(
        "transformers.core_model_loading:revert_weight_conversion",
        "converts the tensors of a model to those of a checkpoint, as save_pretrained does, "
        "without writing files",
    ),
    PrivateName(
        "transformers:PreTrainedModel._init_weights",
        "initializes one module and its buffers; init_weights initializes all modules, and all "
        "of them must have memory",
    ),
    PrivateName(
        "peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters",
        "lets a layer compute without its adapters; disable_adapter also freezes them, and FSDP "
        "keeps the flags with which it has gathered parameters first",
    ),
    PrivateName(
        "torch.nn:Module._apply",
        "replaces every parameter as Module.to does; FSDP adopts the tensors that it returns",
    ),
    PrivateName(
        "torch.distributed.tensor:DTensor.__create_chunk_list__",
        "returns offsets and lengths of the local part, for distributed checkpoints",
    ),
    PrivateName(
        "torch.distributed.tensor:DTensor._local_tensor",
        "is this rank's part; `to_local` is an operation of autograd, too slow for all parameters "
        "in every switch",
    ),
    PrivateName(
        "torch.distributed.tensor.placement_types:_StridedShard",
        "is FSDP2's placement on a dim that tensor parallelism has split before",
    ),
)


def model_of_modules(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Module]:
    """Return the innermost transformers model that each module of `model` belongs to.

    A vision tower in a model of images and text is a model of its own.
    """
    owners: dict[torch.nn.Module, torch.nn.Module] = {}
    for outer in model.modules():  # outer models come first
        if isinstance(outer, PreTrainedModel):
            # An inner model overwrites the entries of the outer one that contains it.
            owners.update(dict.fromkeys(outer.modules(), outer))
    return owners


def initialize_module(model: torch.nn.Module, module: torch.nn.Module) -> None:
    """Initialize the tensors of `module` itself as `model`, its transformers model, does.

    `model`: of `model_of_modules`; an outer model does not know the buffers of its parts.
    """
    initialize: Any = model._init_weights
    initialize(module)


@torch.no_grad()
def allocate_modules(
    modules: Iterable[torch.nn.Module],
    owners: Mapping[torch.nn.Module, torch.nn.Module],
    device: torch.device,
) -> None:
    """Allocate the tensors of `modules` that are on the meta device, and initialize them.

    `owners`: transformers model that each module belongs to.
    """
    # By meta tensor, so that parameters that two modules share stay shared.
    filled: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        named = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        is_filled = False
        for name, tensor in named:
            if not tensor.is_meta:
                continue
            if tensor not in filled:
                zeros = torch.zeros_like(tensor, device=device)
                if isinstance(tensor, torch.nn.Parameter):
                    zeros = torch.nn.Parameter(zeros, tensor.requires_grad)
                filled[tensor] = zeros
            setattr(module, name, filled[tensor])
            is_filled = True
        if is_filled:
            initialize_module(owners[module], module)


class OperationWatch(TorchDispatchMode):
    """Records the storages that operations on a model without memory read.

    A flag without a value counts as True: models ask whether all tokens are to be attended to.

    Attributes:
        storages: keys of the storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True
        if func is torch.ops.aten._grouped_mm.default:
            # Experts of layers without attention, which are computed to their end. On the meta
            # device this operation accepts bfloat16 alone.
            rows, weights = args[:2]
            return rows.new_empty(*rows.shape[:-1], weights.shape[-1])
        self.storages |= storages_in((args, kwargs))
        return func(*args, **(kwargs or {}))


def storages_in(values: Any) -> set[int]:
    """Return the keys of the storages of all tensors in nested containers."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return {storage_id(tensor.untyped_storage()) for tensor in tensors}
