"""What vLLM made of a group's weights after loading them, and how the same is made of new ones.

    snapshot = take_snapshot(...)         before vLLM's processing: what modules hold; sentinels in the weights
    ... vLLM's own processing ...
    snapshot.changes(...)                 what it wrote over, of which a `Derivation` is made (processed_model.py)

    with derivation.as_loaded(tensors):   its modules are as the loader left them, and hold these tensors
        ... vLLM's own processing ...     what it wrote is written again
    here                                  its modules are as before

Where the addresses of what vLLM computes with must stay (captured graphs, compiled code), the results are copied into
the tensors that are live, and the modules get back what they held. Elsewhere the results stay where they are, and
nothing is copied.

vLLM's own layerwise reload (model_loader/reload) does the first for parameters and buffers of one layer. It cannot
replace this: it loses a head that is tied to the embedding (tests/hybrid_engine/backends/vllm/test_layerwise_reload.py
says when that changes). Here everything that a group reaches is derived again, so also tensors in methods, kernels and
attention; flags that keep the processing from running twice need no list of names, for what it wrote is taken back
before; and the memory in which weights pass through loader layout is that of one group, not of all layers whose weights
have come in part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.postload import ModuleTensors, Table, display, module_tensors
from hybrid_engine.backends.vllm.weights.tracing import WeightStorage, flat_view, storage_key, view_of
from hybrid_engine.records.regions import StridedView

MISSING = object()
"""What a table has where it has no entry."""


@dataclass(frozen=True)
class LoaderView:
    """A tensor over a storage in loader layout."""

    storage: WeightStorage
    view: StridedView

    def over(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same of other tensors, by storage; empty ones stay empty."""
        tensor = tensors[self.storage.name]
        if self.view == self.storage.view or not tensor.numel():
            return tensor
        return flat_view(tensor).as_strided(self.view.shape, self.view.strides, self.view.offset)


@dataclass(frozen=True)
class Change:
    """An entry that the processing wrote over.

    Attributes:
        table: where; of a list, all of it.
        key: of the entry.
        loaded: what was there before: a value, a `LoaderView`, or `MISSING`.
    """

    table: Table
    key: object
    loaded: object

    def current(self) -> object:
        return list(self.table) if isinstance(self.table, list) else self.table.get(self.key, MISSING)

    def put(self, value: object) -> None:
        if isinstance(self.table, list):
            assert isinstance(value, list)
            self.table[:] = value
        elif value is MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


@dataclass(frozen=True)
class Constant:
    tensor: torch.Tensor
    value: torch.Tensor

    def restore(self) -> None:
        _copy(self.tensor, self.value)

    def is_as_it_was(self) -> bool:
        return same_bytes(self.tensor.cpu(), self.value)


