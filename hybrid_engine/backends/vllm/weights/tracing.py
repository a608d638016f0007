"""A trace of a model's own weight loader: every checkpoint element's place in the model.

    tensors on the meta device  --->  model.load_weights  --->  aten.copy_(parameter view, meta
    view)
                                                                     |
                                      one TracedCopy: which view of which tensor, which view of
                                      which storage

A view on the meta device keeps its storage's identity, offset, shape and strides, so a copy out of
it is an exact record, and tracing moves no data. A clone (`contiguous`, `reshape`) is a new storage
that such a copy fills; copies out of it are composed with that copy. A copy has lost this
information if its source was computed (a cast, a concatenation, an `.item()`) or written by the
loader. The tensors that flowed into such a source are *staged*: `load_weights` itself writes them
at every reshard. They are identified by tracking the tensors that each storage was computed from.

A storage is written either by records or by the loader, never by both: a loader that writes one
staged tensor into a storage may overwrite the rest of it, and data written earlier would be lost.

`take_inventory` lists the storages behind the parameters before vLLM repacks anything: a tied head
is one storage bound in two modules. This file uses no class of vLLM: any module with such a loader
can be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import OwnDtypes
from hybrid_engine.errors import ModelError, ParameterMismatchError
from hybrid_engine.ranks.torch_internals import TorchDispatchMode, storage_id, tree_leaves
from hybrid_engine.records.regions import (
    Region,
    Shapes,
    StridedView,
    boxes_of_copy,
    contiguous_strides,
)

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Dtypes = Mapping[str, torch.dtype]
NamedModules = Mapping[str, torch.nn.Module]
"""Modules by path."""


def dtypes_of(tensors: Iterable[str], dtype: torch.dtype, others: OwnDtypes) -> Dtypes:
    """Return the dtype of each tensor: `dtype`, unless `others` has its name."""
    different = {name: getattr(torch, other) for name, other in (others or {}).items()}
    return dict.fromkeys(tensors, dtype) | different


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """A copy by the loader: view `src` of canonical `tensor` -> view `dst` of storage `storage`.

    `storage` is a key, see `storage_key`.
    """

    tensor: str
    src: StridedView
    storage: int
    dst: StridedView


@dataclass(frozen=True, slots=True)
class StagedWrite:
    """A write of values computed from canonical `tensors` to view `dst` of `storage`."""

    tensors: tuple[str, ...]
    storage: int
    dst: StridedView


@dataclass(frozen=True)
class Trace:
    """Everything that a loader wrote, in its order.

    Attributes:
        copies: the exact records. None is from a staged tensor or into a storage that one reaches.
        staged_writes: all writes of staged tensors.
        staged: names of the tensors that only the loader can write, in the order they were offered.
        written: keys of all storages with values that the loader wrote, constants included.
    """

    copies: tuple[TracedCopy, ...]
    staged_writes: tuple[StagedWrite, ...]
    staged: tuple[str, ...]
    written: frozenset[int]


def trace_loader(
    load_weights: LoadWeights,
    tensors: Shapes,
    dtypes: Dtypes,
    on_meta: Iterable[torch.Tensor] = (),
) -> Trace:
    """Run `load_weights` once on meta tensors and return what it would write.

    Parameters stay unchanged, except for constants that the loader itself writes (zeros into
    padding).

    Args:
        load_weights: the model's loader.
        tensors: canonical names and shapes; the tensors are offered in this order.
        dtypes: dtype of each canonical tensor.
        on_meta: tensors of the model that are on the meta device, as the offered ones are.

    Raises ModelError, naming the tensor being read, if the loader fails.
    """
    recorder = _Recorder(on_meta)
    offered: list[str] = []

    def offer() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in tensors.items():
            tensor = torch.empty(shape, dtype=dtypes[name], device="meta")
            recorder.declare(name, tensor)
            offered.append(name)
            yield name, tensor

    try:
        with torch.no_grad(), recorder:
            load_weights(offer())
    except Exception as error:
        last = offered[-1] if offered else "the first tensor"
        raise ModelError(
            f"the model's loader failed while {last} {tensors.get(last, ())} was offered: {error}. "
            "Check that names and shapes are those of a checkpoint on disk for this config",
            code="loader-failed",
        ) from error
    return recorder.trace()


def view_of(tensor: torch.Tensor) -> StridedView:
    """Return the positions (in elements) of a tensor's elements in its storage."""
    return StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, valid while the storage lives.

    Equal for all views of the storage, also on the meta device.
    """
    return storage_id(tensor.untyped_storage())


_OVERWRITES = (
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
    torch.ops.aten.copy_.default,
)
"""In-place operations that do not read their target."""


@dataclass(frozen=True, slots=True)
class _TracedStorage:
    """A storage made of elements of canonical tensors: an offered tensor, or a clone.

    Attributes:
        shape: shape of its elements, row-major.
        names: canonical tensors that it has elements of.
        copies: copies that fill it; None for an offered tensor, which is the canonical tensor
            itself.
    """

    shape: tuple[int, ...]
    names: frozenset[str]
    copies: tuple[TracedCopy, ...] | None = None

    def read(self, src: StridedView, storage: int, dst: StridedView) -> list[TracedCopy]:
        """Return the copies from canonical tensors that replace a copy out of this storage.

        The replaced copy reads view `src` of this storage and writes view `dst` of `storage`.
        """
        if self.copies is None:
            (name,) = self.names
            return [TracedCopy(name, src, storage, dst)]
        reads = [
            (read, Region("", read.offsets, read.lengths))
            for read in boxes_of_copy(self.shape, src, dst)
        ]
        composed = []
        for copy in self.copies:
            # Inverted: boxes of the clone, with their places in the tensor as the destination.
            for write in boxes_of_copy(self.shape, copy.dst, copy.src):
                written = Region("", write.offsets, write.lengths)
                for read, needed in reads:
                    common = written.intersect(needed)
                    if common is not None:
                        # The box is read from the tensor at its place in `write`, and stored at its
                        # place in `read`.
                        tensor_view = write.view_of(common)
                        stored_view = read.view_of(common)
                        composed.append(TracedCopy(copy.tensor, tensor_view, storage, stored_view))
        return composed


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records the loader's copies and the inputs of each computed storage."""

    def __init__(self, on_meta: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._of_model = {storage_key(tensor) for tensor in on_meta}
        # Exact, except for keys that `_origins` has as well.
        self._sources: dict[int, _TracedStorage] = {}
        self._origins: dict[int, frozenset[str]] = {}  # storages computed from declared tensors
        self._written: set[int] = set()  # storages with values
        self._scalars: frozenset[str] = frozenset()  # tensors read by .item() so far
        self._copies: list[TracedCopy] = []
        self._staged_writes: list[StagedWrite] = []
        self._offered: list[str] = []
        self._alive: list[torch.Tensor] = []  # a freed storage's key could be reused

    def declare(self, name: str, tensor: torch.Tensor) -> None:
        self._alive.append(tensor)
        self._offered.append(name)
        self._sources[storage_key(tensor)] = _TracedStorage(tuple(tensor.shape), frozenset((name,)))

    def trace(self) -> Trace:
        """Return all records.

        Copies of staged tensors, and copies into storages that a staged tensor reaches, become
        staged writes.
        """
        staged = {name for write in self._staged_writes for name in write.tensors}
        reached = {write.storage for write in self._staged_writes}

        # A staged tensor makes its storages reached, and a reached storage makes its tensors
        # staged; repeat until no copy connects the two sets with the rest.
        while joining := [
            copy for copy in self._copies if (copy.tensor in staged) != (copy.storage in reached)
        ]:
            staged.update(copy.tensor for copy in joining)
            reached.update(copy.storage for copy in joining)

        writes = [
            StagedWrite((copy.tensor,), copy.storage, copy.dst)
            for copy in self._copies
            if copy.tensor in staged
        ]
        return Trace(
            copies=tuple(copy for copy in self._copies if copy.tensor not in staged),
            staged_writes=(*self._staged_writes, *writes),
            staged=tuple(name for name in self._offered if name in staged),
            written=frozenset(self._written),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            # Model or loader on the left, an offered tensor on the right. Any other copy is a write
            # like those below.
            is_load = self._has_values(args[0]) and not self._has_values(args[1])
            if is_load:
                self._record_copy(args[0], args[1])
                return args[0]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # A meta tensor has no value to return; remember that the loader used one.
            self._scalars |= self._origins_of(args)
            return 0.0 if args[0].is_floating_point() else 0
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)

        result = func(*args, **kwargs)
        if func is torch.ops.aten.clone.default and self._is_exact(args[0]):
            self._record_clone(args[0], result)
            return result
        origins = self._origins_of((args, kwargs))
        if origins:
            self._mark_computed((args, kwargs), result, origins)
        return result

    def _is_exact(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._sources and key not in self._origins

    def _has_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor belongs to the loader or the model.

        False for offered tensors and tensors computed from them.
        """
        return not tensor.is_meta or storage_key(tensor) in self._of_model

    def _origins_of(self, values: Any) -> frozenset[str]:
        """Return the names of the declared tensors that flowed into these arguments."""
        origins: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                key = storage_key(leaf)
                source = self._sources.get(key)
                declared = frozenset() if source is None else source.names
                origins |= self._origins.get(key, declared)
        return origins

    def _record_clone(self, src: torch.Tensor, clone: torch.Tensor) -> None:
        view = view_of(clone)
        key = storage_key(clone)
        # The clone of a permuted view may keep its strides, so the source's dims are ordered from
        # the outermost stride in.
        order = dense_order(view)
        assert order is not None, "torch allocates clones without gaps"
        shape = tuple(view.shape[dim] for dim in order)
        source = self._sources[storage_key(src)]
        copies = source.read(view_of(src), key, view)
        self._sources[key] = _TracedStorage(shape, source.names, tuple(copies))
        self._alive.append(clone)

    def _record_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        key = storage_key(dst)
        self._written.add(key)
        if self._is_exact(src):
            source = self._sources[storage_key(src)]
            # `copy_` broadcasts. Expanded, the source has the target's shape, with stride 0 along
            # repeated dims.
            self._copies += source.read(view_of(src.expand(dst.shape)), key, view_of(dst))
        else:
            self._note_staged(dst, self._origins_of(src))
        # The target may be a temporary that the loader computes with later.
        self._alive.append(dst)
        self._origins[key] = self._origins_of((dst, src))

    def _note_staged(self, dst: torch.Tensor, origins: frozenset[str]) -> None:
        names = tuple(sorted(origins))
        self._staged_writes.append(StagedWrite(names, storage_key(dst), view_of(dst)))

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an in-place operation; its target now depends on all its inputs.

        An overwritten target does not depend on its earlier values. But overwriting an offered
        tensor, or a tensor computed from one, invalidates its exact records, and so does
        overwriting the target of recorded copies.
        """
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None:
            return func(*args, **kwargs)
        has_values = self._has_values(target)
        if has_values:
            self._written.add(storage_key(target))

        if func in _OVERWRITES:
            # A target that was offered counts as an input of its own: what it held before is no
            # longer what a checkpoint has, so its exact records end.
            inputs = (args[1:] if has_values else args, kwargs)
            # A scalar from .item() may be the value that is written here.
            origins = self._origins_of(inputs) | self._scalars | self._overwritten(target)
            # The next write after an `.item()` is taken as its use.
            self._scalars = frozenset()
        else:
            origins = self._origins_of((args, kwargs))
        if origins:
            self._alive.append(target)
            self._origins[storage_key(target)] = self._origins_of(target) | origins
            if has_values:
                self._note_staged(target, origins)

        tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        if has_values and not all(map(self._has_values, tensors)):
            return target  # an input on the meta device has no values to write
        return func(*args, **kwargs)

    def _overwritten(self, target: torch.Tensor) -> frozenset[str]:
        """Return the tensors copied to between the first and the last element of `target`."""
        key = storage_key(target)
        if key not in self._origins:  # true for most constants, which are written first
            return frozenset()
        view = view_of(target)
        copies = (copy for copy in self._copies if copy.storage == key)
        return frozenset(
            copy.tensor
            for copy in copies
            if copy.dst.offset < view.stop and view.offset < copy.dst.stop
        )

    def _mark_computed(self, inputs: Any, result: Any, origins: frozenset[str]) -> None:
        """Record that the new storages of an operation depend on `origins`.

        A view shares the storage of an input, whose records stay valid.
        """
        known = {
            storage_key(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in known:
                self._alive.append(leaf)
                self._origins[storage_key(leaf)] = origins


# -- storages in loader layout ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Binding:
    """A module attribute that is a parameter (or a buffer) over a storage."""

    module: str
    attribute: str
    is_parameter: bool

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}" if self.module else self.attribute

    def find(self, modules: NamedModules) -> torch.Tensor | None:
        return getattr(modules[self.module], self.attribute, None)

    def put(self, modules: NamedModules, tensor: torch.Tensor) -> None:
        """Set the attribute to `tensor`, bypassing torch's checks of types and shapes."""
        module = modules[self.module]
        table = module._parameters if self.is_parameter else module._buffers
        # a subclass of Tensor that vLLM uses as a Parameter
        table[self.attribute] = tensor  # type: ignore[assignment]


@dataclass(frozen=True)
class WeightStorage:
    """A storage in loader layout.

    Attributes:
        key: identity of the storage at capture.
        bindings: every place where the model refers to it; the first one names it.
        view: shape, strides and offset of the parameter. Dense: the parameter has no gaps.
        numel: elements of the whole storage; more than the parameter's only if an allocator rounds
            up.
        kind: the parameter's class.
        dtype: dtype of its elements.
        device: device of its elements.
        attributes: attributes that vLLM set on the parameter (`weight_loader`, `output_dim`, …).
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
        return math.prod(self.view.shape)

    def create(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a parameter over `flat` [numel] with the original's class, strides, attributes."""
        return self._wrap(flat.as_strided(self.view.shape, self.view.strides, self.view.offset))

    def placeholder(self) -> torch.Tensor:
        """Return an empty parameter of the same class, to replace released weights."""
        return self._wrap(torch.empty(0, dtype=self.dtype, device=self.device))

    def _wrap(self, data: torch.Tensor) -> torch.Tensor:
        make_subclass = internals.MAKE_SUBCLASS
        tensor: torch.Tensor = make_subclass(self.kind, data, False)
        tensor.__dict__.update(self.attributes)
        return tensor


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D tensor over the whole storage of `tensor`."""
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // tensor.element_size()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, (numel,), (1,))


def dense_order(view: StridedView) -> tuple[int, ...] | None:
    """Return the dims of `view` from the outermost stride in; None if it has gaps or overlaps."""
    order = tuple(sorted(range(len(view.shape)), key=lambda dim: (-view.strides[dim], dim)))
    shape = tuple(view.shape[dim] for dim in order)
    strides = tuple(view.strides[dim] for dim in order)
    dense = contiguous_strides(shape)
    # The stride of a dim of size 1 is never used, so any value fits.
    is_dense = all(
        # Strides (8, 1) of [3, 4] leave gaps, (0, 1) overlap, and (1, 3) are dense, columns
        # outermost.
        size == 1 or stride == expected
        for size, stride, expected in zip(shape, strides, dense, strict=True)
    )
    return order if is_dense else None


def take_inventory(
    model: torch.nn.Module,
    written: Iterable[int],
    constants: Collection[int] = (),
) -> list[WeightStorage]:
    """Return the storages of all parameters and of the buffers in `written`, in the model's order.

    `written` holds keys of storages, `constants` those of parameters to leave out. Raises
    ParameterMismatchError naming parameters that leave gaps in their storage.
    """
    written = frozenset(written)
    places: dict[int, list[tuple[Binding, torch.Tensor]]] = {}
    for module_name, module in model.named_modules():
        tensors = [(name, tensor, True) for name, tensor in module._parameters.items()]
        tensors += [(name, tensor, False) for name, tensor in module._buffers.items()]
        for name, tensor, is_parameter in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            key = storage_key(tensor)
            if (is_parameter or key in written) and key not in constants:
                binding = Binding(module_name, name, is_parameter)
                places.setdefault(key, []).append((binding, tensor))
    storages = list(starmap(_storage_of, places.items()))
    faults = [
        f"{storage.name}: shape {storage.view.shape} with strides "
        f"{storage.view.strides} leaves gaps"
        for storage in storages
        if dense_order(storage.view) is None
    ]
    if faults:
        raise ParameterMismatchError(faults)
    return storages


def _storage_of(key: int, bound: list[tuple[Binding, torch.Tensor]]) -> WeightStorage:
    # A storage may be bound through other views as well, smaller ones or a buffer of another shape.
    _, tensor = max(bound, key=lambda place: (place[1].numel(), place[0].is_parameter))
    view = view_of(tensor)
    return WeightStorage(
        key=key,
        bindings=tuple(binding for binding, other in bound if view_of(other) == view),
        view=view,
        numel=tensor.untyped_storage().nbytes() // tensor.element_size(),
        kind=type(tensor),
        dtype=tensor.dtype,
        device=tensor.device,
        attributes=dict(vars(tensor)),
    )
