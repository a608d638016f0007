"""Trace a model's own weight loader once, and know for good where every checkpoint element goes.

    tensors on the meta device  --->  model.load_weights  --->  aten.copy_(parameter view, meta view)
                                                                     |
                                             one TracedCopy: which view of which tensor, which view of which storage

A view on the meta device keeps its storage's identity, offset, shape and strides, so a copy out of it is an exact
record, and nothing is moved while tracing. A copy whose source was computed (a cast, a concatenation, an `.item()`)
has lost that: the tensors that flowed into it are *staged*, that is, written by `load_weights` itself at every
reshard. They are found by following which storages were computed from which tensors.

Nothing here imports vLLM: any module with such a loader can be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import ModelError
from hybrid_engine.ranks.torch_internals import storage_id
from hybrid_engine.records.regions import StridedView

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
        copies: the exact records, none of them from a staged tensor.
        staged_writes: everything that staged tensors reach.
        staged: names of the tensors that only the loader itself can write, sorted.
    """

    copies: tuple[TracedCopy, ...]
    staged_writes: tuple[StagedWrite, ...]
    staged: tuple[str, ...]


def trace_loader(
    load_weights: LoadWeights,
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> Trace:
    """Run `load_weights` once on meta tensors of these names and shapes and return what it would write.

    Args:
        load_weights: the loader.
        tensors: canonical names and shapes.
        dtypes: of all of them.

    The tensors are offered in the order of `tensors`. Parameters are not changed, except that constants the loader
    itself writes (zeros into padding) are. Raises ModelError, naming the tensor being read, when the loader fails.
    """
    recorder = _Recorder()
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


class _Recorder(_DispatchMode):
    """Sees every operation of the loader; records copies and follows which storage was computed from what."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}  # pristine storages of declared tensors
        self._origins: dict[int, frozenset[str]] = {}  # storages computed from declared tensors
        self._scalars: frozenset[str] = frozenset()  # tensors read by .item() so far
        self._copies: list[TracedCopy] = []
        self._staged_writes: list[StagedWrite] = []
        self._alive: list[torch.Tensor] = []  # a freed storage's key could come back as another storage

    def declare(self, name: str, tensor: torch.Tensor) -> None:
        """Register the canonical tensor `name`."""
        self._alive.append(tensor)
        self._names[storage_key(tensor)] = name

    def trace(self) -> Trace:
        """Everything recorded; copies out of staged tensors become staged writes."""
        staged = {name for write in self._staged_writes for name in write.tensors}
        writes = [StagedWrite((copy.tensor,), copy.storage, copy.dst) for copy in self._copies if copy.tensor in staged]
        copies = tuple(copy for copy in self._copies if copy.tensor not in staged)
        return Trace(copies, (*self._staged_writes, *writes), tuple(sorted(staged)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._record_copy(args[0], args[1])
            return args[0]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self._scalars |= self._origins_of(args)
            return 0.0 if args[0].is_floating_point() else 0
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        result = func(*args, **kwargs)
        if origins := self._origins_of((args, kwargs)):
            self._mark_computed((args, kwargs), result, origins)
        return result

    def _origins_of(self, values: Any) -> frozenset[str]:
        """Names of the declared tensors that flowed into these arguments."""
        origins: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                key = storage_key(leaf)
                name = self._names.get(key)
                origins |= self._origins.get(key, frozenset() if name is None else frozenset((name,)))
        return origins

    def _record_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        key = storage_key(src)
        if key in self._names and key not in self._origins:
            expanded = src.expand(dst.shape)
            self._copies.append(TracedCopy(self._names[key], view_of(expanded), storage_key(dst), view_of(dst)))
        else:
            self._note_staged(dst, self._origins_of(src))
        # What was copied to may be a temporary that is computed with later.
        self._alive.append(dst)
        self._origins[storage_key(dst)] = self._origins_of((dst, src))

    def _note_staged(self, dst: torch.Tensor, origins: frozenset[str]) -> None:
        self._staged_writes.append(StagedWrite(tuple(sorted(origins)), storage_key(dst), view_of(dst)))

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An in-place operation: its target now depends on everything that went in, or on nothing if overwritten."""
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None:
            return func(*args, **kwargs)
        if func in _OVERWRITES:
            origins = self._origins_of((args[1:], kwargs)) | self._scalars
            self._scalars = frozenset()
        else:
            origins = self._origins_of((args, kwargs))
        if origins:
            self._alive.append(target)
            self._origins[storage_key(target)] = self._origins_of(target) | origins
            if not target.is_meta:
                self._note_staged(target, origins)
        if not target.is_meta and any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(args)):
            return target  # values that do not exist cannot be written
        return func(*args, **kwargs)

    def _mark_computed(self, inputs: Any, result: Any, origins: frozenset[str]) -> None:
        """An operation's new storages depend on its inputs; a view has its input's storage and stays what it was."""
        known = {storage_key(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in known:
                self._alive.append(leaf)
                self._origins[storage_key(leaf)] = origins
