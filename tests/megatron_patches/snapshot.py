"""Pictures of every attribute of megatron and of torch, to prove that nothing was left changed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

Snapshot = dict[tuple[str, str], Any]

TORCH_OWNERS: dict[str, Any] = {
    "torch": torch,
    "torch.cuda": torch.cuda,
    "torch.cuda.random": torch.cuda.random,
    "torch.random": torch.random,
    "torch.distributed": torch.distributed,
    "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": torch.nn.Module,
    "torch.optim.Adam": torch.optim.Adam,
    "torch.optim.AdamW": torch.optim.AdamW,
}


def of_torch() -> Snapshot:
    """Every attribute of the parts of torch that a CPU redirect could be tempted to change."""
    return {(name, attr): value for name, owner in TORCH_OWNERS.items() for attr, value in vars(owner).items()}


def of_megatron() -> Snapshot:
    """Every attribute of every loaded megatron module, and of every class that lives in one."""
    result: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron" and isinstance(module, ModuleType):
            for attr, value in vars(module).items():
                result[name, attr] = value
                if isinstance(value, type) and value.__module__ == name:
                    _add_class(result, f"{name}.{value.__qualname__}", value)
    return result


def _add_class(result: Snapshot, name: str, owner: type) -> None:
    for attr, value in vars(owner).items():
        result[name, attr] = value
        if isinstance(value, type) and value.__qualname__.startswith(f"{owner.__qualname__}."):
            _add_class(result, f"{name}.{attr}", value)


def differences(before: Snapshot, after: Snapshot) -> set[tuple[str, str]]:
    """Keys that were added, removed, or hold another object."""
    missing = object()
    return {key for key in before.keys() | after.keys() if before.get(key, missing) is not after.get(key, missing)}
