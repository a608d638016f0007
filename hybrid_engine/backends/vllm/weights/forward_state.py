"""State that layers made in a forward: forgotten before new weights come, so that layers make it anew.

    state = ForwardState.of(...)    once vLLM has processed the weights, before any forward
    ... forwards ...                a layer merges, casts or transposes weights at its first call, and keeps the result
    state.forget()                  before new weights: its layers hold what they held before their first forward

Post-load processing has no part in such state, and neither have the parameters that a switch fills: a kept tensor would
stay that of the first weights. A container (the attributes of a module, a kernel or an attention implementation; a
list; a dict) in which a forward made or wrote a tensor goes back to what it held before, flags included. So do the
entries that the containers around it had; what forwards leave in other containers stays. Where graphs were captured,
these go on computing with what was there at capture, so such a tensor is an error instead, unless it is a global of one
of vLLM's modules: a workspace that layers share.

KV caches are bound after loading and stay, and so do methods that were wrapped.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hybrid_engine.backends.vllm.weights.derivation import MISSING, Change
from hybrid_engine.backends.vllm.weights.postload import ModuleTensors, Table, display, module_tensors, reached_from
from hybrid_engine.backends.vllm.weights.tracing import storage_key
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.ranks.torch_internals import num_writes

_KV_CACHE = "kv_cache"
"""The attribute in which each layer of vLLM that has a KV cache keeps it, once it is bound."""
_SET_LATER = frozenset({_KV_CACHE, "quant_method"})
"""Attributes that vLLM sets after loading and outside of forwards: it binds caches, and may wrap methods."""
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Container:
    """A container that a module reaches, and what it held.

    Attributes:
        path: from the module's name on.
        contents: a copy of the table.
        renewed: keys of entries that each commit of weights puts there anew.
    """

    path: str
    table: Table
    contents: Table
    renewed: frozenset[object]

    def changes(self) -> Iterator[Change]:
        if isinstance(self.table, list):
            if None not in self.renewed and not _are_same(self.table, self.contents):
                yield Change(self.table, None, list(self.contents))
            return
        assert isinstance(self.contents, dict)
        for key in {**self.contents, **self.table}:
            before, now = self.contents.get(key, MISSING), self.table.get(key, MISSING)
            # most are: there are thousands in a switch
            if now is not before and key not in self.renewed and not _is_same(now, before):
                yield Change(self.table, key, before)


def _are_same(one: Collection[object], other: Collection[object]) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _SCALARS) and one == other)


@dataclass(frozen=True)
class _Constant:
    """A tensor that is no weight, and by what one sees whether it was written.

    The profiling forward may write the bytes that are there, for it computes with weights of zero: so
    writes count. What writes past torch changes the digest alone.
    """

    tensor: torch.Tensor
    num_writes: int
    digest: int

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Constant]:
        digests = box_digests(tensors.values())
        pairs = zip(tensors.items(), digests, strict=True)
        return {path: _Constant(tensor, num_writes(tensor), digest) for (path, tensor), digest in pairs}


@dataclass(frozen=True)
class _Untouched:
    """A module before its first forward; `constants` by path."""

    module: torch.nn.Module
    containers: tuple[_Container, ...]
    constants: Mapping[str, _Constant]


@dataclass(frozen=True)
class _Made:
    """What forwards changed in one module.

    Attributes:
        computed: entries with tensors or floats that were not there, and their paths.
        written: paths of tensors that were written in place.
        changes: all entries that are not as before, in containers around any of these.
    """

    module: torch.nn.Module
    computed: Mapping[str, Change]
    written: tuple[str, ...]
    changes: tuple[Change, ...]

    def undo(self) -> None:
        """Put everything back but what vLLM may have added outside of forwards: entries without a tensor, in objects
        that hold none themselves."""
        owners = {id(change.table) for change in self.computed.values()}
        if self.written:
            owners.add(id(vars(self.module)))
        for change in self.changes:
            if change.loaded is not MISSING or id(change.table) in owners:
                change.put(change.loaded)

    def captured(self, known: Collection[int]) -> list[str]:
        """Paths of what graphs may have captured: tensors that were made outside of known storages, or written once."""
        made = []
        for path, change in self.computed.items():
            if reached_from(change.current(), path).outside(known):
                made.append(path)
        has_flags = any(
            isinstance(each.loaded, _SCALARS) and isinstance(each.current(), _SCALARS) for each in self.changes
        )
        return made + list(self.written if has_flags else ())


@dataclass(frozen=True)
class ForwardState:
    """What a model's modules held before their first forward.

    Attributes:
        known: keys of the storages of weights, of what is derived from them, and of tensors that were there.
        has_graphs: whether vLLM captures graphs.
    """

    known: frozenset[int] = frozenset()
    has_graphs: bool = False
    _modules: Mapping[str, _Untouched] = field(default_factory=dict)

    @staticmethod
    def of(
        modules: Mapping[str, torch.nn.Module],
        renewed: Iterable[Change],
        weights: Collection[int],
        has_graphs: bool,
    ) -> ForwardState:
        """
        Args:
            modules: by name, without what commits make of weights where they make it anew.
            renewed: entries that commits put there.
            weights: keys of storages whose bytes commits change.
        """
        found, known, keys = {}, set(weights), dict[int, set[object]]()
        for change in renewed:
            keys.setdefault(id(change.table), set(_SET_LATER)).add(change.key)
        for name, module in modules.items():
            held = module_tensors(modules, [name])
            containers = tuple(
                _container(path, table, keys.get(id(table), _SET_LATER)) for path, table in held.tables.items()
            )
            tensors = {path: each for path, each in held.outside(weights).items() if not each.is_meta}
            known |= {storage_key(tensor) for tensor in tensors.values()}
            constants = _Constant.of({path: tensor.detach() for path, tensor in tensors.items()})
            found[name] = _Untouched(module, containers, constants)
        return ForwardState(frozenset(known), has_graphs, found)

    def forget(self) -> list[str]:
        """Let all modules hold what they held; returns, in words, what cannot be forgotten: then nothing was."""
        known = self.known | self._kv_caches()
        written = _written(self._modules.values())
        found = (_made(module, known, written) for module in self._modules.values())
        made = [each for each in found if each.computed or each.written]
        shared = known | _globals_of_vllm() if made and self.has_graphs else known
        faults = [
            f"{display(path)} ({type(each.module).__name__}) was made in a forward, and captured graphs would go on "
            "computing with it. Set generate_config.enforce_eager to true"
            for each in made
            for path in (each.captured(shared) if self.has_graphs else ())
        ]
        if not faults:
            for each in made:
                each.undo()
        return faults

    def _kv_caches(self) -> frozenset[int]:
        """Keys of their storages: views of them are no state of a forward."""
        caches = (vars(each.module).get(_KV_CACHE) for each in self._modules.values())
        return frozenset(key for cache in caches for key in map(storage_key, reached_from(cache, "").tensors.values()))


def _container(path: str, table: Table, renewed: Collection[object]) -> _Container:
    contents = table.copy()
    if isinstance(contents, dict):
        for key in renewed:
            contents.pop(key, None)  # what is there would be kept alive
    return _Container(path, table, contents, frozenset(renewed))


def _globals_of_vllm() -> frozenset[int]:
    """Keys of the storages of tensors that are globals of vLLM's modules. Tensors inside global lists and dicts do not
    count: these may be caches of what layers made of weights."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]
    values = [value for module in modules for value in vars(module).values()]
    return frozenset(storage_key(value) for value in values if isinstance(value, torch.Tensor))


