"""vLLM's processing of weights after loading, its repetition, and the contents of modules.

A module computes with its parameters and buffers, with plain attributes, and with objects kept by
its quantisation method, the kernels of that method, and an attention implementation: tensors in
attributes, in lists and dicts, in closures. `module_tensors` collects them without knowing any of
these classes. It does not enter child modules, which are listed separately, nor objects that carry
configurations or activations but no weights (`internals.NOT_ENTERED`).
"""

from __future__ import annotations

import enum
import logging
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.tracing import NamedModules, WeightStorage, storage_key
from hybrid_engine.errors import ConfigError, first_of
from hybrid_engine.ranks.torch_internals import TensorDict

logger = logging.getLogger("hybrid_engine")

Table = dict[Any, Any] | list[Any]
"""A container: the attributes of an object, a dict, a list."""

_MAX_NAMED = 5

_FOREIGN = (
    *("torch.", "triton.", "numpy.", "transformers.", "logging.", "threading."),
    *("vllm.compilation.", "vllm.config.", "vllm.distributed.", "vllm.platforms."),
)
"""Packages whose objects are not entered, because they do not belong to a layer."""


# -- the processing --------------------------------------------------------------------------------


def post_load_method(module: torch.nn.Module) -> Any | None:
    """Return the object whose `process_weights_after_loading` vLLM calls; None without one."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, internals.QUANTIZE_METHOD) else None


def is_processed(module: torch.nn.Module) -> bool:
    return post_load_method(module) is not None or _is_deferred_attention(module)


def described(module: torch.nn.Module) -> tuple[str, str]:
    """Return the class that processes a module, with its kernels, and a remedy that replaces it."""
    method = post_load_method(module)
    if method is None and _is_deferred_attention(module):
        kind = type(getattr(module, "impl", module)).__name__
        return kind, "Set generate_config.vllm.attention_backend to another"
    if method is None:
        kind = type(module).__name__
        return kind, "Serve this model with another kernel, by arguments in generate_config.vllm"
    # A method keeps the kernels that it chose as members of enums.
    kernels = [value.name for value in vars(method).values() if isinstance(value, enum.Enum)]
    kind = ", ".join([type(method).__name__, *kernels])
    if isinstance(method, internals.EXPERTS_METHOD):
        remedy = (
            "Set generate_config.vllm.moe_backend to another; "
            "triton computes with the loader's own layout"
        )
    else:
        remedy = "Set generate_config.vllm.linear_backend to another"
    if getattr(method, "uses_meta_device", False):  # vLLM quantises while it loads
        remedy += ", or leave generate_config.quantization out"
    return kind, remedy


def process(module: torch.nn.Module) -> None:
    """Run a module's post-load processing on the weights it holds now, in loader layout."""
    method = post_load_method(module)
    assert method is not None
    method.process_weights_after_loading(module)
    update = getattr(module, "update_param_tp_status", None)
    if update is not None:
        update()


def deriving_attention(
    model: torch.nn.Module,
    storages: Sequence[WeightStorage],
) -> dict[str, list[str]]:
    """Return the attention layers that reach weights: name -> modules of the weights.

    A layer reaches weights in modules inside it, or by a reference.
    """
    owners = {storage.key: [binding.module for binding in storage.bindings] for storage in storages}
    modules = dict(model.named_modules())
    deriving = {}
    for name, module in modules.items():
        if not _is_deferred_attention(module):
            continue
        contents = module_tensors(modules, modules_processed(modules, name))
        reached: set[str] = set()
        for tensor in contents.tensors.values():
            reached.update(owners.get(storage_key(tensor), ()))
        if reached:
            deriving[name] = sorted(reached)
    return deriving


def modules_processed(modules: NamedModules, name: str) -> tuple[str, ...]:
    """Return the modules whose contents a module's processing may change, the module first.

    For attention this includes the modules inside it, which may be registered under another parent
    (MLA's `kv_b_proj`). For other modules it includes the method, which may be a module itself.
    """
    names = {id(module): path for path, module in modules.items()}
    module = modules[name]
    if _is_deferred_attention(module):
        return tuple(names[id(child)] for child in module.modules())
    method = post_load_method(module)
    parts = method.modules() if isinstance(method, torch.nn.Module) else ()
    return (name, *(names[id(part)] for part in parts))


def _is_deferred_attention(module: torch.nn.Module) -> bool:
    attention = internals.ATTENTION_LAYERS
    is_deferred = getattr(attention, "is_deferred_attention_layer", None)
    if is_deferred is not None:
        return bool(is_deferred(module))
    # Older vLLM versions name the classes instead.
    kinds = (attention.Attention, attention.MLAAttention, attention.MMEncoderAttention)
    return isinstance(module, kinds) and hasattr(module, "process_weights_after_loading")


def require_quantised(modules: NamedModules, method: str, *, logs: bool) -> None:
    """Raise ConfigError if no layer of a model has quantised weights; log which ones have none.

    Args:
        modules: name -> module, after vLLM's processing of the weights.
        method: name of the method.
        logs: whether this rank logs.
    """
    names = sorted(name for name, module in modules.items() if _may_be_quantised(module))
    plain = [name for name in names if not is_quantised(modules[name])]
    if plain and len(plain) == len(names):
        raise ConfigError.of(
            "quantization",
            f"{method!r} quantises none of the {len(names)} layers of this model here",
            "Use another method, or leave it out",
            code="quantises-nothing",
        )
    if plain and logs:
        logger.warning(
            "quantization %s leaves %d of %d layers as they are: %s",
            method,
            len(plain),
            len(names),
            first_of(plain, _MAX_NAMED),
        )


