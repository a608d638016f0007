"""Tensors whose contents are off the device: every use of them calls a guard first.

    refused = RefusedTensors(guard, "param")
    refused.add(p)            p.add_(1), p.norm(), p.data, deepcopy(p), torch.save(p): the guard
    refused.clear()           as before

A tensor's class is replaced by a subclass with `__torch_function__`, so that whatever torch offers
for it in Python asks first, with the same object as before. Sizes, dtype, device, gradient and
identity do not ask. Not seen: views that were taken before, `p._local_tensor`, `torch.tensor(p)`,
`x.data = p`, dlpack, transforms of torch.func, and code that is not Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor

_CONTENTS = frozenset(("data", "T", "H", "mT", "mH", "real", "imag", "_base"))
_METHODS = (
    *("__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
    *("is_floating_point", "is_signed", "ndimension", "nelement", "numel", "register_hook"),
    *("requires_grad_", "size", "storage_offset", "stride"),
)
# What does not touch contents, as `__torch_function__` gets it.
_HARMLESS = {
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.is_complex, torch.is_floating_point, torch.numel),
    *(
        getattr(descriptor, name)
        for attribute, descriptor in vars(Tensor.__base__).items()
        if isinstance(descriptor, GetSetDescriptorType) and attribute not in _CONTENTS
        for name in ("__get__", "__set__", "__delete__")
    ),
}
# Methods of tensors that wrap others, in Python.
_OF_WRAPPERS = ("full_tensor", "redistribute", "to_local")


class RefusedTensors:
    """Tensors of one kind of state; holds them weakly.

    Args:
        guard: called with the kind before each use; raises an error, or returns once the contents
            are there.
        kind: kind of state.
    """

    def __init__(self, guard: Callable[[Iterable[str]], None], kind: str) -> None:
        self._guard = guard
        self._kind = kind
        self._classes: dict[type, type] = {}
        self._tensors: list[tuple[weakref.ref[Tensor], type]] = []

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def add(self, tensor: Tensor) -> None:
        """Check every use of this tensor, which is not added yet."""
        original = type(tensor)
        if original not in self._classes:
            self._classes[original] = _checked_class(original, partial(self._guard, [self._kind]))
        # Noted first, in case an interrupt comes between.
        self._tensors.append((weakref.ref(tensor), original))
        tensor.__class__ = self._classes[original]

    def clear(self) -> None:
        """End the checks."""
        for reference, original in self._tensors.copy():
            tensor = reference()
            if tensor is not None:
                tensor.__class__ = original
        # Last, so that an interrupt leaves none behind.
        self._tensors.clear()


def _checked_class(original: type, check: Callable[[], None]) -> type:
    def check_first(
        _: type,
        function: Callable[..., Any],
        types: Iterable[type],
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        is_name = function is Tensor.type and len(arguments) == 1 and not named
        # `tensor.type()` returns the type's name; with an argument it converts the contents.
        if function not in _HARMLESS and not is_name:
            check()
        with torch.DisableTorchFunctionSubclass():
            return function(*arguments, **(named or {}))

    # No slots of its own: only a class of the same layout can be assigned to `__class__`.
    members: dict[str, Any] = {"__slots__": (), "__torch_function__": classmethod(check_first)}
    for name in _OF_WRAPPERS:
        if hasattr(original, name):
            members[name] = _checked_method(getattr(original, name), check)
    # `Parameter` has a metaclass, which its subclasses need as well.
    return type(original)(original.__name__, (original,), members)


def _checked_method(method: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    @wraps(method)
    def checked(*arguments: Any, **named: Any) -> Any:
        check()
        return method(*arguments, **named)

    return checked