def _written(modules: Iterable[_Untouched]) -> set[int]:
    """The ids of constants that were written; waits for the device once."""
    constants = [constant for module in modules for constant in module.constants.values()]
    digests = box_digests(constant.tensor for constant in constants)
    return {
        id(constant)
        for constant, digest in zip(constants, digests, strict=True)
        if (num_writes(constant.tensor), digest) != (constant.num_writes, constant.digest)
    }


def _made(before: _Untouched, known: Collection[int], written_ids: Collection[int]) -> _Made:
    """What forwards changed in a module; tensors in known storages, as views of weights, follow these."""
    computed, changes = dict[str, Change](), list[tuple[str, Change]]()
    for container in before.containers:
        for change in container.changes():
            changes.append((container.path, change))
            path = container.path if change.key is None else f"{container.path}.{change.key}"
            if _is_computed(reached_from(change.current(), path), change.loaded, known):
                computed[path] = change
    written = tuple(path for path, constant in before.constants.items() if id(constant) in written_ids)
    paths = [*computed, *written]
    around = tuple(change for outer, change in changes if any(_is_inside(path, outer) for path in paths))
    return _Made(before.module, computed, written, around)


def _is_inside(path: str, outer: str) -> bool:
    return path == outer or (path.startswith(outer) and path[len(outer)] in ".[(")


def _is_computed(present: ModuleTensors, before: object, known: Collection[int]) -> bool:
    """Whether an entry that changed has a tensor that may depend on weights, or a float; or had a tensor."""
    has_floats = any(isinstance(number, float) for number in present.numbers.values())
    return has_floats or bool(present.outside(known)) or isinstance(before, torch.Tensor)
