"""vLLM's processing of weights after loading: which modules have it, how to run it again, and what modules hold.

A module computes with its parameters and buffers, with plain attributes, and with what its quantisation method, that
one's kernels and an attention implementation keep: tensors in their attributes, in lists and dicts, in closures.
`module_tensors` finds them without knowing any of these classes. It does not enter other modules, which are listed on
their own, nor what carries configurations or activations but no weights (`internals.NOT_ENTERED`).
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.tracing import WeightStorage, storage_key

Table = dict[Any, Any] | list[Any]
"""A container: the attributes of an object, a dict, a list."""

_FOREIGN = (
    *("torch.", "triton.", "numpy.", "transformers.", "logging.", "threading."),
    *("vllm.compilation.", "vllm.config.", "vllm.distributed.", "vllm.platforms."),
)
"""Packages whose objects are not entered: they are no part of a layer."""


# -- the processing ----------------------------------------------------------------------------------------------------


def post_load_method(module: torch.nn.Module) -> Any | None:
    """The object whose `process_weights_after_loading(module)` vLLM calls, if the module has one."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, internals.QUANTIZE_METHOD.load()) else None


def is_processed(module: torch.nn.Module) -> bool:
    return post_load_method(module) is not None or _is_deferred_attention(module)


def described(module: torch.nn.Module) -> tuple[str, str]:
    """What processes a module after loading, its kernel where that has a name, and how to get another."""
    method = post_load_method(module)
    if method is None:
        if _is_deferred_attention(module):
            kind = type(getattr(module, "impl", module)).__name__
            return kind, "Set generate_config.vllm.attention_backend to another"
        return type(module).__name__, "Serve this model with another kernel, by arguments in generate_config.vllm"
    kernels = [value.name for value in vars(method).values() if isinstance(value, enum.Enum)]
    kind = ", ".join([type(method).__name__, *kernels])
    if isinstance(method, internals.EXPERTS_METHOD.load()):
        remedy = "Set generate_config.vllm.moe_backend to another; triton computes with the loader's own layout"
    else:
        remedy = "Set generate_config.vllm.linear_backend to another"
    is_quantised = getattr(method, "uses_meta_device", False)
    return kind, remedy + (", or leave generate_config.quantization out" if is_quantised else "")


def process(module: torch.nn.Module) -> None:
    """Run a module's post-load processing on the weights it holds now, in loader layout."""
    method = post_load_method(module)
    assert method is not None
    method.process_weights_after_loading(module)
    if (update := getattr(module, "update_param_tp_status", None)) is not None:
        update()


def process_attention(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Derive again what an attention layer makes of the weights inside it; `dtype`: of the model's activations."""
    cast(Callable[[torch.dtype], None], layer.process_weights_after_loading)(dtype)


def deriving_attention(model: torch.nn.Module, storages: Sequence[WeightStorage]) -> dict[str, list[str]]:
    """Attention layers that reach weights, in modules inside them or by a reference: name -> modules of the weights."""
    owners = {storage.key: [binding.module for binding in storage.bindings] for storage in storages}
    modules, found = dict(model.named_modules()), {}
    for name in (name for name, module in modules.items() if _is_deferred_attention(module)):
        tensors = module_tensors(modules, modules_processed(modules, name)).tensors.values()
        reached = [owner for key in map(storage_key, tensors) for owner in owners.get(key, ())]
        if reached:
            found[name] = sorted(set(reached))
    return found


def modules_processed(modules: Mapping[str, torch.nn.Module], name: str) -> tuple[str, ...]:
    """The modules whose contents a module's post-load processing may change: its own name first.

    Of attention also those inside it, which may have their names from elsewhere (MLA's `kv_b_proj`); of others their
    method, which may be a module too.
    """
    names, module = {id(module): each for each, module in modules.items()}, modules[name]
    if _is_deferred_attention(module):
        return tuple(names[id(child)] for child in module.modules())
    method = post_load_method(module)
    parts = method.modules() if isinstance(method, torch.nn.Module) else ()
    return (name, *(names[id(part)] for part in parts))


def _is_deferred_attention(module: torch.nn.Module) -> bool:
    attention = internals.ATTENTION_LAYERS.load()
    if (is_deferred := getattr(attention, "is_deferred_attention_layer", None)) is not None:
        return bool(is_deferred(module))
    kinds = (attention.Attention, attention.MLAAttention, attention.MMEncoderAttention)  # those that older vLLMs name
    return isinstance(module, kinds) and hasattr(module, "process_weights_after_loading")


# -- what modules hold -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleTensors:
    """All that is reached from some modules, by path; paths begin with a module's name.

    Attributes:
        tables: containers, each module's own attributes first.
        tensors: of any kind.
        numbers: integers and floats.
        sealed: objects that cannot be looked into.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    sealed: dict[str, object] = field(default_factory=dict)

    def outside(self, known: Collection[int]) -> dict[str, torch.Tensor]:
        """The tensors with elements that are in none of the storages with these keys."""
        pairs = self.tensors.items()
        return {path: tensor for path, tensor in pairs if tensor.numel() and storage_key(tensor) not in known}


def module_tensors(modules: Mapping[str, torch.nn.Module], names: Iterable[str]) -> ModuleTensors:
    """What these of a model's modules hold, each without its children."""
    found = ModuleTensors()
    for name in names:
        _collect(found, vars(modules[name]), name)
    return found


def reached_from(value: object, path: str) -> ModuleTensors:
    """What a value in a module holds; `path`: of the value."""
    found = ModuleTensors()
    _collect(found, value, path)
    return found


def _collect(found: ModuleTensors, root: object, name: str) -> None:
    pending: list[tuple[str, object]] = [(name, root)]
    seen: set[int] = set()
    skipped = tuple(each.load() for each in internals.NOT_ENTERED)
    while pending:
        path, value = pending.pop()
        if isinstance(value, torch.Tensor):
            found.tensors[path] = value  # at each of its places
        elif isinstance(value, int | float) and not isinstance(value, bool | enum.Enum):
            found.numbers[path] = value
        elif id(value) not in seen:
            seen.add(id(value))
            if internals.PACKED_HANDLE.is_type_of(value) or _is_sealed(value):
                found.sealed[path] = value
                continue
            if isinstance(value, dict | list):
                found.tables[path] = value
            elif _has_attributes(value, skipped):
                found.tables[path] = vars(value)
            pending += reversed([(f"{path}{step}", part) for step, part in _parts(value, skipped)])


def _parts(value: object, skipped: tuple[type, ...]) -> Iterator[tuple[str, object]]:
    """The parts of a value, each with the step that leads to it."""
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
