"""What a module of vLLM holds, wherever it keeps it.

A module computes with its parameters and buffers, with plain attributes, and with what its quantisation method, that
one's kernels and an attention implementation keep: tensors in their attributes, in lists and dicts, in closures. Here
they are found without knowing any of these classes. Not entered are other modules, which hold things on their own,
and what carries configurations or activations but no weights (`internals.NOT_ENTERED`).
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.tracing import storage_key

Table = dict[Any, Any] | list[Any]
"""Where something is kept: the attributes of an object, a dict, a list."""

_FOREIGN = (
    *("torch.", "triton.", "numpy.", "transformers.", "logging.", "threading."),
    *("vllm.compilation.", "vllm.config.", "vllm.distributed.", "vllm.platforms."),
)
"""Packages whose objects are not entered: they are no part of a layer."""


@dataclass(frozen=True)
class Held:
    """All that is reached from a module, by path.

    Attributes:
        tables: containers, the module's own attributes first.
        tensors: of any kind.
        numbers: integers and floats.
        sealed: what cannot be looked into, and its type.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    sealed: dict[str, str] = field(default_factory=dict)

    def owned(self, known: Collection[int]) -> dict[str, torch.Tensor]:
        """The tensors with elements of their own: in none of the storages with these keys."""
        pairs = self.tensors.items()
        return {path: tensor for path, tensor in pairs if tensor.numel() and storage_key(tensor) not in known}


def held_by(module: torch.nn.Module, name: str) -> Held:
    """What this module holds, without its children; paths begin with its name."""
    held = Held()
    pending: list[tuple[str, object]] = [(name, vars(module))]
    seen: set[int] = set()
    skipped = tuple(each.load() for each in internals.NOT_ENTERED)
    while pending:
        path, value = pending.pop()
        if isinstance(value, torch.Tensor):
            held.tensors[path] = value  # at each of its places
        elif isinstance(value, int | float) and not isinstance(value, bool | enum.Enum):
            held.numbers[path] = value
        elif id(value) not in seen:
            seen.add(id(value))
            if internals.PACKED_HANDLE.is_type_of(value) or _is_sealed(value):
                held.sealed[path] = type(value).__name__
                continue
            if isinstance(value, dict | list):
                held.tables[path] = value
            elif _has_attributes(value, skipped):
                held.tables[path] = vars(value)
            pending += reversed([(f"{path}{step}", part) for step, part in _parts(value, skipped)])
    return held


def _parts(value: object, skipped: tuple[type, ...]) -> Iterator[tuple[str, object]]:
    """What something consists of, and the step that leads there."""
    if isinstance(value, dict):
        yield from _named({key: part for key, part in value.items() if key != "_modules"})
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f"({index})", part) for index, part in enumerate((value.func, value.args, value.keywords)))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty one has no contents to ask for
                yield f".<{name}>", cell.cell_contents
    elif _has_attributes(value, skipped):
        yield from _named(vars(value))


def _named(parts: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """In an order that stays when a part is taken out and put back: what is shared is found at the same path again."""
    yield from sorted(((f".{key}", part) for key, part in parts.items()), key=lambda pair: pair[0])


def _has_attributes(value: object, skipped: tuple[type, ...]) -> bool:
    """Whether the attributes of an object are its layer's."""
    kind = type(value)
    if isinstance(value, skipped) or f"{kind.__module__}.".startswith(_FOREIGN):
        return False
    no_state = (torch.nn.Module, type, enum.Enum, types.ModuleType, types.FunctionType, functools.partial)
    return not isinstance(value, no_state) and isinstance(getattr(value, "__dict__", None), dict)


def _is_sealed(value: object) -> bool:
    """Whether a value is of compiled code, which can hold memory that is no tensor: torch's own are harmless."""
    kind = type(value)
    if kind.__name__ == "PyCapsule" or isinstance(value, torch.ScriptObject):
        return True
    return type(kind).__name__ == "pybind11_type" and not kind.__module__.startswith("torch")


def display(path: str) -> str:
    """A path as one would write it in Python."""
    return path.replace("._parameters.", ".").replace("._buffers.", ".").removeprefix(".")


def held_by_all(modules: Mapping[str, torch.nn.Module], names: Iterable[str]) -> Held:
    """What these of a model's modules hold."""
    result = Held()
    for name in names:
        part = held_by(modules[name], name)
        for field_name in ("tables", "tensors", "numbers", "sealed"):
            getattr(result, field_name).update(getattr(part, field_name))
    return result
