"""A model as its loader sees it, kept in mind until vLLM has processed it: what its modules held, but for weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.derivation import ABSENT, Change, Constant, LoaderView, same_number
from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.held import Held, Table, held_by
from hybrid_engine.backends.vllm.weights.marks import Mark, is_marked_dtype
from hybrid_engine.backends.vllm.weights.storages import WeightStorage, flat_view
from hybrid_engine.backends.vllm.weights.tracing import storage_key, view_of
from hybrid_engine.records.regions import StridedView


@dataclass(frozen=True)
class _Constant:
    """A tensor that is no weight, and another over the same elements, for the processing may move the first."""

    tensor: torch.Tensor
    alias: torch.Tensor
    key: int
    view: StridedView

    @property
    def is_in_place(self) -> bool:
        return _is_at(self.tensor, self.key, self.view)


@dataclass(frozen=True)
class _Before:
    """What one module held: its tables and what was in each, its numbers, and what could not be looked into.

    `values`: by path, those of its tensors that are no weights, where the processing may write them.
    """

    tables: tuple[tuple[Table, Table], ...]
    numbers: Mapping[str, float]
    sealed: frozenset[str]
    values: Mapping[str, Constant]


@dataclass(frozen=True)
class LoadedState:
    """What a model held before its processing; no weight is kept alive by it.

    Attributes:
        storages: by name.
        marked: names of those that hold marks.
        constants: keys of the storages of all tensors that are no weights.
    """

    storages: Mapping[str, WeightStorage]
    marked: frozenset[str]
    constants: frozenset[int]
    _before: Mapping[str, _Before]

    def live(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
        """Storages that all their modules still hold, in the form and with the values that the loader left there."""
        found = {}
        for name, storage in self.storages.items():
            tensors = [binding.find(modules) for binding in storage.bindings]
            if all(tensor is not None and _is_at(tensor, storage.key, storage.view) for tensor in tensors):
                tensor = tensors[0]
                assert tensor is not None
                if name not in self.marked or Mark.LOADED.is_in(flat_view(tensor.detach())):
                    found[name] = tensor
        return found

    def new_sealed(self, modules: Iterable[str], held: Held) -> dict[str, str]:
        """What these modules hold, and did not hold before, that cannot be looked into: path -> type."""
        before = {path for name in modules for path in self._before[name].sealed}
        return {path: kind for path, kind in held.sealed.items() if path not in before}

    def has_new_numbers(self, modules: Iterable[str], held: Held) -> bool:
        """Whether these modules hold numbers that they did not hold before."""
        before = {path: number for name in modules for path, number in self._before[name].numbers.items()}
        return not all(same_number(before.get(path), number) for path, number in held.numbers.items())

    def written(self) -> dict[str, dict[str, Constant]]:
        """Module -> its tensors, by path, that are no weights and were written in place, with their former values."""
        constants = [each for before in self._before.values() for each in before.values.values()]
        kept = {id(each.value) for each in {id(each.value): each for each in constants}.values() if each.is_as_it_was()}
        found = {
            name: {path: each for path, each in before.values.items() if id(each.value) not in kept}
            for name, before in self._before.items()
        }
        return {name: constants for name, constants in found.items() if constants}

    def changes(self, modules: Collection[str], live: Collection[str]) -> Iterator[Change]:
        """What the processing wrote in tables of these modules, and references to weights that are not live."""
        for table, contents in (pair for name in modules for pair in self._before[name].tables):
            if isinstance(table, list):
                parts = list(contents)
                pairs = zip(parts, table, strict=False)
                if len(table) != len(parts) or any(_differs(*pair, live) for pair in pairs):
                    yield Change(table, None, [_value(part) for part in parts])
                continue
            assert isinstance(contents, dict)
            for key in {**contents, **table}:
                loaded = contents.get(key, ABSENT)
                if _differs(loaded, table.get(key, ABSENT), live):
                    yield Change(table, key, _value(loaded))


def capture(
    modules: Mapping[str, torch.nn.Module], storages: Mapping[str, WeightStorage], groups: Mapping[str, CommitGroup]
) -> LoadedState:
    """Keep in mind what a model holds, and put marks into the weights that will be processed."""
    owners = {storage.key: storage for storage in storages.values()}
    held = {name: held_by(module, name) for name, module in modules.items()}
    keys = {storage_key(tensor) for each in held.values() for tensor in each.tensors.values()}
    processed = [name for group in groups.values() if group.methods or group.attention for name in group.storages]
    marked = frozenset(name for name in processed if is_marked_dtype(storages[name].dtype))
    for name in marked:
        tensor = storages[name].bindings[0].find(modules)
        assert tensor is not None, name
        Mark.LOADED.write(flat_view(tensor.detach()))
    values = _values(modules, groups, held, owners)
    before = {name: _remembered(each, owners, values.get(name, {})) for name, each in held.items()}
    return LoadedState(storages, marked, frozenset(keys - owners.keys()), before)


def _values(
    modules: Mapping[str, torch.nn.Module],
    groups: Mapping[str, CommitGroup],
    held: Mapping[str, Held],
    owners: Mapping[int, WeightStorage],
) -> dict[str, dict[str, Constant]]:
    """Module that the processing of weights reaches -> its tensors that are no weights, by path; one copy of each."""
    roots = (name for group in groups.values() for name in (*group.methods, *group.attention))
    copies: dict[tuple[int, StridedView, torch.dtype], torch.Tensor] = {}
    found: dict[str, dict[str, Constant]] = {}
    for name in dict.fromkeys(each for root in roots for each in postload.modules_processed(modules, root)):
        for path, tensor in held[name].tensors.items():
            if (key := storage_key(tensor)) in owners or tensor.is_meta or not tensor.numel():
                continue
            place = (key, view_of(tensor), tensor.dtype)
            if place not in copies:
                copies[place] = tensor.detach().cpu().clone()
            found.setdefault(name, {})[path] = Constant(tensor.detach(), copies[place])
    return found


def _remembered(held: Held, owners: Mapping[int, WeightStorage], values: Mapping[str, Constant]) -> _Before:
    def remember(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        key, view = storage_key(value), view_of(value)
        return LoaderView(owners[key], view) if key in owners else _Constant(value, value.detach(), key, view)

    def copied(table: Table) -> Table:
        if isinstance(table, list):
            return [remember(value) for value in table]
        return {key: remember(value) for key, value in table.items()}

    tables = tuple((table, copied(table)) for table in held.tables.values())
    return _Before(tables, held.numbers, frozenset(held.sealed), values)


def _differs(loaded: object, present: object, live: Collection[str]) -> bool:
    """Whether an entry is not what it was; one that referred to weights that are not live never is."""
    if isinstance(loaded, LoaderView):
        is_there = isinstance(present, torch.Tensor) and _is_at(present, loaded.storage.key, loaded.view)
        return loaded.storage.name not in live or not is_there
    if isinstance(loaded, _Constant):
        return not (isinstance(present, torch.Tensor) and _is_at(present, loaded.key, loaded.view))
    return present is not loaded


def _value(loaded: object) -> object:
    if isinstance(loaded, _Constant):
        return loaded.tensor if loaded.is_in_place else loaded.alias
    return loaded


def _is_at(tensor: torch.Tensor, key: int, view: StridedView) -> bool:
    return storage_key(tensor) == key and view_of(tensor) == view
