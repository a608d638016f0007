"""Trace a model's own weight loader once: which checkpoint element goes where in which storage.

    tensors on the meta device  --->  model.load_weights  --->  aten.copy_(parameter view, meta view)
                                                                     |
                                             one TracedCopy: which view of which tensor, which view of which storage

A view on the meta device keeps its storage's identity, offset, shape and strides, so a copy out of it is an exact
record, and nothing is moved while tracing. A clone (`contiguous`, `reshape`) is a storage of its own, filled by such a
copy; copies out of it are composed with that. A copy whose source was computed (a cast, a concatenation, an `.item()`)
or written by the loader has lost all that: the tensors that flowed into it are *staged*, that is, written by
`load_weights` itself at every reshard. They are found by following which storages were computed from which tensors.

A storage is written either by records or by the loader: where it writes one staged tensor it may write the rest too,
and what came from elsewhere before would be lost.

`take_inventory` lists the storages behind the parameters as the loader sees them, before vLLM repacks anything: a tied
head is one storage bound in two modules. Nothing here imports vLLM: any module with such a loader can be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import ModelError, ParameterMismatchError
from hybrid_engine.ranks.torch_internals import storage_id
from hybrid_engine.records.regions import Region, StridedView, boxes_of_copy, contiguous_strides

_DispatchMode: Any = internals.DISPATCH_MODE.load()
tree_leaves = internals.TREE_LEAVES.load()

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """The loader copies view `src` of canonical `tensor` to view `dst` of the storage with key `storage`."""

    tensor: str
    src: StridedView
    storage: int
    dst: StridedView


@dataclass(frozen=True, slots=True)
class StagedWrite:
    """The loader writes view `dst` of storage `storage` with values computed from canonical `tensors`."""

    tensors: tuple[str, ...]
    storage: int
    dst: StridedView


@dataclass(frozen=True)
class Trace:
    """What a loader did, in its order.

    Attributes:
        copies: the exact records, none of them from a staged tensor or into a storage that one reaches.
        staged_writes: everything that staged tensors reach.
        staged: names of the tensors that only the loader itself can write, in the order in which they were offered.
        written: keys of all storages with values that the loader wrote, be it with constants.
    """

    copies: tuple[TracedCopy, ...]
    staged_writes: tuple[StagedWrite, ...]
    staged: tuple[str, ...]
    written: frozenset[int]


def trace_loader(
    load_weights: LoadWeights,
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    on_meta: Iterable[torch.Tensor] = (),
) -> Trace:
    """Run `load_weights` once on meta tensors of these canonical names, shapes and dtypes; return what it would write.

    The tensors are offered in the order of `tensors`. Parameters are not changed, except that constants the loader
    itself writes (zeros into padding) are. Raises ModelError, naming the tensor being read, when the loader fails.
    `on_meta`: tensors of the model that are on the meta device, as the offered ones are.
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
            f"the model's loader failed while {last} {tensors.get(last, ())} was offered: {error}. Check that names "
            "and shapes are those of a checkpoint on disk for this config"
        ) from error
    return recorder.trace()