@dataclass(frozen=True)
class Derivation:
    """What vLLM derived from one group's weights.

    Attributes:
        methods: modules whose quantisation method has to process its weights again.
        attention: attention layers that have to process the weights inside them again, after that.
        reached: all modules that these hold things in.
        changes: what their processing wrote over.
        known: keys of storages that are live, or were there before.
        results: path -> tensor that it made, and that vLLM computes with.
        numbers: path -> number that is there beside them; captured graphs hold its value.
    """

    methods: tuple[str, ...]
    attention: tuple[str, ...]
    reached: tuple[str, ...]
    changes: tuple[Change, ...]
    known: frozenset[int]
    results: Mapping[str, torch.Tensor]
    numbers: Mapping[str, float]

    @property
    def first(self) -> str:
        """The module that stands for it in messages."""
        return (*self.methods, *self.attention)[0]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the modules be as the loader left them; these tensors, by storage, take the place of those that it wrote,
        and of views of them."""
        for change in self.changes:
            change.put(_over(change.loaded, tensors))

    @contextlib.contextmanager
    def as_loaded(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within this context the modules are as after `load`, and then as before."""
        present = [change.current() for change in self.changes]
        self.load(tensors)
        try:
            yield
        finally:
            for change, value in zip(self.changes, present, strict=True):
                change.put(value)

    def misfits(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Why what the processing made this time, by path, cannot be copied into the results; in words."""
        faults = [f"{display(path)} is not there again" for path in self.results.keys() - tensors.keys()]
        for path in self.results.keys() & tensors.keys():
            old, new = self.results[path], tensors[path]
            if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                faults.append(f"{display(path)} is {_form(new)}, where it was {_form(old)}")
        return sorted(faults)

    def strays(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, float]) -> list[str]:
        """What the processing made of other weights, by path, beside what is copied; in words."""
        faults = [f"{display(path)} is there in addition" for path in tensors.keys() - self.results.keys()]
        faults += [
            f"{display(path)} is a number that depends on the weights ({number}, then {numbers[path]})"
            for path, number in self.numbers.items()
            if not _same_number(numbers.get(path, number), number)
        ]
        return sorted(faults)

    def renew(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what the processing made of new weights into the tensors that are live."""
        done = set()
        for path, result in self.results.items():
            place = (result.data_ptr(), result.shape, result.stride(), result.dtype)
            if place not in done:
                done.add(place)
                _copy(result.detach(), tensors[path].detach())


def _over(loaded: object, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(loaded, list):
        return [_over(part, tensors) for part in loaded]
    return loaded.over(tensors) if isinstance(loaded, LoaderView) else loaded


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor that may repeat its elements along some dims; then the source must do so too."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def _same_number(one: object, other: object) -> bool:
    """Whether two numbers are the same, or both none."""
    return one == other or (one != one and other != other)


# -- the model before its processing -----------------------------------------------------------------------------------


class Sentinels(Enum):
    """Values by which one sees whether a storage still holds what was put into it, element by element.

    As small as those of vLLM's dummy loader, so that the model computes with them without overflow. The two differ in
    scale too, so that whatever depends on the weights differs.
    """

    LOADED = 0
    REHEARSED = 1

    def write(self, flat: torch.Tensor) -> None:
        for part, values in self._parts(flat):
            part.copy_(values)

    def are_in(self, flat: torch.Tensor) -> bool:
        return all(torch.equal(part, values) for part, values in self._parts(flat))

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        values = _sentinel_values(self.value)[: flat.numel()].to(flat.device, flat.dtype)
        for start in range(0, flat.numel(), _PERIOD):
            part = flat[start : start + _PERIOD]
            yield part, values[: part.numel()]


_PERIOD = 1_048_573  # a prime, lest a permutation of rows or blocks maps the pattern onto itself


@functools.cache
def _sentinel_values(seed: int) -> torch.Tensor:
    """On the host: what is made inside vLLM's memory pool does not outlast its sleep."""
    values = torch.rand(_PERIOD, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)
    return (values * 2 - 1) * (1e-3 / (1 + seed))


@dataclass(frozen=True)
class _TableTensor:
    """A tensor in a table that is no weight, and another over the same elements: the processing may move the first."""

    tensor: torch.Tensor
    alias: torch.Tensor
    key: int
    view: StridedView


@dataclass(frozen=True)
class _ModuleSnapshot:
    """What one module held: its tables and what was in each, its numbers, and what could not be looked into.

    `values`: by path, those of its tensors that are no weights, where the processing may write them.
    """

    tables: tuple[tuple[Table, Table], ...]
    numbers: Mapping[str, float]
    sealed: frozenset[str]
    values: Mapping[str, Constant]


@dataclass(frozen=True)
class Snapshot:
    """What a model's modules held before vLLM's post-load processing; no weight is kept alive by it.

    Attributes:
        storages: by name.
        with_sentinels: names of those that hold sentinels.
        constants: keys of the storages of all tensors that are no weights.
    """

    storages: Mapping[str, WeightStorage]
    with_sentinels: frozenset[str]
    constants: frozenset[int]
    _modules: Mapping[str, _ModuleSnapshot]

    def live(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
        """Storages that all their modules still hold, in the form and with the values that the loader left there."""
        found = {}
        for name, storage in self.storages.items():
            tensors = [binding.find(modules) for binding in storage.bindings]
            if all(tensor is not None and _is_at(tensor, storage.key, storage.view) for tensor in tensors):
                tensor = tensors[0]
                assert tensor is not None
                if name not in self.with_sentinels or Sentinels.LOADED.are_in(flat_view(tensor.detach())):
                    found[name] = tensor
        return found

    def new_sealed(self, modules: Iterable[str], found: ModuleTensors) -> dict[str, str]:
        """What these modules hold, and did not hold before, that cannot be looked into: path -> type."""
        before = {path for name in modules for path in self._modules[name].sealed}
        return {path: type(value).__name__ for path, value in found.sealed.items() if path not in before}

    def has_new_numbers(self, modules: Iterable[str], found: ModuleTensors) -> bool:
        """Whether these modules hold numbers that they did not hold before."""
        before = {path: number for name in modules for path, number in self._modules[name].numbers.items()}
        return not all(_same_number(before.get(path), number) for path, number in found.numbers.items())

    def written(self) -> dict[str, dict[str, Constant]]:
        """Module -> its tensors, by path, that are no weights and were written in place, with their former values."""
        constants = [each for before in self._modules.values() for each in before.values.values()]
        kept = {id(each.value) for each in {id(each.value): each for each in constants}.values() if each.is_as_it_was()}
        found = {
            name: {path: each for path, each in before.values.items() if id(each.value) not in kept}
            for name, before in self._modules.items()
        }
        return {name: constants for name, constants in found.items() if constants}

    def changes(self, modules: Collection[str], live: Collection[str]) -> Iterator[Change]:
        """What the processing wrote in tables of these modules, and references to weights that are not live."""
        for table, contents in (pair for name in modules for pair in self._modules[name].tables):
            if isinstance(table, list):
                parts = list(contents)
                pairs = zip(parts, table, strict=False)
                if len(table) != len(parts) or any(_differs(*pair, live) for pair in pairs):
                    yield Change(table, None, [_value(part) for part in parts])
                continue
            assert isinstance(contents, dict)
            for key in {**contents, **table}:
                loaded = contents.get(key, MISSING)
                if _differs(loaded, table.get(key, MISSING), live):
                    yield Change(table, key, _value(loaded))


def take_snapshot(
    modules: Mapping[str, torch.nn.Module], storages: Mapping[str, WeightStorage], groups: Mapping[str, CommitGroup]
) -> Snapshot:
    """Note what a model holds, and put sentinels into the weights that will be processed."""
    owners = {storage.key: storage for storage in storages.values()}
    held = {name: module_tensors(modules, [name]) for name in modules}
    keys = {storage_key(tensor) for each in held.values() for tensor in each.tensors.values()}
    processed = [name for group in groups.values() if group.methods or group.attention for name in group.storages]
    with_sentinels = frozenset(name for name in processed if storages[name].dtype.is_floating_point)
    for name in with_sentinels:
        tensor = storages[name].bindings[0].find(modules)
        assert tensor is not None, name
        Sentinels.LOADED.write(flat_view(tensor.detach()))
    values = _values(modules, groups, held, owners)
    before = {name: _module_snapshot(each, owners, values.get(name, {})) for name, each in held.items()}
    return Snapshot(storages, with_sentinels, frozenset(keys - owners.keys()), before)


def _values(
    modules: Mapping[str, torch.nn.Module],
    groups: Mapping[str, CommitGroup],
    held: Mapping[str, ModuleTensors],
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


def _module_snapshot(
    held: ModuleTensors, owners: Mapping[int, WeightStorage], values: Mapping[str, Constant]
) -> _ModuleSnapshot:
    def entry(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        key, view = storage_key(value), view_of(value)
        return LoaderView(owners[key], view) if key in owners else _TableTensor(value, value.detach(), key, view)

    def copied(table: Table) -> Table:
        if isinstance(table, list):
            return [entry(value) for value in table]
        return {key: entry(value) for key, value in table.items()}

    tables = tuple((table, copied(table)) for table in held.tables.values())
    return _ModuleSnapshot(tables, held.numbers, frozenset(held.sealed), values)


def _differs(loaded: object, present: object, live: Collection[str]) -> bool:
    """Whether an entry is not what it was; one that referred to weights that are not live never is."""
    if isinstance(loaded, LoaderView):
        is_there = isinstance(present, torch.Tensor) and _is_at(present, loaded.storage.key, loaded.view)
        return loaded.storage.name not in live or not is_there
    if isinstance(loaded, _TableTensor):
        return not (isinstance(present, torch.Tensor) and _is_at(present, loaded.key, loaded.view))
    return present is not loaded


def _value(loaded: object) -> object:
    """What to put back for an entry: of a tensor that was moved its alias."""
    if isinstance(loaded, _TableTensor):
        return loaded.tensor if _is_at(loaded.tensor, loaded.key, loaded.view) else loaded.alias
    return loaded


def _is_at(tensor: torch.Tensor, key: int, view: StridedView) -> bool:
    return storage_key(tensor) == key and view_of(tensor) == view
