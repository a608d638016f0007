"""Tensors whose contents are off the device: every use of them calls a guard first.

    refused = RefusedTensors(guard, "param")
    refused.add(p)            p.add_(1), p.norm(), p.data, deepcopy(p), torch.save(p): the guard
    refused.clear()           as before

A tensor's class is replaced by a subclass with `__torch_function__`, so that whatever torch offers
for it in Python asks first, with the same object as before. Sizes, dtype, device, gradient and
identity do not ask. Not seen: views that were taken before, `to_dlpack`, and code that is not
Python, such as a backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTES = (
    *("_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta"),
    *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
)
_METHODS = ("dim", "element_size", "is_complex", "is_floating_point", "numel", "requires_grad_")
# What does not touch contents, as `__torch_function__` gets it.
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in (*_METHODS, "size", "stride")),
    *(getattr(vars(torch._C.TensorBase)["grad"], name) for name in ("__set__", "__delete__")),
}


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
        while self._tensors:
            reference, original = self._tensors[-1]
            tensor = reference()
            if tensor is not None:
                tensor.__class__ = original
            self._tensors.pop()


def _checked_class(original: type, check: Callable[[], None]) -> type:
    def check_first(
        _: type,
        function: Callable[..., Any],
        types: Iterable[type],
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        is_name = function is Tensor.type and len(arguments) == 1 and not named
        if function not in _HARMLESS and not is_name:
            check()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(named or {}))

    members = {"__slots__": (), "__torch_function__": classmethod(check_first)}
    return type(original)(original.__name__, (original,), members)