def view_of(tensor: torch.Tensor) -> StridedView:
    """Where a tensor's elements lie in its storage."""
    return StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage while it lives; equal for all views, also on the meta device."""
    return storage_id(tensor.untyped_storage())


_OVERWRITES = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default, torch.ops.aten.copy_.default)
"""In-place operations that do not read their target."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A storage of which every element is one of a canonical tensor: an offered tensor's, or a clone's.

    Attributes:
        shape: of its elements, row-major.
        names: of the canonical tensors that it has elements of.
        copies: that fill it; None for an offered tensor, which is the canonical tensor itself.
    """

    shape: tuple[int, ...]
    names: frozenset[str]
    copies: tuple[TracedCopy, ...] | None = None

    def read(self, src: StridedView, storage: int, dst: StridedView) -> list[TracedCopy]:
        """The copies from canonical tensors that make up a copy of view `src` of this storage to `dst` of another."""
        if self.copies is None:
            (name,) = self.names
            return [TracedCopy(name, src, storage, dst)]
        reads = [(read, Region("", read.offsets, read.lengths)) for read in boxes_of_copy(self.shape, src, dst)]
        composed = []
        for copy in self.copies:
            for write in boxes_of_copy(self.shape, copy.dst, copy.src):
                written = Region("", write.offsets, write.lengths)
                for read, needed in reads:
                    if (common := written.intersect(needed)) is not None:
                        composed.append(TracedCopy(copy.tensor, write.view_of(common), storage, read.view_of(common)))
        return composed


class _Recorder(_DispatchMode):
    """Sees every operation of the loader; records copies and follows which storage was computed from what."""

    def __init__(self, on_meta: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._of_model = {storage_key(tensor) for tensor in on_meta}
        self._sources: dict[int, _Source] = {}  # exact unless in `_origins` too
        self._origins: dict[int, frozenset[str]] = {}  # storages computed from declared tensors
        self._written: set[int] = set()  # storages with values
        self._scalars: frozenset[str] = frozenset()  # tensors read by .item() so far
        self._copies: list[TracedCopy] = []
        self._staged_writes: list[StagedWrite] = []
        self._offered: list[str] = []
        self._alive: list[torch.Tensor] = []  # a freed storage's key could come back as another storage

    def declare(self, name: str, tensor: torch.Tensor) -> None:
        self._alive.append(tensor)
        self._offered.append(name)
        self._sources[storage_key(tensor)] = _Source(tuple(tensor.shape), frozenset((name,)))

    def trace(self) -> Trace:
        """Everything recorded; copies of staged tensors, or into storages that one reaches, become staged writes."""
        staged = {name for write in self._staged_writes for name in write.tensors}
        reached = {write.storage for write in self._staged_writes}
        while joining := [copy for copy in self._copies if (copy.tensor in staged) != (copy.storage in reached)]:
            staged.update(copy.tensor for copy in joining)
            reached.update(copy.storage for copy in joining)
        writes = [StagedWrite((copy.tensor,), copy.storage, copy.dst) for copy in self._copies if copy.tensor in staged]
        copies = tuple(copy for copy in self._copies if copy.tensor not in staged)
        names = tuple(name for name in self._offered if name in staged)
        return Trace(copies, (*self._staged_writes, *writes), names, frozenset(self._written))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and not self._has_values(args[1]) and self._has_values(args[0]):
            self._record_copy(args[0], args[1])
            return args[0]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self._scalars |= self._origins_of(args)
            return 0.0 if args[0].is_floating_point() else 0
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.clone.default and self._is_exact(args[0]):
            self._record_clone(args[0], result)
        elif origins := self._origins_of((args, kwargs)):
            self._mark_computed((args, kwargs), result, origins)
        return result

    def _is_exact(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._sources and key not in self._origins

    def _has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the loader's or the model's own, rather than an offered one or computed from these."""
        return not tensor.is_meta or storage_key(tensor) in self._of_model

    def _origins_of(self, values: Any) -> frozenset[str]:
        """Names of the declared tensors that flowed into these arguments."""
        origins: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                key = storage_key(leaf)
                source = self._sources.get(key)
                origins |= self._origins.get(key, frozenset() if source is None else source.names)
        return origins

    def _record_clone(self, src: torch.Tensor, clone: torch.Tensor) -> None:
        """The clone of a view of a permuted tensor may have its strides: the source's dims go from the outermost in."""
        view, key = view_of(clone), storage_key(clone)
        order = dense_order(view)
        assert order is not None, "torch allocates clones without gaps"
        source = self._sources[storage_key(src)]
        shape = tuple(view.shape[dim] for dim in order)
        self._sources[key] = _Source(shape, source.names, tuple(source.read(view_of(src), key, view)))
        self._alive.append(clone)

    def _record_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._written.add(storage_key(dst))
        if self._is_exact(src):
            source = self._sources[storage_key(src)]
            self._copies += source.read(view_of(src.expand(dst.shape)), storage_key(dst), view_of(dst))
        else:
            self._note_staged(dst, self._origins_of(src))
        # What was copied to may be a temporary that is computed with later.
        self._alive.append(dst)
        self._origins[storage_key(dst)] = self._origins_of((dst, src))

    def _note_staged(self, dst: torch.Tensor, origins: frozenset[str]) -> None:
        self._staged_writes.append(StagedWrite(tuple(sorted(origins)), storage_key(dst), view_of(dst)))

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An in-place operation: its target now depends on everything that went in.

        If it is overwritten, on nothing before. But then no record is exact any more of a tensor that was offered, or
        computed from one, and of copies into what is overwritten.
        """
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None:
            return func(*args, **kwargs)
        has_values = self._has_values(target)
        if has_values:
            self._written.add(storage_key(target))
        if func in _OVERWRITES:
            read = (args[1:] if has_values else args, kwargs)
            origins = self._origins_of(read) | self._scalars | self._overwritten(target)
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
            return target  # values that do not exist cannot be written
        return func(*args, **kwargs)

    def _overwritten(self, target: torch.Tensor) -> frozenset[str]:
        """Names of the tensors that were copied to where a tensor lies, or between its first element and its last."""
        key, view = storage_key(target), view_of(target)
        if key not in self._origins:  # of most constants, which are written before anything else
            return frozenset()
        into = (copy for copy in self._copies if copy.storage == key)
        return frozenset(copy.tensor for copy in into if copy.dst.offset < view.stop and view.offset < copy.dst.stop)

    def _mark_computed(self, inputs: Any, result: Any, origins: frozenset[str]) -> None:
        """An operation's new storages depend on its inputs; a view has its input's storage and stays what it was."""
        known = {storage_key(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in known:
                self._alive.append(leaf)
                self._origins[storage_key(leaf)] = origins


# -- storages in loader layout ----------------------------------------------------------------------------------------


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
