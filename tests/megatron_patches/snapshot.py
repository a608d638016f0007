"""Pictures of every attribute of megatron and of torch, to prove that nothing was left changed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

Snapshot = dict[tuple[str, str], Any]


def of_torch() -> Snapshot:
    """Every attribute of every loaded torch module, and of every class that lives in one."""
    return _of_package("torch")


def of_megatron() -> Snapshot:
    """The same of megatron."""
    return _of_package("megatron")


def _of_package(package: str) -> Snapshot:
    result: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and isinstance(module, ModuleType):
            for attr, value in list(vars(module).items()):
                result[name, attr] = value
                if issubclass(type(value), type) and value.__module__ == name:  # isinstance would ask the value
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
