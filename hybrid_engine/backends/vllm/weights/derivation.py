"""Tensors that vLLM derives from a group's weights, and their derivation from new weights.

    snapshot = take_snapshot(...)         before vLLM's processing; writes sentinels into weights
    ... vLLM's own processing ...
    snapshot.changes(...)                 entries it wrote, for a `Derivation` (processed_model.py)

    with derivation.as_loaded(tensors):   modules as the loader left them, with these tensors
        ... vLLM's own processing ...     writes the same entries again
    here                                  modules are as before

If addresses of tensors that vLLM computes with must stay (captured graphs, compiled code), the
results are copied into the live tensors, and the modules get their former entries back. Otherwise
the results stay where they are, without a copy.

vLLM's own layerwise reload (model_loader/reload) does the former for parameters and buffers of one
layer. It cannot replace this file: it loses a head that is tied to the embedding
(patches/upstream/vllm-tied-head-reload; tests/test_upstream.py fails when that changes). This file
re-derives everything that a group reaches, including tensors in methods, kernels and attention.
Flags that keep the processing from running twice need no special case, because every write is
rolled back first. And only one group's memory passes through loader layout at a time, where
layerwise reload holds all layers whose weights have arrived in part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import starmap

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.groups import CommitGroup, Names
from hybrid_engine.backends.vllm.weights.postload import (
    ModuleTensors,
    Table,
    display,
    module_tensors,
)
from hybrid_engine.backends.vllm.weights.tracing import (
    NamedModules,
    WeightStorage,
    flat_view,
    storage_key,
    view_of,
)
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors
from hybrid_engine.records.regions import StridedView

MISSING = object()
"""Marks an entry that a table does not have."""

_PERIOD = 1_048_573
"""Period of the sentinel pattern in elements: a prime, so that no permutation of rows or blocks
maps the pattern onto itself."""


_BYTE_FACTOR = 256
"""Factor of the pattern in floats of one byte, most of which would be zero otherwise."""


@dataclass(frozen=True)
class LoaderView:
    """A view of a storage in loader layout."""

    storage: WeightStorage
    view: StridedView

    def over(self, tensors: Tensors) -> torch.Tensor:
        """Return the same view of the storage's tensor in `tensors`; an empty one stays empty."""
        tensor = tensors[self.storage.name]
        # The tensor itself where it is all of the storage: it has vLLM's attributes, a new view has
        # none.
        if self.view == self.storage.view or not tensor.numel():
            return tensor
        flat = flat_view(tensor)
        return flat.as_strided(self.view.shape, self.view.strides, self.view.offset)


@dataclass(frozen=True)
class Change:
    """An entry that the processing wrote.

    Attributes:
        table: container of the entry; a list is one entry as a whole.
        key: key of the entry.
        loaded: former value: an object, a `LoaderView`, or `MISSING`.
    """

    table: Table
    key: object
    loaded: object

    def current(self) -> object:
        if isinstance(self.table, list):
            # A copy: `put` writes the list in place.
            return list(self.table)
        return self.table.get(self.key, MISSING)

    def put(self, value: object) -> None:
        if isinstance(self.table, list):
            assert isinstance(value, list)
            self.table[:] = value
        elif value is MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


@dataclass(frozen=True)
class TableCopy:
    """A container, and a copy of its entries at one time.

    Attributes:
        path: path of the container, from the name of its module on.
        entries: the copy; it may have something else in place of an entry.
    """

    path: str
    table: Table
    entries: Table

    def changes(
        self,
        differs: Callable[[object, object], bool],
        former: Callable[[object], object] = lambda entry: entry,
    ) -> Iterator[Change]:
        """Yield the entries that were written since.

        Args:
            differs: whether an entry of the copy and the present one differ.
            former: returns the value to restore for an entry of the copy.
        """
        if isinstance(self.table, list):
            is_longer = len(self.table) != len(self.entries)
            if is_longer or any(map(differs, self.entries, self.table)):
                # A list has no keys, so it is rolled back as a whole.
                yield Change(self.table, None, [*map(former, self.entries)])
            return
        assert isinstance(self.entries, dict)
        # Entries that were removed are only in the copy, new ones only in the table.
        for key in {**self.entries, **self.table}:
            entry = self.entries.get(key, MISSING)
            if differs(entry, self.table.get(key, MISSING)):
                yield Change(self.table, key, former(entry))