def _may_be_quantised(module: torch.nn.Module) -> bool:
    """Return whether a module is a linear layer or the experts of a layer."""
    # Methods leave embeddings and the output layer out by design; attention has a cache, no
    # weights.
    method = post_load_method(module)
    is_of_cache = isinstance(method, internals.CACHE_METHOD)
    is_embedding = isinstance(module, internals.VOCABULARY_EMBEDDING)
    return method is not None and not is_of_cache and not is_embedding


def is_quantised(module: torch.nn.Module) -> bool:
    """Return whether a module has a tensor with elements of one byte, each a weight or a pair."""
    return any(tensor.dim() >= 2 and tensor.element_size() == 1 for tensor in own_tensors(module))


def own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module, without those of modules inside it."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


# -- contents of modules ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleTensors:
    """Everything reachable from some modules, by path; a path begins with a module's name.

    Attributes:
        tables: containers, each module's attributes first.
        tensors: tensors of any kind.
        numbers: integers and floats.
        sealed: objects that cannot be inspected.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    tensors: TensorDict = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    sealed: dict[str, object] = field(default_factory=dict)

    def outside(self, known: Collection[int]) -> TensorDict:
        """Return the non-empty tensors whose storage keys are not in `known`."""
        return {
            path: tensor
            for path, tensor in self.tensors.items()
            if tensor.numel() and storage_key(tensor) not in known
        }


def module_tensors(modules: NamedModules, names: Iterable[str]) -> ModuleTensors:
    """Return the contents of these modules, each without its children."""
    contents = ModuleTensors()
    for name in names:
        _collect(contents, vars(modules[name]), name)
    return contents


def reached_from(value: object, path: str) -> ModuleTensors:
    """Return the contents of a value in a module; `path` is the path of the value."""
    contents = ModuleTensors()
    _collect(contents, value, path)
    return contents


def _collect(contents: ModuleTensors, root: object, name: str) -> None:
    """Add everything reachable from `root`, depth first, to `contents`."""
    pending: list[tuple[str, object]] = [(name, root)]
    seen: set[int] = set()
    skipped = tuple(kind.load() for kind in internals.NOT_ENTERED)
    while pending:
        path, value = pending.pop()
        # Tensors skip `seen`: every path counts, because each may be replaced on its own.
        if isinstance(value, torch.Tensor):
            contents.tensors[path] = value  # a shared tensor at each of its paths
        elif isinstance(value, int | float) and not isinstance(value, bool | enum.Enum):
            contents.numbers[path] = value
        elif id(value) not in seen:
            seen.add(id(value))
            if internals.PACKED_HANDLE.is_type_of(value) or _is_sealed(value):
                contents.sealed[path] = value
                continue
            if isinstance(value, dict | list):
                contents.tables[path] = value
            elif _has_attributes(value, skipped):
                contents.tables[path] = vars(value)
            parts = [(f"{path}{step}", part) for step, part in _parts(value, skipped)]
            # The last pending value is next, so the first part has to be last.
            pending += reversed(parts)


def _parts(value: object, skipped: tuple[type, ...]) -> Iterator[tuple[str, object]]:
    """Yield the parts of a value, each with its step of the path."""
    if isinstance(value, dict):
        yield from _named({key: part for key, part in value.items() if key != "_modules"})
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
        yield from ((f"({index})", part) for index, part in enumerate(parts))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            # Reading the contents of an empty cell raises.
            if cell != types.CellType():
                yield f".<{name}>", cell.cell_contents
    elif _has_attributes(value, skipped):
        yield from _named(vars(value))


def _named(parts: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """Yield the parts sorted by path.

    The order does not change if a part is removed and put back, so a shared object keeps its path.
    """
    steps = ((f".{key}", part) for key, part in parts.items())
    yield from sorted(steps, key=lambda step: step[0])


def _has_attributes(value: object, skipped: tuple[type, ...]) -> bool:
    """Return whether an object's attributes belong to its layer."""
    kind = type(value)
    if isinstance(value, skipped) or f"{kind.__module__}.".startswith(_FOREIGN):
        return False
    stateless = (
        *(torch.nn.Module, type, enum.Enum),
        *(types.ModuleType, types.FunctionType, partial),
    )
    if isinstance(value, stateless):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _is_sealed(value: object) -> bool:
    """Return whether a value is of compiled code, which can hold memory outside of tensors.

    Objects of torch's own extension classes do not.
    """
    kind = type(value)
    if kind.__name__ == "PyCapsule" or isinstance(value, torch.ScriptObject):
        return True
    return type(kind).__name__ == "pybind11_type" and not kind.__module__.startswith("torch")


def display(path: str) -> str:
    """Return a path in Python's notation."""
    without_tables = path.replace("._parameters.", ".").replace("._buffers.", ".")
    return without_tables.removeprefix(".")
