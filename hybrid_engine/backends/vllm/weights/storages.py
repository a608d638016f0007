"""The storages behind a model's parameters as its loader sees them, before vLLM repacks anything.

A tied head is one storage bound in two modules. Everything here is recorded once, between the construction of the
model and vLLM's post-load processing; nothing here imports vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.tracing import storage_key, view_of
from hybrid_engine.errors import ParameterMismatchError
from hybrid_engine.records.regions import StridedView, contiguous_strides


@dataclass(frozen=True, slots=True)
class Binding:
    """One attribute of one module that is a parameter (or a buffer) over a storage."""

    module: str
    attribute: str
    is_parameter: bool

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}" if self.module else self.attribute

    def find(self, modules: Mapping[str, torch.nn.Module]) -> torch.Tensor | None:
        """What the module holds there now."""
        return getattr(modules[self.module], self.attribute, None)

    def put(self, modules: Mapping[str, torch.nn.Module], tensor: torch.Tensor) -> None:
        """Let the module hold `tensor` there, past checks of types and shapes."""
        module = modules[self.module]
        table = module._parameters if self.is_parameter else module._buffers
        table[self.attribute] = tensor  # type: ignore[assignment] # a subclass of Tensor that vLLM takes for a Parameter


@dataclass(frozen=True)
class WeightStorage:
    """A storage in loader layout.

    Attributes:
        key: identity of the storage at capture.
        bindings: every place the model has it at; the first one names it.
        view: shape, strides and offset of the parameter; dense, so the elements of the storage are its elements.
        numel: elements of the whole storage; more than the parameter's only where an allocator rounds up.
        kind: the parameter's class.
        dtype, device: of its elements.
        attributes: what vLLM hung on the parameter (`weight_loader`, `output_dim`, …).
    """

    key: int
    bindings: tuple[Binding, ...]
    view: StridedView
    numel: int
    kind: type
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.bindings[0].name

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def num_weights(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.view.shape)

    def create(self, flat: torch.Tensor) -> torch.Tensor:
        """A new parameter over `flat` [numel], as the loader found it: same class, strides and attributes."""
        return self._wrap(flat.as_strided(self.view.shape, self.view.strides, self.view.offset))

    def placeholder(self) -> torch.Tensor:
        """An empty parameter that stands where the weights were released; same class and attributes."""
        return self._wrap(torch.empty(0, dtype=self.dtype, device=self.device))

    def _wrap(self, data: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = internals.MAKE_SUBCLASS.load()(self.kind, data, False)
        tensor.__dict__.update(self.attributes)
        return tensor


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D tensor over the whole storage of `tensor`."""
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (numel,), (1,))


def dense_order(view: StridedView) -> tuple[int, ...] | None:
    """Dims of `view` from the outermost stride in, or None when the view has gaps or overlaps."""
    order = tuple(sorted(range(len(view.shape)), key=lambda dim: (-view.strides[dim], dim)))
    shape = tuple(view.shape[dim] for dim in order)
    strides = tuple(view.strides[dim] for dim in order)
    expected = contiguous_strides(shape)
    fits = all(size == 1 or have == want for size, have, want in zip(shape, strides, expected, strict=True))
    return order if fits else None


def take_inventory(model: torch.nn.Module, written: Iterable[int]) -> list[WeightStorage]:
    """All storages of parameters, and those of buffers among the keys `written`, in the model's order.

    Raises ParameterMismatchError naming parameters that leave gaps in their storage.
    """
    written = frozenset(written)
    bindings: dict[int, list[tuple[Binding, torch.Tensor]]] = {}
    for module_name, module in model.named_modules():
        tensors = [(name, tensor, True) for name, tensor in module._parameters.items()]
        tensors += [(name, tensor, False) for name, tensor in module._buffers.items()]
        for name, tensor, is_parameter in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            key = storage_key(tensor)
            if is_parameter or key in written:
                bindings.setdefault(key, []).append((Binding(module_name, name, is_parameter), tensor))
    storages = [_storage_of(key, places) for key, places in bindings.items()]
    faults = [
        f"{storage.name}: shape {storage.view.shape} with strides {storage.view.strides} leaves gaps"
        for storage in storages
        if dense_order(storage.view) is None
    ]
    if faults:
        raise ParameterMismatchError(faults)
    return storages


def _storage_of(key: int, places: list[tuple[Binding, torch.Tensor]]) -> WeightStorage:
    tensor = max((tensor for _, tensor in places), key=lambda tensor: tensor.numel())
    view, numel = view_of(tensor), tensor.untyped_storage().nbytes() // tensor.element_size()
    bindings = tuple(binding for binding, other in places if view_of(other) == view)
    return WeightStorage(
        key, bindings, view, numel, type(tensor), tensor.dtype, tensor.device, attributes=dict(vars(tensor))
    )