@dataclass(frozen=True)
class Constant:
    """A tensor that is not a weight, and a host copy of its value before the processing."""

    tensor: torch.Tensor
    value: torch.Tensor

    def restore(self) -> None:
        _copy(self.tensor, self.value)


Constants = dict[str, dict[str, Constant]]
"""Module -> path -> tensor that is not a weight."""


@dataclass(frozen=True)
class Derivation:
    """Everything that vLLM derived from one group's weights.

    Attributes:
        methods: modules whose quantisation method must process its weights again.
        attention: attention layers that must process the weights inside them after the methods.
        reached: all modules whose contents these may change.
        changes: entries that their processing wrote.
        known: keys of storages that are live, or that existed before the processing.
        results: path -> derived tensor that vLLM computes with.
        numbers: path -> number in the same modules; captured graphs contain its value.
    """

    methods: Names
    attention: Names
    reached: Names
    changes: tuple[Change, ...]
    known: frozenset[int]
    results: Tensors
    numbers: Mapping[str, float]

    @property
    def first(self) -> str:
        """The module that represents it in messages."""
        return (*self.methods, *self.attention)[0]

    def load(self, tensors: Tensors) -> None:
        """Roll the modules back to the state in which the loader left them.

        `tensors`, by storage, replace the tensors that the loader wrote, and views of them.
        """
        for change in self.changes:
            change.put(_over(change.loaded, tensors))

    @contextmanager
    def as_loaded(self, tensors: Tensors) -> Iterator[None]:
        """Roll the modules back as `load` does in this context, and restore them at its end."""
        # Before `load`, which overwrites these entries.
        present = [change.current() for change in self.changes]
        self.load(tensors)
        try:
            yield
        finally:
            for change, value in zip(self.changes, present, strict=True):
                change.put(value)

    def misfits(self, tensors: Tensors) -> list[str]:
        """Return reasons why newly derived tensors, by path, cannot be copied into the results."""
        missing = self.results.keys() - tensors.keys()
        faults = [f"{display(path)} was not derived again" for path in missing]
        for path in self.results.keys() & tensors.keys():
            # Captured graphs depend on the shape, dtype and device of a live tensor.
            old = self.results[path]
            new = tensors[path]
            if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                faults.append(f"{display(path)} is {_form(new)}, but was {_form(old)}")
        return sorted(faults)

    def strays(self, tensors: Tensors, numbers: Mapping[str, float]) -> list[str]:
        """Return descriptions of derived values that copying the results does not cover."""
        additional = tensors.keys() - self.results.keys()
        faults = [f"{display(path)} is an additional tensor" for path in additional]
        faults += [
            f"{display(path)} is a number that depends on the weights "
            f"({number}, then {numbers[path]})"
            for path, number in self.numbers.items()
            if not _same_number(numbers.get(path, number), number)
        ]
        return sorted(faults)

    def renew(self, tensors: Tensors) -> None:
        """Copy newly derived tensors, by path, into the live tensors."""
        done = set()
        for path, result in self.results.items():
            # A shared tensor is found at several paths; it is copied once.
            place = (result.data_ptr(), result.shape, result.stride(), result.dtype)
            if place not in done:
                done.add(place)
                _copy(result.detach(), tensors[path].detach())


def _over(loaded: object, tensors: Tensors) -> object:
    if isinstance(loaded, list):
        return [_over(part, tensors) for part in loaded]
    return loaded.over(tensors) if isinstance(loaded, LoaderView) else loaded


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`; a dim along which `target` repeats its elements is copied once."""
    # `copy_` rejects a target that overlaps itself, as an expanded tensor does.
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target = target.narrow(dim, 0, 1)
            source = source.narrow(dim, 0, 1)
    target.copy_(source)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    # Compared as bytes, because NaN differs from itself.
    return torch.equal(_bytes_of(first), _bytes_of(second))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same_number(first: object, second: object) -> bool:
    """Return whether two numbers are equal, or both NaN."""
    # Only NaN differs from itself.
    return first == second or (first != first and second != second)


# -- the model before its processing ---------------------------------------------------------------


class Sentinels(Enum):
    """Patterns that show, element by element, whether a storage still holds its former values.

    They are as small as the values of vLLM's dummy loader, so that the model computes with them
    without overflow. The two patterns differ in scale as well, so that every value that depends on
    the weights differs between them.
    """

    LOADED = 0
    REHEARSED = 1

    def write(self, flat: torch.Tensor) -> None:
        for part, values in self._parts(flat):
            part.copy_(values)

    def are_in(self, flat: torch.Tensor) -> bool:
        return all(starmap(torch.equal, self._parts(flat)))

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each period of `flat` with the values of the pattern there."""
        pattern = _sentinel_values(self.value)[: flat.numel()]
        if flat.element_size() == 1:
            # e4m3 has no values between 0 and 2**-9, about 0.002, and the pattern is below 0.001.
            # Times 256 it is below 0.256.
            pattern = pattern * _BYTE_FACTOR
        # A single copy to the device serves all periods.
        values = pattern.to(flat.device, flat.dtype)
        for start in range(0, flat.numel(), _PERIOD):
            part = flat[start : start + _PERIOD]
            yield part, values[: part.numel()]


@cache
def _sentinel_values(seed: int) -> torch.Tensor:
    """Return a pattern of `_PERIOD` elements, on the host: vLLM's sleep frees its memory pool."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(_PERIOD, generator=generator, device="cpu", dtype=torch.float32)
    return (values * 2 - 1) * (1e-3 / (1 + seed))


@dataclass(frozen=True)
class _TableTensor:
    """A tensor in a table that is not a weight, and an alias of it.

    The processing may move the tensor to other memory (`.data`); the alias keeps the elements.
    """

    tensor: torch.Tensor
    alias: torch.Tensor
    key: int
    view: StridedView


@dataclass(frozen=True)
class _ModuleSnapshot:
    """Contents of one module before the processing.

    Attributes:
        tables: copies of its tables.
        numbers: path -> number.
        sealed: paths of objects that cannot be inspected.
        values: path -> tensor that is not a weight, if the processing may write it.
    """

    tables: tuple[TableCopy, ...]
    numbers: Mapping[str, float]
    sealed: frozenset[str]
    values: Mapping[str, Constant]


@dataclass(frozen=True)
class ModelSnapshot:
    """Snapshot of a model before vLLM's post-load processing. It keeps no weight alive.

    Attributes:
        storages: name -> storage in loader layout.
        with_sentinels: names of the storages that hold sentinels.
        constants: keys of the storages of all tensors that are not weights.
    """

    storages: Mapping[str, WeightStorage]
    with_sentinels: frozenset[str]
    constants: frozenset[int]
    _modules: Mapping[str, _ModuleSnapshot]

    def live(self, modules: NamedModules) -> TensorDict:
        """Return the storages that all their modules still hold, unchanged in form and values."""
        live = {}
        for name, storage in self.storages.items():
            tensors = [binding.find(modules) for binding in storage.bindings]
            if any(
                tensor is None or not _is_at(tensor, storage.key, storage.view)
                for tensor in tensors
            ):
                continue
            tensor = tensors[0]
            assert tensor is not None
            # The processing may have written other values in place (a shuffle for a kernel).
            has_sentinels = name in self.with_sentinels
            if not has_sentinels or Sentinels.LOADED.are_in(flat_view(tensor.detach())):
                live[name] = tensor
        return live

    def new_sealed(self, modules: Iterable[str], contents: ModuleTensors) -> dict[str, str]:
        """Return the new objects in these modules that cannot be inspected: path -> type.

        `contents`: the modules' present contents.
        """
        before = {path for name in modules for path in self._modules[name].sealed}
        return {
            path: type(value).__name__
            for path, value in contents.sealed.items()
            if path not in before
        }

    def has_new_numbers(self, modules: Iterable[str], contents: ModuleTensors) -> bool:
        """Return whether numbers in these modules are new or have changed."""
        before: dict[str, float] = {}
        for name in modules:
            before |= self._modules[name].numbers
        return not all(
            _same_number(before.get(path), number) for path, number in contents.numbers.items()
        )

    def written(self) -> Constants:
        """Return tensors written in place that are not weights, with their former values.

        The result is module -> path -> tensor.
        """
        # Aliases share one copy of their former value; each distinct tensor is compared once.
        by_value = {
            id(constant.value): constant
            for module in self._modules.values()
            for constant in module.values.values()
        }
        unchanged = {
            key
            for key, constant in by_value.items()
            if same_bytes(constant.tensor.cpu(), constant.value)
        }
        written = {}
        for name, module in self._modules.items():
            constants = {
                path: constant
                for path, constant in module.values.items()
                if id(constant.value) not in unchanged
            }
            if constants:
                written[name] = constants
        return written

    def changes(self, modules: Collection[str], live: Collection[str]) -> Iterator[Change]:
        """Yield the entries that the processing wrote in tables of these modules.

        Entries that refer to weights outside of `live` are included.
        """
        differs = partial(_differs, live=live)
        for name in modules:
            for table in self._modules[name].tables:
                yield from table.changes(differs, _former)


def take_snapshot(
    modules: NamedModules,
    storages: Mapping[str, WeightStorage],
    groups: Mapping[str, CommitGroup],
) -> ModelSnapshot:
    """Record the contents of a model, and write sentinels into weights that will be processed."""
    owners = {storage.key: storage for storage in storages.values()}
    contents = {name: module_tensors(modules, [name]) for name in modules}
    keys = {
        storage_key(tensor) for module in contents.values() for tensor in module.tensors.values()
    }
    with_sentinels = frozenset(
        name
        for group in groups.values()
        if group.methods or group.attention
        for name in group.storages
        # The pattern is of floats. Integers, such as packed weights, stay zero.
        if storages[name].dtype.is_floating_point
    )
    for name in with_sentinels:
        tensor = storages[name].bindings[0].find(modules)
        assert tensor is not None, name
        Sentinels.LOADED.write(flat_view(tensor.detach()))
    values = _values(modules, groups, contents, owners)
    before = {
        name: _module_snapshot(module, owners, values.get(name, {}))
        for name, module in contents.items()
    }
    return ModelSnapshot(storages, with_sentinels, frozenset(keys - owners.keys()), before)


def _values(
    modules: NamedModules,
    groups: Mapping[str, CommitGroup],
    contents: Mapping[str, ModuleTensors],
    owners: Mapping[int, WeightStorage],
) -> Constants:
    """Return the tensors that are not weights in modules that the processing reaches.

    The result is module -> path -> tensor with a copy of its value. Aliases share one copy.
    """
    reached: dict[str, None] = {}  # ordered and distinct
    for group in groups.values():
        for root in (*group.methods, *group.attention):
            reached |= dict.fromkeys(postload.modules_processed(modules, root))
    copies: dict[tuple[int, StridedView, torch.dtype], torch.Tensor] = {}
    values: Constants = {}
    for name in reached:
        for path, tensor in contents[name].tensors.items():
            key = storage_key(tensor)
            # Weights get their values from the next fill, and meta tensors have none.
            if key in owners or tensor.is_meta or not tensor.numel():
                continue
            # Aliases in other modules have the same place.
            place = (key, view_of(tensor), tensor.dtype)
            if place not in copies:
                copies[place] = tensor.detach().cpu().clone()
            values.setdefault(name, {})[path] = Constant(tensor.detach(), copies[place])
    return values


def _module_snapshot(
    contents: ModuleTensors,
    owners: Mapping[int, WeightStorage],
    values: Mapping[str, Constant],
) -> _ModuleSnapshot:
    def entry(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        key = storage_key(value)
        view = view_of(value)
        if key in owners:
            return LoaderView(owners[key], view)
        return _TableTensor(value, value.detach(), key, view)

    def copied(table: Table) -> Table:
        if isinstance(table, list):
            return [entry(value) for value in table]
        return {key: entry(value) for key, value in table.items()}

    tables = contents.tables.items()
    copies = tuple(TableCopy(path, table, copied(table)) for path, table in tables)
    return _ModuleSnapshot(copies, contents.numbers, frozenset(contents.sealed), values)


def _differs(loaded: object, present: object, live: Collection[str]) -> bool:
    """Return whether an entry has changed; True for one that referred to weights not in `live`."""
    if isinstance(loaded, LoaderView):
        # A reference to weights that are not live must be dropped even if it has not changed, or it
        # would keep their memory.
        if loaded.storage.name not in live or not isinstance(present, torch.Tensor):
            return True
        return not _is_at(present, loaded.storage.key, loaded.view)
    if isinstance(loaded, _TableTensor):
        if not isinstance(present, torch.Tensor):
            return True
        # The same object may be in other memory now (`.data`).
        return not _is_at(present, loaded.key, loaded.view)
    return present is not loaded


def _former(loaded: object) -> object:
    """Return the value to restore for an entry: the alias of a tensor that has moved."""
    if isinstance(loaded, _TableTensor):
        is_in_place = _is_at(loaded.tensor, loaded.key, loaded.view)
        return loaded.tensor if is_in_place else loaded.alias
    return loaded


def _is_at(tensor: torch.Tensor, key: int, view: StridedView) -> bool:
    return storage_key(tensor) == key and view_of(tensor) == view
